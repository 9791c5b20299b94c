# `make` lists what there is to do. Everything happens in .venv, which is made at need with the versions of constraints.txt.

PYTHON ?= python3
EXTRAS ?= dev,envs
WORKERS ?= 2
ARGS ?=

SHELL := /bin/bash
# Another Python beside it: make test PYTHON=python3.13 VENV=.venv-3.13
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
# The TPU compiler lies apart: in the everyday environment it would make every start of JAX slower and noisy.
LIBTPU := .libtpu
# The other Hydra that we support lies apart too: these come before what .venv has.
HYDRA14 := .hydra14
HYDRA14_VERSION := 1.4.0rc3
HYDRA14_OMEGACONF := 2.4.1rc1
# A Reverb server, which runs on Python 3.11 only, and TensorFlow's of that time.
REVERB := .reverb
REVERB_PYTHON ?= python3.11
# TensorFlow, which only reads and writes the records that env=womd reads.
TENSORFLOW := .tensorflow
# The stacks of a test that hangs are printed shortly before its timeout kills its process.
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal
# Half of the tests' time is compiling programs that then run for a moment, and threads of NumPy's products of several processes
# would fight for the cores. The slow ones run what users run.
COMPILED_QUICKLY = XLA_FLAGS="$$($(PY) tests/xla_flags.py)" OPENBLAS_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: reference help setup libtpu reverb tensorflow train test test-hydra14 test-playground test-reverb test-tensorflow test-slow test-all check fmt bench pins clean FORCE

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Variables: ARGS (for train, bench, test, test-hydra14, test-playground, test-slow, test-all), PYTHON, EXTRAS (for setup), WORKERS (for test)"

setup: $(STAMP)  ## Make .venv with the pinned versions; EXTRAS=dev,envs,gpu adds the gpu extra

libtpu: $(LIBTPU)/.stamp  ## Fetch the TPU compiler, 700 MB, which tests of run=plan and `make bench` use

reverb: $(REVERB)/.stamp  ## Make .reverb with a Reverb server, 2 GB, which test-reverb and `make bench` use; needs Python 3.11

tensorflow: $(TENSORFLOW)/.stamp  ## Make .tensorflow, 2 GB, which test-tensorflow uses

train: $(STAMP)  ## Train: make train ARGS="algo=ppo seed=1"
	@$(PY) -m rlexp $(ARGS)

# With nothing named, all that take little, and one share of those that take more: see tests/rotation.py.
test: $(STAMP) $(LIBTPU)/.stamp  ## The correctness tests, in parallel, on the CPU: ARGS=--share=1/1 for all, or what ARGS names
	$(COMPILED_QUICKLY) $(PYTEST) -o faulthandler_timeout=110 -m "not slow" $(or $(ARGS),--share=auto)

# Hydra's own suite, test_conformance.py, is asked of 1.3 only, and a browser knows no Hydra. A test sees to it that this
# Hydra is the one that runs.
test-hydra14: $(STAMP) $(HYDRA14)/.stamp  ## The tests of sweeps, on Hydra 1.4
	$(COMPILED_QUICKLY) RLEXP_HYDRA=$(HYDRA14_VERSION) PYTHONPATH=$(CURDIR)/$(HYDRA14) $(PYTEST) -o faulthandler_timeout=880 \
	    -m "not slow or hydra14" -k "not in_a_browser" --ignore tests/sweep/test_conformance.py tests/sweep $(ARGS)

# Too heavy for every push: by hand, when replay has changed, and before a release.
test-reverb: $(STAMP) $(REVERB)/.stamp  ## Replay against a real Reverb server
	$(COMPILED_QUICKLY) $(PYTEST) -o faulthandler_timeout=880 tests/replay/test_against_reverb.py $(ARGS)

# 2 GB in an environment of its own: continuous integration has it with every fourth commit.
test-tensorflow: $(STAMP) $(TENSORFLOW)/.stamp  ## Records of driving against TensorFlow's own reader and writer
	$(COMPILED_QUICKLY) $(PYTEST) -o faulthandler_timeout=880 tests/envs/test_womd_against_tensorflow.py $(ARGS)

# Apart, since it is 150 MB and nothing else needs it: it stays in .venv.
test-playground:  ## The tests of MuJoCo Playground, which is installed for them
	$(MAKE) setup EXTRAS=dev,envs,playground
	$(PY) -c 'import rlexp, mujoco_playground'  # else its tests would be skipped
	$(PYTEST) -o faulthandler_timeout=880 -k playground tests/envs tests/benchmarks/test_suites_recipes.py tests/learning/test_worlds.py $(ARGS)

# With nothing named, one share of them: see tests/rotation.py.
test-slow: $(STAMP) $(LIBTPU)/.stamp  ## Of the learning bars and whatever else takes long, today's share, or what ARGS names
	$(PYTEST) -o faulthandler_timeout=880 -m slow $(or $(ARGS),--share=auto)

test-all: test-hydra14  ## Every test there is, hours
	$(MAKE) test test-slow ARGS="--share=1/1 $(ARGS)"

check: $(STAMP)  ## Formatting, lints, types, and who may import whom
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright
	$(VENV)/bin/lint-imports --no-logo

fmt: $(STAMP)  ## Format, and mend the lints that mend themselves
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

bench: $(STAMP) $(LIBTPU)/.stamp  ## Measure: make bench ARGS="..."
	@$(PY) -m benchmarks $(ARGS)

reference: $(STAMP)  ## Make docs/reference.md and what completion knows, from the schema
	$(PY) -m rlexp reference > docs/.reference.md && mv docs/.reference.md docs/reference.md
	$(PY) -m rlexp reference --keys > rlexp/commands/.keys.json && mv rlexp/commands/.keys.json rlexp/commands/keys.json

pins:  ## Resolve constraints.txt anew; needs python3.11 and python3.12, or PINS="..." naming interpreters
	.ci/pins $(or $(PINS),python3.11 python3.12)

clean:  ## Remove .venv, builds and caches; runs in outputs/ and multirun/ stay
	rm -rf $(VENV) .venv-* $(LIBTPU) $(HYDRA14) $(REVERB) $(TENSORFLOW) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .bench
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

$(LIBTPU)/.stamp: constraints.txt | $(STAMP)
	rm -rf $(LIBTPU)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(LIBTPU) -c constraints.txt libtpu
	@touch $@

$(HYDRA14)/.stamp: Makefile | $(STAMP)
	rm -rf $(HYDRA14)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(HYDRA14) \
	    hydra-core==$(HYDRA14_VERSION) omegaconf==$(HYDRA14_OMEGACONF)
	@touch $@

$(REVERB)/.stamp: benchmarks/reverb-requirements.txt
	rm -rf $(REVERB)
	$(REVERB_PYTHON) -m venv $(REVERB)
	$(REVERB)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/reverb-requirements.txt
	@touch $@

$(TENSORFLOW)/.stamp: tests/envs/tensorflow-requirements.txt
	rm -rf $(TENSORFLOW)
	$(PYTHON) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/envs/tensorflow-requirements.txt
	@touch $@
