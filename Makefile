# `make demo` takes about five minutes on two slow cores; `make test` runs the tests, except those that take long. .ci/run
# lists what CI runs. No target takes input.
.PHONY: demo demo-quick test test-long package start-up kills test-slow test-torch test-targets prove-exports docs docs-quoted docs-accuracy clean
.DEFAULT_GOAL := test
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/installed
	@$(BIN)/leaven demo

# The demo with fewer widths, which takes a minute. Its folder is removed.
demo-quick: .venv/installed
	@folder=$$(mktemp -d) && $(BIN)/leaven demo --quick --run $$folder/demo; status=$$?; rm -rf $$folder; exit $$status

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup -m "not long and not slow and not kills"

test-long: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup -m "long and not slow and not kills"

# Build wheel and source distribution, install them into empty environments, and use them there, without and with `[train]`.
package:
	PYTHON=$(PYTHON) .ci/package

# Print the processor time of commands that need no torch, relative to that of the packages which all of them import.
start-up: .venv/installed
	$(BIN)/python benchmarks/start_up.py

kills: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup -m kills
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m benchmarks.kills 5 --layout 2,2,2

notebooks: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.notebooks

test-slow: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

# Test with another torch than the one in constraints.txt. Before a release: make test-torch TORCH=2.11.0 (the oldest) and
# make test-torch TORCH=newest
TORCH ?= 2.11.0
test-torch:
	@$(PYTHON) -m venv .venv-torch-$(TORCH)
	@.venv-torch-$(TORCH)/bin/pip install --quiet --disable-pip-version-check torch$(if $(filter newest,$(TORCH)),,==$(TORCH)) -e '.[train,dev]'
	OMP_NUM_THREADS=1 .venv-torch-$(TORCH)/bin/pytest -m "not slow and not kills" tests/model tests/distributed

# Read exported configurations with the parsers of the target codes. litgpt asks for an older huggingface-hub than transformers, which
# is installed second and wins; litgpt's parser works with it. Of nemo-automodel only optimizer and scheduler are used.
TARGETS := litgpt==0.5.13 jsonargparse deepspeed==0.19.8 torchtitan==0.3.0 triton megatron-core==0.16.1
test-targets: .venv-targets/installed
	OMP_NUM_THREADS=1 .venv-targets/bin/pytest tests/interop/configs

# Train exported recipes with their targets, and update the table in docs/how-to/export.md. DeepSpeed compiles its Adam the first time.
prove-exports: .venv-targets/installed
	OMP_NUM_THREADS=1 .venv-targets/bin/python -m benchmarks.prove_exports --page

.venv-targets/installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-targets
	@.venv-targets/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch $(TARGETS)
	@.venv-targets/bin/pip install --quiet --disable-pip-version-check --no-deps nemo-automodel==0.7.0
	@.venv-targets/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leaven needs Python 3.11 or newer; this is %d.%d. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version_info[:2])'
	@echo "setting up .venv once (a minute or two; torch is the long part)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

# Build the site into build/site. A broken link or an unlisted page is an error.
docs: .venv/installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Update the output of `leaven new` and `leaven plan` in the pages of docs that quote it.
docs-quoted: .venv/installed
	$(BIN)/python benchmarks/quoted.py

# Update the table and the chart of docs/evidence/planner-accuracy.md.
docs-accuracy: .venv/installed
	$(BIN)/python benchmarks/planner_accuracy.py --page; test $$? -lt 2

clean:
	rm -rf .venv .venv-targets .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
