# Every target makes its own environment from a bare clone; versions come from constraints.txt.
PYTHON ?= python3
VENV := .venv
INTEGRATIONS := .venv-integrations
BIN := $(VENV)/bin
DB ?= sqlite

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes, which would each compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help apt demo quick test test-all check docs pictures lowest integrations torture mutants bench bench-peers clean
#: What pytest leaves out; `make test-all` empties it.
MARKS := not nightly

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed ## Train a small model from a buffer that survives kill -9 (DB=sqlite or postgresql)
	$(BIN)/python -m examples.grpo_digits --database $(DB)

check: $(VENV)/.installed ## Lint, spelling, types, layers, the wheel, and the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files src docs benchmarks examples migrations '*.md')
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m build --wheel --no-isolation --outdir $(VENV)/dist .
	$(MAKE) docs

docs: $(VENV)/.installed ## Build the documentation into site/, with a reference of what is public
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(VENV)/.installed ## Take the screenshots of the documentation again, in Chromium
	PYTHONPATH=tests $(BIN)/python -m pictures

lowest: $(VENV)/.installed ## Test both engines with the lowest versions that are allowed
	PYTHONPATH=tests $(BIN)/python -m lowest

$(INTEGRATIONS)/.installed: pyproject.toml $(wildcard tests/integrations/*.txt)
	$(PYTHON) -m venv $(INTEGRATIONS)
	PIP_CONSTRAINT=$(CURDIR)/tests/integrations/constraints.txt $(INTEGRATIONS)/bin/python -m pip install --quiet \
		--editable '.[obstore]' --requirement tests/integrations/requirements.txt
	@touch $@

integrations: $(INTEGRATIONS)/.installed ## Test the integrations with the real trainers, in an environment of their own
	$(INTEGRATIONS)/bin/python -m pytest --numprocesses 2 --dist loadgroup -m '$(MARKS)' tests/integrations

quick: $(VENV)/.installed ## Run a minute of tests: on SQLite, without servers, browsers and other processes
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --quick

test: ## Everything in check, then tests on SQLite and PostgreSQL, and of the integrations (see apt)
	$(MAKE) --jobs=2 check $(INTEGRATIONS)/.installed
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal -m '$(MARKS)'
	$(MAKE) integrations

test-all: ## Everything in test and lowest, and the longer and repeated tests (marked `nightly`)
	$(MAKE) lowest
	$(MAKE) test MARKS=

apt: ## Install Chromium and PgBouncer for the tests, by apt, if they are missing
	@PATH=$$PATH:/usr/sbin; command -v chromium > /dev/null && command -v pgbouncer > /dev/null || { \
		root=$$([ $$(id -u) = 0 ] || echo sudo) && export DEBIAN_FRONTEND=noninteractive && \
		$$root apt-get update --quiet --quiet && \
		$$root apt-get install --quiet --quiet --yes --no-install-recommends \
			chromium fonts-dejavu-core pgbouncer; }

torture: $(VENV)/.installed ## Inject faults against every guarantee for 15 minutes (SEED=N repeats a run, RECORD=1 writes its figures)
	PYTHONPATH=tests $(BIN)/python -m torture $(if $(SEED),--seed $(SEED)) $(if $(RECORD),--record)

mutants: $(VENV)/.installed ## Try 300 small changes of the code that tests should detect (NUMBER=, SEED=, ONLY=PATH, FRESH=1)
	PYTHONPATH=tests $(BIN)/python -m mutants $(if $(NUMBER),--number $(NUMBER)) $(if $(SEED),--seed $(SEED)) \
		$(if $(ONLY),--only $(ONLY)) $(if $(FRESH),--fresh)

bench: $(VENV)/.installed ## Measure this machine: medians and ratios
	$(BIN)/python -m benchmarks

bench-peers: $(VENV)/.installed ## Measure replaydb beside other stores, each in an environment of its own
	$(BIN)/python -m benchmarks.peers

clean: ## Remove the environment and build output
	rm -rf $(VENV) $(INTEGRATIONS) .mutants dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
