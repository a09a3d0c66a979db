# `make help` lists the targets. Everything is installed into .venv; nothing outside the clone is touched.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SITE := .cache/site-environment
BROWSER := .cache/browser-environment
PYTEST_ARGS ?=
DEMO_ARGS ?=
HOUSE_ARGS ?=
BENCH_ARGS ?=
# Everything that runs in the tests' own process. Slow callbacks are logged, and no failure.
DEBUG_TESTS = tests/client tests/conversations tests/engine tests/models tests/rpc --deselect tests/rpc/test_fuzz_server.py
AUDIT = $(BIN)/uv run --quiet --no-project --python $(BIN)/python --with-requirements requirements/audit.txt

# Nothing is cached outside the clone.
export PIP_NO_CACHE_DIR ?= 1
export UV_CACHE_DIR ?= $(CURDIR)/.cache/uv
export BUF_CACHE_DIR ?= $(CURDIR)/.cache/buf
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of Python often set it, and then every server that a test starts compiles memstream anew: half of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test debug quick test-all test-versions crash fuzz check house generate generate-clients agree lock site screenshots bench bench-fair bench-full bench-peers bench-servers format sbom audit build clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## install the locked packages and memstream itself into .venv

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "memstream needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "installing the locked packages into .venv: a minute or two"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes -r requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)  ## stream real text in, ask, kill the server, ask again
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(STAMP)  ## the tests that need Python alone, in three processes: many wait for a server
	$(BIN)/python -m pytest -n 3 --dist worksteal --ignore tests/toolchains $(PYTEST_ARGS)

debug: $(STAMP)  ## the fast tests with asyncio's debug mode: coroutines that nobody awaits, resources that nobody closes
	PYTHONASYNCIODEBUG=1 $(BIN)/python -X dev -m pytest -n 2 --dist worksteal $(DEBUG_TESTS) $(PYTEST_ARGS)

quick: $(STAMP)  ## lint and the tests nearest to a change, in under a minute (BASE=main for all since main)
	$(BIN)/python -m scripts.quick_tests $(BASE)

test-all: $(STAMP)  ## the tests that take long or need another toolchain; each one that cannot run says why
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "toolchain or long" --timeout 1800 tests/toolchains tests/benchmarks \
	  --deselect tests/toolchains/test_versions.py::test_server_runs_with_allowed_versions $(PYTEST_ARGS)
	@[ $$(date +%s) -lt $(or $(THOROUGH_BEFORE),9999999999) ] \
	  || { echo "skipped: the drawn tests in full size, which need 20 minutes more than are left"; exit 0; }; set -x; \
	  MEMSTREAM_THOROUGH=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "drawn or long" --timeout 1800 \
	  --ignore tests/toolchains --ignore tests/benchmarks $(PYTEST_ARGS)

test-versions: $(STAMP)  ## a server with the lowest and the newest packages that pyproject.toml allows (VERSIONS=lowest for one)
	$(BIN)/python -m pytest -m toolchain --timeout 1800 tests/toolchains/test_versions.py $(if $(VERSIONS),-k "$(VERSIONS)") $(PYTEST_ARGS)

crash: $(STAMP)  ## kill -9 again and again with a ledger (CRASH_ROUNDS=60), then every n-th call of every port fails
	MEMSTREAM_CRASH_ROUNDS=$${CRASH_ROUNDS:-60} MEMSTREAM_CRASH_SEED=$${MEMSTREAM_CRASH_SEED:-0} $(BIN)/python -m pytest -s --timeout 7200 tests/server/test_crash.py $(PYTEST_ARGS)
	MEMSTREAM_THOROUGH=1 $(BIN)/python -m pytest tests/engine/test_faults.py tests/journal/test_faults.py tests/server/test_index.py $(PYTEST_ARGS)

