# Every target sets itself up: a .venv in the checkout with the versions of constraints.txt.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
# Named after the content of what it installs, so an unchanged checkout is set up once.
STAMP := $(VENV)/setup-$(shell cat pyproject.toml constraints.txt Makefile | cksum | cut -d' ' -f1).stamp
FAST := -m "not slow and not gpu"

.PHONY: setup demo check fmt lint types test test-all bench clean
.DEFAULT_GOAL := check

setup: $(STAMP)  ## create .venv with pinned dependencies and the outrider command

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV), about a minute ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e ".[test,dev]"
	@$(PIP) --no-deps fla-core  # its dependencies would bring a GPU compiler
	@$(BIN)/python -m outrider.ops.native.build  # also done at first use when the sources have changed
	@rm -f $(VENV)/setup-*.stamp
	@touch $@

demo: setup  ## answer real prompts with and without the drafter, and show the difference
	$(BIN)/outrider demo

test: setup  ## the fast tests: what CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(FAST)

test-all: setup  ## the slow tests too
	$(BIN)/python -m pytest -m "not gpu"

check: lint types test  ## everything a change must pass

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

fmt: setup  ## format, and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## the A/B table on the shipped prompts, JSON in build/ab.json
	mkdir -p build
	$(BIN)/outrider bench ab models/k3-small --drafter models/k3-small-dspark \
	  --arms plain,fixed7,auto --concurrency 1,4 --json build/ab.json

clean:
	rm -rf build outrider.egg-info outrider/ops/native/lib
	find outrider tests -name __pycache__ -type d -prune -exec rm -rf {} +
