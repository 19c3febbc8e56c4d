# From a clone to a trained model: `make mnist`. Everything is installed into .venv, nothing outside this folder.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Further arguments for the program behind a target: make mnist ARGS="--epochs 1", make test ARGS="-k views"
ARGS ?=

# Stamps: an installation is repeated only when pyproject.toml has changed since.
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
MODELS := $(VENV)/.installed-models

.DEFAULT_GOAL := help
.PHONY: help mnist gpt test operators test-models kill-test test-sharding fuzz check format setup clean distclean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

mnist: $(RUNTIME)  ## install, then train the MNIST recipe
	$(BIN)/python recipes/mnist.py $(ARGS)

gpt: $(RUNTIME)  ## install, then train a small GPT on a play: make gpt ARGS="--strategy fsdp"
	$(BIN)/python recipes/gpt.py $(ARGS)

test: $(DEV)  ## install with the development tools, then run the tests
	scripts/test $(ARGS)

operators: $(DEV)  ## compare every operator of torch's database with the CPU (minutes)
	$(BIN)/python -m pytest -m "" -n auto --maxprocesses 8 tests/backend/test_opinfo.py tests/backend/test_opinfo_out.py \
	  --deselect tests/backend/test_opinfo.py::test_everyday_operator $(ARGS)

test-models: $(MODELS)  ## train models of torchvision, transformers and timm on both devices (long)
	$(BIN)/python -m pytest -m models tests/models $(ARGS)

test-sharding: $(DEV)  ## train with every strategy on eight CPU devices (minutes)
	$(BIN)/python -m pytest -m "" tests/strategies tests/distributed $(ARGS)

kill-test: $(DEV)  ## kill a training 20 times and compare it with one that was left alone (minutes)
	$(BIN)/python -m pytest -m slow -s tests/trainer/test_kill.py $(ARGS)

fuzz: $(DEV)  ## feed damaged files to what reads records and cached samples (minutes)
	$(BIN)/python -m pytest -m "" $(wildcard tests/data/test_*fuzz*.py) $(ARGS)

check: $(DEV)  ## all that CI runs: format, lint, types, house rules, tests
	scripts/check $(ARGS)

format: $(DEV)  ## format the code and apply the linter's safe fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

setup: $(DEV)  ## install with the development tools, run nothing

clean:  ## remove caches and build outputs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv too
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "xlatrainer needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another interpreter: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e .
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $(RUNTIME) $@

$(MODELS): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[dev,models]'
	@touch $(RUNTIME) $(DEV) $@
