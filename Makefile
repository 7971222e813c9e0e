# Every target sets up its own virtual environment, .venv, on first use and again when the requirements change.
#
#   PYTHON  interpreter to build it with, 3.11 or newer
#   TORCH   how to ask pip for torch, where the plain wheel is not the one wanted, for example the CPU-only one:
#           make test TORCH="torch --index-url <index of CPU wheels>"
#   SEED    seed of the demo

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
TORCH ?= torch
SEED ?= 0

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check --no-input
READY := $(VENV)/.ready

# Flower reports usage unless told not to. Tests run many processes on few cores: one thread each is faster.
export FLWR_TELEMETRY_ENABLED := 0
test test-fast test-slow bench: export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-slow lint bench

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## Train a digits model with a server and five clients on this machine (SEED=n)
	@rm -rf runs/demo
	@$(RUN) simulations/demo.py --seed $(SEED)

test: lint test-fast ## Static checks, then every test that takes seconds

test-fast: $(READY)
	@$(RUN) -m pytest -m "not slow and not chaos and not gpu"

test-slow: $(READY) ## The tests that take minutes
	@$(RUN) -m pytest -m "(slow or chaos) and not gpu"

lint: $(READY) ## Style, format and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy fedtrain strategies

bench: $(READY) ## Run the benchmarks in tests/bench
	@for script in $(wildcard tests/bench/*.py); do echo "$$script"; $(RUN) $$script || exit 1; done

# torch comes first and alone, so that the choice of its build is made by TORCH and not by a requirement of ours.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "fedtrain needs Python 3.11 or newer, none was found: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV) (minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --constraint constraints.txt $(TORCH)
	@$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@
