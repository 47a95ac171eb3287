# Two commands do everything on a fresh machine: `make train` and `make test`.
# Both set up a virtual environment of their own in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What has been installed: what training needs, and all that the tests need.
TRAIN_STAMP := $(VENV)/.installed-train
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install train reproduce test test-slow test-exhaustive test-lowest coverage format drawings docs lint types pyright contracts check clean

help:
	@echo "make install    a virtual environment in .venv with all that the tests need; they begin with it"
	@echo "make train      a policy learns FrozenLake in a served environment (about ten minutes on an idle laptop, after the installation)"
	@echo "make reproduce  the same with three seeds"
	@echo "make test       all tests but those that take long"
	@echo "make test-slow  those: ranks and clusters, kills, most audits, measurements of memory, the site of the documentation"
	@echo "make test-exhaustive  more combinations of what those look at; every night"
	@echo "make test-lowest  tests of the serving half with the oldest releases of dependencies that pyproject.toml allows"
	@echo "make check      lint, types and import contracts"
	@echo "make pyright    the types of the public face, the clients and the examples, as users' editors see them"
	@echo "make format     what the formatter and the linter can mend by themselves"
	@echo "make coverage   all tests, and which lines none of them runs (takes twice as long)"
	@echo "make docs       the documentation as a site, in build/site; a link that leads nowhere is an error"
	@echo "make drawings   the drawings of ARCHITECTURE.md, from the imports"

INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints-cpu.txt

$(TRAIN_STAMP): pyproject.toml setup.py constraints-cpu.txt
	@echo "Installing rollgym and what training needs into $(VENV); the first time takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[train]' $(PIP_EXTRA)
	@touch $(TRAIN_STAMP)

$(STAMP): pyproject.toml setup.py constraints-cpu.txt
	@echo "Installing rollgym and all that its tests need into $(VENV); the first time takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]' $(PIP_EXTRA)
	@touch $(TRAIN_STAMP) $(STAMP)
	@echo "Installed. The commands are in $(BIN): run \`. $(BIN)/activate\` to have them without that, or $(BIN)/roll-env --help"

install: $(STAMP)

train: $(TRAIN_STAMP)
	$(BIN)/roll-train --config examples/frozen_lake.yaml output_dir=runs/frozen_lake checkpoint.resume=auto
	@echo "See what it did, as a page: $(BIN)/roll-train report runs/frozen_lake"

reproduce: $(TRAIN_STAMP)
	for seed in 0 1 2; do \
	  $(BIN)/roll-train --config examples/frozen_lake.yaml seed=$$seed \
	    output_dir=runs/frozen_lake_seed$$seed checkpoint.resume=auto || exit 1; \
	done
	$(BIN)/python benchmarks/learning/summary.py runs/frozen_lake_seed0 runs/frozen_lake_seed1 runs/frozen_lake_seed2 \
	  --command 'make reproduce' --output benchmarks/results/frozen_lake.json

test: $(STAMP)
	ROLLGYM_CI_STEP='make test' $(BIN)/python -m pytest -n auto --dist worksteal

# Only the files that have such tests: to look through all others takes longer than two cores need for some of them.
SLOW = $(shell grep -rl --include='test_*.py' 'mark\.slow' tests)

test-slow: $(STAMP)
	ROLLGYM_CI_STEP='make test-slow' $(BIN)/python -m pytest -n auto --dist worksteal -m 'slow and not exhaustive and not four_processes' $(SLOW)

test-exhaustive: $(STAMP)
	ROLLGYM_CI_STEP='make test-exhaustive' $(BIN)/python -m pytest -n auto --dist worksteal -m 'exhaustive and not four_processes' $(SLOW)

# torch stays as the constraints have it: its oldest builds are gigabytes of CUDA.
LOWEST := .venv-lowest
test-lowest: $(STAMP)
	$(PYTHON) -m venv --clear $(LOWEST)
	grep '^torch==' constraints-cpu.txt > $(LOWEST)/overrides.txt
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
	  --override $(LOWEST)/overrides.txt $(UV_EXTRA) -e '.[dev]'
	$(LOWEST)/bin/python -m pytest -n auto --dist worksteal tests/clients tests/env_server tests/envs tests/sandbox

coverage: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term:skip-covered

format: $(STAMP)
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

drawings: $(STAMP)
	$(BIN)/python docs/draw_rooms.py

docs: $(STAMP)
	# Not with --quiet: it keeps warnings from `strict`, too.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "The site is in build/site: open build/site/index.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# What the editors of users make of it: the public face, the clients and the examples. mypy reads all of the code.
pyright: $(STAMP)
	test -x $(BIN)/pyright || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'pyright[nodejs]>=1.1.400'
	$(BIN)/pyright --warnings

contracts: $(STAMP)
	$(BIN)/lint-imports

check: lint types contracts

clean:
	rm -rf $(VENV) runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
