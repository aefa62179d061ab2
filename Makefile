# Every target works in a fresh clone: `setup` makes .venv and is skipped while pyproject.toml is unchanged.
# Variables: PYTHON (interpreter for the environment), TORCH (what to install as torch), ARGS (passed to `run` and `pytest`).

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0
ARGS  ?=
# Two test processes fill two cores; each keeps to one thread, so that they do not fight.
JOBS  ?= 2
BENCH ?= path batching first streams

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# pip tells only errors; on a terminal a dot every two seconds shows that it is at work.
PIP := $(BIN)/python -m pip -qq
DOTS := $(if $(MAKE_TERMOUT),while sleep 2; do printf .; done,:)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

define install
@printf '%s' '== $(1) '; { $(DOTS); } & dots=$$!; trap "kill $$dots 2>/dev/null" EXIT INT TERM; \
  $(PIP) install $(2); code=$$?; kill $$dots 2>/dev/null; echo; exit $$code
endef

.DEFAULT_GOAL := help
.PHONY: help setup run test check lint types contracts unit bench chaos format clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv and install everything (quick when nothing changed).

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv and pip found."; \
	  echo "      Debian and Ubuntu: apt install python3 python3-venv. Or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || { echo "== making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing, this first time only: about two minutes"
	$(call install,1/3 pip,--upgrade pip)
	$(call install,2/3 $(TORCH),"$(TORCH)")
	$(call install,3/3 Diffleet and its tools,--editable '.[dev]')
	@touch $@

run: setup ## Start a fleet on this machine, answer one prompt, serve until Ctrl-C. ARGS="--port 8001" etc.
	@$(BIN)/diffleet up $(ARGS)

test: setup check unit ## Lint, types, contracts and all tests. ARGS="-k name" narrows the tests.

check: lint types contracts ## Lint, types and contracts.

lint: setup ## ruff: rules and format.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup ## pyright.
	@$(BIN)/pyright

contracts: setup ## import-linter: which package may import which.
	@$(BIN)/lint-imports

unit: setup ## pytest alone.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS) || { \
	  echo "== what failed gets a second, quiet run: tests of real processes may lose a race on a busy machine"; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(ARGS); }

bench: setup ## Benchmarks, one table each; BENCH="path" runs one of them.
	@for name in $(BENCH); do OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.$$name || exit 1; done

chaos: setup ## A fleet under faults, and an oracle. DIFFLEET_CHAOS_SEED=1 DIFFLEET_CHAOS_SECONDS=600.
	@DIFFLEET_CHAOS_SECONDS=$${DIFFLEET_CHAOS_SECONDS:-600} $(BIN)/python -m tests.fleet.chaos

format: setup ## Let ruff rewrite the files.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## Remove the environment and caches.
	@rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist build
