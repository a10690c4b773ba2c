# kvmig: `make serve` and `make test` are all that a fresh machine needs.

PYTHON ?= python3
PORT ?= 8000
FLEET_PORT ?= 8080
INSTANCES ?= 2
MODEL ?= kvmig/models/count
DEVICE ?= auto
# A tiny model has nothing to compile, and needs little memory.
ifeq ($(MODEL),kvmig/models/count)
MODEL_FLAGS := --served-model-name count --enforce-eager --block-size 32 \
	--kv-cache-memory-bytes 268435456
endif
# More flags: for `make serve` those of kvmig.serve, for `make bench-*` --quick, --out, --check.
ARGS ?=

BIN := .venv/bin
SETUP := $(PYTHON) scripts/setup_env.py --device $(DEVICE)

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev serve fleet demo test lint format bench-downtime bench-overhead bench-serving \
	docs docs-figures clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Variables: PORT=$(PORT) INSTANCES=$(INSTANCES) MODEL=$(MODEL) DEVICE=$(DEVICE) ARGS="

setup: ## make .venv and install what is needed
	@$(SETUP)

setup-dev: ## the same, with what the checks need
	@$(SETUP) --dev

serve: setup ## serve MODEL on INSTANCES vLLM engines at 127.0.0.1:PORT until Ctrl-C
	@exec $(BIN)/python -m kvmig.serve $(MODEL) --instances $(INSTANCES) --port $(PORT) \
		$(MODEL_FLAGS) $(ARGS)

fleet: setup ## serve many models behind 127.0.0.1:FLEET_PORT until Ctrl-C; `kvmig` talks to it
	@exec $(BIN)/kvmig up --port $(FLEET_PORT) $(ARGS)

demo: setup ## move a streaming answer between two instances, in colour
	@exec $(BIN)/python -m kvmig_tools.demo $(ARGS)

test: setup-dev ## every check and test that this machine can run
	@exec $(BIN)/python -m scripts.check $(ARGS)

lint: setup-dev ## ruff, mypy and the import floors only
	@exec $(BIN)/python -m scripts.check --lint

format: setup-dev ## let ruff format and fix what it can
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench-downtime: setup-dev ## the gap that a client sees at a migration
	@exec $(BIN)/python -m bench.downtime $(ARGS)

bench-overhead: setup-dev ## what migrations and kvmig itself cost the others
	@exec $(BIN)/python -m bench.overhead $(ARGS)

bench-serving: setup-dev ## policies beside each other under a trace of requests
	@exec $(BIN)/python -m bench.serving $(ARGS)

docs-figures: setup-dev ## README's table and docs/figures.md from bench/results, the diagrams
	@$(BIN)/python -m scripts.figures
	@$(BIN)/python scripts/draw_processes.py
	@$(BIN)/python -m scripts.draw_placement
	@$(BIN)/python -m scripts.draw_moves
	@$(BIN)/python -m scripts.draw_migration
	@$(BIN)/python -m scripts.draw_trace
	@$(BIN)/python -m scripts.draw_top
	@$(BIN)/python -m kvmig_tools.draw_handshake

docs: setup-dev ## the documentation's site, in site/; what is public, in docs/signatures.txt
	@$(BIN)/python -m scripts.public_api
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

clean: ## remove caches and build outputs, but not .venv
	@rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	@find kvmig tests bench scripts -name __pycache__ -prune -exec rm -rf {} +