fuzz: $(STAMP)  ## 200,000 hostile calls by gRPC, 50,000 by HTTP, attacks of 10 s (FUZZ_CALLS, HTTP_FUZZ_CALLS, MEMSTREAM_FUZZ_SEED, MEMSTREAM_ATTACK_S)
	MEMSTREAM_FUZZ_CALLS=$${FUZZ_CALLS:-200000} MEMSTREAM_HTTP_FUZZ_CALLS=$${HTTP_FUZZ_CALLS:-50000} \
	  MEMSTREAM_FUZZ_SEED=$${MEMSTREAM_FUZZ_SEED:-0} MEMSTREAM_ATTACK_S=$${MEMSTREAM_ATTACK_S:-10} $(BIN)/python -m pytest -rA -n 2 --timeout 14400 \
	  tests/rpc/test_fuzz_server.py tests/http_port/test_fuzz_http.py tests/access/test_attacks.py $(PYTEST_ARGS)

check: $(STAMP)  ## style, types, layers, contract, generated files
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

house: $(STAMP)  ## the figures of the code's shape with their limits and aims (HOUSE_ARGS=--record lowers the limits)
	$(BIN)/python -m scripts.house $(HOUSE_ARGS)

generate: $(STAMP)  ## write client/memstream/v1 from protos/, the blocking SDK, the generated pages of docs/ and the golden bytes
	$(BIN)/buf format --write protos
	$(BIN)/python scripts/generate.py
	$(BIN)/python -m scripts.sync_sdk
	$(BIN)/python -m scripts.document
	$(BIN)/python -m tests.conformance.golden

generate-clients: $(STAMP)  ## write the Go and TypeScript code of the contract, with go and node
	$(BIN)/python -m tests.toolchains.generate

site: $(SITE)/.installed  ## the documents as a site, in site/, built offline
	$(SITE)/bin/python scripts/site.py

$(SITE)/.installed: requirements/site.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --require-hashes -r requirements/site.txt
	@touch $@

screenshots: $(STAMP) $(BROWSER)/.installed  ## the pictures of docs/console.md, made with an installed Chromium
	$(BROWSER)/bin/python scripts/screenshots.py

$(BROWSER)/.installed: requirements/browser.txt
	$(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/pip install --quiet --require-hashes -r requirements/browser.txt
	@touch $@

agree: $(STAMP)  ## the contract as it is now is what later ones must not break
	$(BIN)/buf build protos --exclude-source-info -o protos/agreed.binpb

format: $(STAMP)  ## format Python and protos in place
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format --quiet .
	$(BIN)/buf format --write protos

lock: $(STAMP)  ## resolve requirements/*.txt anew (UPGRADE=1 takes the newest versions)
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/lock $(if $(UPGRADE),--upgrade)

bench: $(STAMP)  ## measure what we claim beside its bare counterparts: one table, some minutes (BENCH_ARGS="recall" for one)
	$(BIN)/python benchmarks/bench.py --json .cache/bench.json $(BENCH_ARGS)

bench-fair: $(STAMP)  ## one caller's small calls beside every rpc of another at its largest; fails over the bar
	$(BIN)/python benchmarks/bench_fair.py $(BENCH_ARGS)

bench-full: $(STAMP)  ## the same with the real sizes, an hour or more
	$(BIN)/python benchmarks/bench.py --full --json .cache/bench-full.json $(BENCH_ARGS)

bench-peers: $(STAMP)  ## beside DB-GPT, LangChain, LangGraph, mem0 and LlamaIndex, which are installed into .cache/
	$(BIN)/python -m benchmarks.peers $(BENCH_ARGS)

bench-servers: $(STAMP)  ## beside Chroma, PostgreSQL with pgvector, Redis Stack and Milvus, which are installed into .cache/
	$(BIN)/python -m benchmarks.peers.servers $(BENCH_ARGS)

sbom: $(STAMP)  ## what a server is made of, as CycloneDX, in dist/sbom.json
	@mkdir -p dist
	$(AUDIT) cyclonedx-py requirements --short-PURLs --output-reproducible --pyproject pyproject.toml \
	  --output-file dist/sbom.json requirements/server.txt

audit: $(STAMP)  ## known vulnerabilities of what a server is made of; fails where the index does not say
	$(AUDIT) pip-audit --strict --progress-spinner off --disable-pip --require-hashes --requirement requirements/server.txt

build: $(STAMP)  ## the wheel and the source distribution, in dist/
	$(BIN)/uv build --no-build-isolation --python $(BIN)/python

clean:  ## remove what make made
	rm -rf .venv .cache dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find client server tests benchmarks examples scripts -name __pycache__ -prune -exec rm -rf {} +
