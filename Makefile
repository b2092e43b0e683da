# Two commands matter: `make demo` and `make test`. Both set up what they need in .venv first.
SHELL := /bin/bash
VENV ?= .venv
# python3 where its version fits, else another one that does; name one yourself with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do $$p -c 'import sys, venv; sys.exit(not (3, 11, 4) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && exit; done; echo python3)
# faiss-cpu and faiss-gpu fill the same module: take the one that fits this machine (FAISS= for neither).
FAISS ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo faiss-gpu, || echo faiss-cpu,)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
# Compiled modules are kept, whatever the shell says: else each process of the tests compiles them all again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format docs bench

help: ## show this overview
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(STAMP) ## virtual environment with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11, 4) <= v < (3, 14) else f"Python 3.11.4 to 3.13 is needed, $(PYTHON) is {v[0]}.{v[1]}.{v[2]}; name another with make PYTHON=...")'
	@echo "setting up $(VENV): several GB with torch, a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(FAISS)pretrained,export,tensorboard,wandb,sweeps,tune,peft,hf,docs,dev]'
	@touch $@

demo: setup ## the main job: GAP against GSP on the built-in data set, 81 collections, table and picture
	PATH="$(abspath $(BIN)):$$PATH" bash scripts/demo.sh

test: setup lint ## what every change must pass, the site of the documentation without a warning included
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist worksteal

test-all: setup lint ## also the slow tests, and those for a GPU where there is one
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: setup ## style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## the documentation as a site, site/index.html, and the tables of its pages
	$(BIN)/python scripts/docs_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: setup ## every benchmark: side by side in one run, ratios printed
	@for script in scripts/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done
