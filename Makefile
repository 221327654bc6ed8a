# `make demo`: the loss over the learning rate at four widths, in five minutes on two slow cores. `make test`: the tests.
# CI runs them, `make kills` and what else .ci/run names. None takes input.
.PHONY: demo demo-quick test package start-up kills test-slow test-torch test-targets docs docs-starters docs-plan docs-accuracy clean
.DEFAULT_GOAL := test
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/installed
	@$(BIN)/leaven demo

# The same with fewer widths, in a minute, into a folder that is removed.
demo-quick: .venv/installed
	@folder=$$(mktemp -d) && $(BIN)/leaven demo --quick --run $$folder/demo; status=$$?; rm -rf $$folder; exit $$status

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup -m "not slow and not kills"

# Wheel and source distribution, built, installed into empty environments and used there, without and with `[train]`.
package:
	PYTHON=$(PYTHON) .ci/package

# The processor time of verbs that need no torch, as a ratio to the packages that all of them import.
start-up: .venv/installed
	$(BIN)/python benchmarks/start_up.py --check

kills: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup -m kills
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m benchmarks.kills 5 --layout 2,2,2

notebooks: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.notebooks

test-slow: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

# Another torch than the one in constraints.txt, once a release with the oldest and the newest: make test-torch TORCH=2.11.0,
# make test-torch TORCH=newest
TORCH ?= 2.11.0
test-torch:
	@$(PYTHON) -m venv .venv-torch-$(TORCH)
	@.venv-torch-$(TORCH)/bin/pip install --quiet --disable-pip-version-check torch$(if $(filter newest,$(TORCH)),,==$(TORCH)) -e '.[train,dev]'
	OMP_NUM_THREADS=1 .venv-torch-$(TORCH)/bin/pytest -m "not slow and not kills" tests/model tests/distributed

# The targets of `leaven export config` with their own parsers. litgpt asks for an older huggingface-hub than transformers
# does, which comes second and wins; litgpt's parser does not mind.
TARGETS := litgpt==0.5.13 jsonargparse deepspeed==0.19.8 torchtitan==0.3.0 triton megatron-core==0.16.1 accelerate
test-targets: .venv-targets/installed
	OMP_NUM_THREADS=1 .venv-targets/bin/pytest tests/interop/configs

.venv-targets/installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-targets
	@.venv-targets/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch $(TARGETS)
	@.venv-targets/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leaven needs Python 3.11 or newer; this is %d.%d. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version_info[:2])'
	@echo "setting up .venv once (a minute or two; torch is the long part)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

# The site, into build/site. A broken link or an unlisted page fails.
docs: .venv/installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# What docs/how-to/starters.md quotes of `leaven new`, as it is now.
docs-starters: .venv/installed
	$(BIN)/python benchmarks/starters.py

# What docs/reference/overview.md and docs/concepts/planning.md quote of `leaven plan`, as it is now.
docs-plan: .venv/installed
	$(BIN)/python benchmarks/quoted.py

# The table and the picture of docs/evidence/planner-accuracy.md.
docs-accuracy: .venv/installed
	$(BIN)/python benchmarks/planner_accuracy.py --page; test $$? -lt 2

clean:
	rm -rf .venv .venv-targets .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
