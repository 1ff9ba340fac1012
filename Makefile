# Every verb of the project; `make` alone prints them. The logic is in the programs it calls.

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
SERVICE ?= gateway
PKG ?= gateway
# The slowest tests of a run; what takes under a second is not listed.
DURATIONS := --durations=15 --durations-min=1
CPP := $(wildcard kernels/antiphon/kernels/cpu/csrc/*)
FAST = $(BIN)/pytest -q -n 2 --dist worksteal $(DURATIONS) -m "not system and not gpu and not long"
# Files with tests of whole stacks: to collect all others once more would take half a minute.
STACKS = $(shell grep -rl --include='test_*.py' 'mark\.system' tests | sort)

# The tests start hundreds of processes: without bytecode on disk each compiles the tree again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup test-tools run chat fmt lint lint-cpp types arch static tidy check test test-stacks test-unit test-kernels test-gpu test-faults test-long eval train \
  bench bench-gpu bench-micro bench-kernels bench-loading bench-serving bench-steps bench-bodies bench-engine bench-peers bench-prose bench-embeddings bench-images docs site wheel up down image

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Make .venv, install everything, find or install nats-server
	@PIP_ARGS="$(PIP_ARGS)" $(PYTHON) tests/support/bootstrap.py

run: setup  ## Serve the embedded model; ARGS='--port 31000' are passed to `antiphon serve`
	@$(BIN)/antiphon serve $(ARGS)

chat: setup  ## Talk to a running server in the terminal
	@$(BIN)/antiphon chat $(ARGS)

fmt: setup  ## Format, and fix what the linter can fix
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CPP)

lint: setup  ## Style and form
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/clang-format --dry-run --Werror $(CPP)

lint-cpp: setup  ## clang-tidy over the C++ kernels, a minute or two; writes compile_commands.json
	$(BIN)/python -m tests.support.cpp --tidy

types: setup  ## Types, strict
	$(BIN)/pyright

arch: setup  ## Who may import whom
	$(BIN)/lint-imports --no-logo --no-cache

static: setup  ## Types, clang-tidy and the site, at the lowest priority: beside tests of stacks
	@nice -n 19 $(MAKE) --no-print-directory types lint-cpp site

tidy: setup  ## Registries, generated pages, folders
	$(BIN)/pytest -q tests/tidy

check: setup  ## Lint, types, architecture, tidiness and the fast tests, two at a time
	@$(MAKE) -j 2 --output-sync --no-print-directory lint types arch
	$(FAST)

test-tools: setup  ## Find prometheus and promtool, or unpack them in .venv
	@PIP_ARGS="$(PIP_ARGS)" $(PYTHON) tests/support/bootstrap.py --test-tools

test: test-tools  ## Everything that CI runs
	@$(MAKE) -j 2 --output-sync --no-print-directory lint arch
	$(FAST)
	@$(MAKE) -j 2 --no-print-directory test-stacks static

test-stacks: test-tools  ## Tests that start processes, which wait now and then
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(DURATIONS) \
	  -m "system and not gpu and not long" tests/clients tests/tutorials $(STACKS)

test-unit: setup  ## The fast tests of one package: PKG=gateway; ARGS are pytest's
	@tests=$$($(BIN)/python -m tests.support.package_tests $(PKG)) && \
	  $(BIN)/pytest -q -n 2 --dist worksteal $(DURATIONS) -m "not system and not gpu and not long" $(ARGS) $$tests

test-kernels: setup  ## Operations against their references
	$(BIN)/pytest -q tests/kernels tests/models

test-gpu: setup  ## Kernels, graphs, a model and rates on a GPU, stage by stage; ARGS='--stages parity'
	@$(BIN)/python -m tests.gpu $(ARGS)

test-faults: test-tools  ## The last release beside this one, and all faults under load: writes docs/reliability.md
	$(BIN)/pytest -q tests/system/test_upgrade.py -m long
	$(BIN)/python -m tests.faults.matrix

test-long: setup  ## Tests that take minutes
	$(BIN)/pytest -q -m "long and not gpu"

eval: setup  ## Score the embedded model, skill by skill
	$(BIN)/python -m tests.training.evaluate $(ARGS)

train: setup  ## Train the embedded model again; ARGS='--seed 0 --out DIR'
	$(BIN)/python -m tests.training.train $(ARGS)

bench: setup  ## What the services add: latency hop by hop, processor time, 128 streams at once
	$(BIN)/python -m tests.bench $(ARGS)
	$(BIN)/python -m tests.bench.crowd

bench-micro: setup  ## What planning, the prefix tree and the worker's messages cost a step
	$(BIN)/pytest -q tests/bench/micro $(ARGS)
	$(BIN)/python -m tests.bench.planning

bench-kernels: setup  ## CPU kernels against memory, arithmetic and torch; what rounding weights costs
	$(BIN)/python -m tests.bench.kernels.linears $(ARGS)
	$(BIN)/python -m tests.bench.kernels.attention
	$(BIN)/python -m tests.bench.kernels.experts
	$(BIN)/python -m tests.bench.perplexity

bench-gpu: setup  ## The stages of test-gpu that time kernels and steps; ARGS='--stages decode'
	@$(BIN)/python -m tests.gpu --bench $(ARGS)

bench-loading: setup  ## Rate and memory of loading a model, against the disk and its weights
	$(BIN)/python -m tests.bench.loading $(ARGS)

bench-serving: setup  ## Load on a server, open or closed loop; ARGS='--arrival poisson:4 --json FILE'
	$(BIN)/python -m tests.bench.serving $(ARGS)

bench-bodies: setup  ## Large bodies of one client beside 8 streams of another tenant; ARGS='--rounds 1'
	$(BIN)/python -m tests.bench.bodies $(ARGS)
	$(BIN)/python -m tests.bench.peers --page-only

bench-steps: setup  ## One step: deterministic and not, what is beside the layers, and torch
	$(BIN)/python -m tests.bench.kernels.steps --json tests/bench/results/steps.json $(ARGS)
	$(BIN)/python -m tests.bench.share
	$(BIN)/python -m tests.bench.peers --page-only

bench-engine: setup  ## Shared prefixes with the cache and without; 2,000 that wait; upkeep; int8; grammars
	$(BIN)/python -m tests.bench.serving.radix
	$(BIN)/python -m tests.bench.serving.waiting
	$(BIN)/python -m tests.bench.serving.upkeep
	$(BIN)/python -m tests.bench.serving.int8
	$(BIN)/python -m tests.bench.serving.grammar
	$(BIN)/python -m tests.bench.peers --page-only

bench-prose: setup  ## Perplexity of SmolLM2 over our own prose: ours, transformers' and llama.cpp's
	$(BIN)/python -m tests.bench.prose $(ARGS)
	$(BIN)/python -m tests.bench.peers --page-only

bench-embeddings: setup  ## Vectors over HTTP against transformers' sorted batches; ARGS='--rounds 1'
	$(BIN)/python -m tests.bench.embeddings $(ARGS)

bench-images: setup  ## Images in chats: rates, where their time goes, texts beside them; ARGS='--rounds 1'
	$(BIN)/python -m tests.bench.images $(ARGS)
	$(BIN)/python -m tests.bench.texts_beside_images
	$(BIN)/python -m tests.bench.peers --page-only

bench-peers: setup  ## Antiphon and other servers in turn, an hour on an idle machine; ARGS='--rounds 5'
	$(BIN)/python -m tests.bench.peers $(ARGS)

docs: setup  ## Write the generated pages again
	$(BIN)/python -m tests.support.argument_tests
	$(BIN)/python -m tests.support.pages
	$(BIN)/python -m antiphon.bus.permissions > compose/nats.conf

site: setup  ## Build the documentation site in site/; broken links fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

up:  ## Build and start the compose stack; its passwords are made the first time
	@compose/secrets.sh
	docker compose -f compose/compose.yaml up --build --wait

down:  ## Stop the compose stack
	docker compose -f compose/compose.yaml down

wheel: setup  ## Build a wheel in dist/ with the CPU kernels of every instruction set
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

image:  ## Build the image of one service: SERVICE=gateway
	docker build -f compose/Dockerfile --build-arg SERVICE=$(SERVICE) -t antiphon-$(SERVICE) .
