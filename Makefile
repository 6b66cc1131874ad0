# Every target sets up what it needs; a machine with python3.11 to 3.13 (with venv) and make is enough.
# pip takes its index and proxy from the environment, as always.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-engines test-kernel bench chaos fuzz soak sim sim-mutants lint format clean distclean

# The first Python on the path whose version is supported; `make PYTHON=... ` overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1 && echo $$p && break; \
	done)

TORCH := torch==2.13.0
VENV := .venv
VENV_517 := .venv-5.17
STAMP := .installed

# One thread a process: the tests and the demo run several processes at once, and one thread adds up
# floating point numbers in one order. Nothing here asks a model hub for anything.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

help:
	@echo "make demo          engine, collector and trainer in three processes, proven row by row"
	@echo "make test          lint, then the default tests"
	@echo "make test-engines  the engine matrix on every supported version of the engine"
	@echo "make test-kernel   the GPU kernels in Triton's interpreter;  tests/gpu/run.sh PART on a machine with a GPU"
	@echo "make bench         figures beside their peers and floors; writes build/bench.json"
	@echo "make chaos         KILLS=200 of the collector (kill -9) while four engine processes ship"
	@echo "make soak          SOAK_S=600 seconds of work, the collector's memory looked at every second"
	@echo "make fuzz          FRAMES=1000000 that are almost right, in process and at real sockets"
	@echo "make sim           SEEDS=2000 simulated worlds of faults;  make sim-mutants: each rule off is caught"
	@echo "make lint          ruff and mypy;  make format rewrites the code"
	@echo "make setup         the development environment in $(VENV)"
	@echo "make clean         caches and build outputs;  make distclean the environments too"

setup: $(VENV)/$(STAMP)

demo: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m deploy.demo

test: lint
	$(VENV)/bin/python -m pytest $(ARGS)

test-engines: $(VENV)/$(STAMP) $(VENV_517)/$(STAMP)
	@echo "== engine matrix: transformers 5.24.0"
	$(VENV)/bin/python -m pytest -m "engines or not engines" tests/engines $(ARGS)
	@echo "== engine matrix: transformers 5.17.0"
	$(VENV_517)/bin/python -m pytest -m "engines or not engines" tests/engines tests/gpu $(ARGS)

KERNEL_TESTS := tests/engine_side/test_capture.py tests/engine_side/test_slot_store.py tests/engine_side/test_pipeline.py

# The GPU kernels on a CPU, statement by statement: Triton's interpreter, a gigabyte that nothing else needs.
test-kernel: $(VENV)/$(STAMP)
	@test -d build/triton || $(VENV)/bin/pip install --quiet --target build/triton triton==3.9.0
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(VENV)/bin/python -m pytest $(KERNEL_TESTS) $(ARGS)

bench: $(VENV)/$(STAMP)
	@mkdir -p build
	$(VENV)/bin/python -m tests.bench $(ARGS)

SOAK_S ?= 600

soak: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m tests.soak $(SOAK_S)

KILLS ?= 200

chaos: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m tests.chaos $(KILLS)

FRAMES ?= 1000000

fuzz: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m tests.fuzz $(FRAMES)

SEEDS ?= 2000

sim: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m tests.sim $(SEEDS) $(ARGS)

sim-mutants: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m tests.sim 1000 --mutants $(ARGS)

lint: $(VENV)/$(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/$(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VENV_517)

# torch goes in first and alone, pinned: nothing installed after it may choose another build of it.
# The stamp is written last, so an interrupted set-up is simply done again.
define new_venv
	@test -n "$(PYTHON)" || { echo "no Python from 3.11 to 3.13 on the path; use make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "== setting up $(1)"
	@test -x $(1)/bin/pip || $(PYTHON) -m venv --clear $(1)
	@$(1)/bin/pip install --quiet $(TORCH)
endef

$(VENV)/$(STAMP): pyproject.toml
	$(call new_venv,$(VENV))
	@$(VENV)/bin/pip install --quiet -e '.[dev]'
	@touch $@

$(VENV_517)/$(STAMP): pyproject.toml
	$(call new_venv,$(VENV_517))
	@$(VENV_517)/bin/pip install --quiet -e '.[engine,test]' 'transformers==5.17.0' 'huggingface-hub<2'
	@touch $@
