# `make` lists what there is to do. Everything happens in .venv, which is made at need with the versions of constraints.txt.

PYTHON ?= python3
EXTRAS ?= dev,envs
WORKERS ?= 2
ARGS ?=

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
# The stacks of a test that hangs are printed shortly before its timeout kills its process.
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow check fmt bench pins clean FORCE

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Variables: ARGS (for train, bench, test, test-slow), PYTHON, EXTRAS (for setup), WORKERS (for test)"

setup: $(STAMP)  ## Make .venv with the pinned versions; EXTRAS=dev,envs,gpu adds the gpu extra

train: $(STAMP)  ## Train: make train ARGS="algo=ppo seed=1"
	@$(PY) -m rlexp $(ARGS)

test: $(STAMP)  ## Every correctness test, in parallel, on the CPU
	$(PYTEST) -o faulthandler_timeout=110 -m "not slow and not unproven" $(ARGS)

test-slow: $(STAMP)  ## The learning bars and whatever else takes long
	$(PYTEST) -o faulthandler_timeout=880 -m "slow and not unproven" $(ARGS)

check: $(STAMP)  ## Formatting, lints, types, and who may import whom
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright
	$(VENV)/bin/lint-imports --no-logo

fmt: $(STAMP)  ## Format, and mend the lints that mend themselves
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

bench: $(STAMP)  ## Measure: make bench ARGS="..."
	@$(PY) -m benchmarks $(ARGS)

pins:  ## Resolve constraints.txt anew; needs python3.11 and python3.12, or PINS="..." naming interpreters
	.ci/pins $(or $(PINS),python3.11 python3.12)

clean:  ## Remove .venv, builds and caches; runs in outputs/ and multirun/ stay
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .bench
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Other extras than last time, named on the command line, are installed even if nothing else has changed.
ifeq ($(origin EXTRAS),command line)
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo 'error: $(PYTHON) is not Python 3.11 or newer; name one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo 'error: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@
