# Every target makes its own environment from a bare clone; versions come from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DB ?= sqlite

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check lowest torture bench bench-peers clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed ## Train a small model from a buffer that survives kill -9 (DB=sqlite or postgresql)
	$(BIN)/python -m examples.grpo_digits --database $(DB)

check: $(VENV)/.installed ## Lint, types, layers, and the wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m build --wheel --no-isolation --outdir $(VENV)/dist .

lowest: $(VENV)/.installed ## Try both engines with the lowest versions that are allowed
	PYTHONPATH=tests $(BIN)/python -m lowest

test: check lowest ## Everything in check and lowest, then all tests on SQLite and PostgreSQL
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

torture: $(VENV)/.installed ## Attack every promise for 15 minutes (SEED=N repeats a run, RECORD=1 writes its figures)
	PYTHONPATH=tests $(BIN)/python -m torture $(if $(SEED),--seed $(SEED)) $(if $(RECORD),--record)

bench: $(VENV)/.installed ## Measure this machine: medians and ratios
	$(BIN)/python -m benchmarks

bench-peers: $(VENV)/.installed ## Measure replaydb beside other stores, each in an environment of its own
	$(BIN)/python -m benchmarks.peers

clean: ## Remove the environment and build output
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
