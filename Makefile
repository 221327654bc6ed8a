# `make demo`: the whole way on real text, about ten minutes. `make test`: everything CI runs. Neither takes input.
.PHONY: demo test test-slow clean
.DEFAULT_GOAL := test
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

demo: .venv/installed
	OMP_NUM_THREADS= $(BIN)/leaven demo

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 -m "not slow"

test-slow: .venv/installed
	$(BIN)/pytest -m slow

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "leaven needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.12 $(MAKECMDGOALS)" % v[:2])'
	@echo "setting up .venv (once; torch is the long part, a minute or two)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
