# The commands of a newcomer: `make fit` trains and compares, `make real` does so on a real language model, `make test`
# checks everything.
# Each makes .venv and installs what it needs. Needed beforehand: Python 3.11 or newer.

# python3 where it is new enough, otherwise a versioned one; override with `make PYTHON=/path/to/python test`.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

.DEFAULT_GOAL := help
.PHONY: help install fetched test test-all test-bounds lint format docs wheel fit real clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install the package into it, where pyproject.toml is newer

$(STAMP): pyproject.toml subtoken_train/version.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[dev]'
	@touch $@

fetched: install
	@test -d checkpoints/smollm2 || $(BIN)/subtoken-train data smollm2 || echo "SmolLM2 is not at hand: tests on it are skipped"

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint fetched ## lint, then the tests that take seconds each (fetches SmolLM2 once: 92 MB)
	$(PYTEST) -m "not slow and not gpu"

test-all: lint fetched ## test, and the slow tests, with coverage, which takes a third of the time again
	$(PYTEST) -m "not gpu" --cov --cov-report=term:skip-covered

format: install ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## build the documentation site into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.release: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[release]'
	@touch $@

wheel: $(VENV)/.release ## build sdist and wheel into dist/, and try the wheel in a clean environment
	BIN=$(BIN) .ci/wheel

test-bounds: $(VENV)/.release ## the quick tests at the lowest and the highest versions that pyproject.toml allows
	$(BIN)/python benchmarks/version_bounds.py

data/scenes: | $(STAMP)
	$(BIN)/subtoken-train data scenes

MINUTES = $(shell awk -F, '$$1 == "make $@" { print $$2 }' benchmarks/results/first_commands.csv)
FIT := tiny_fastv25_s64k16_best_lf4

fit: install data/scenes ## train a router and compare it with its anchor of the same bytes
	@echo "about $(MINUTES) minutes on two cores. 1/2 train: 600 steps; 2/2 compare on 800 questions"
	$(BIN)/subtoken-train fit --config $(FIT) --overwrite
	@$(BIN)/subtoken-train generate --adapter runs/$(FIT) --image data/samples/a.png --prompt 'is there a 7 ?' --show runs/$(FIT)/kept.png
	$(BIN)/subtoken-train evaluate --data data/scenes/dev.json --adapter runs/$(FIT)/adapter \
		--adapter checkpoints/adapters/$(FIT)_anchor --adapter checkpoints/adapters/tiny_lora_only
	@echo "'less $(FIT)_anchor-seed0' is what the router gains at equal bytes, with its 95 % interval ('ahead': significant)."
	@echo "'less tiny_lora_only-seed0' is what it loses against the full cache. Both are shipped adapters of the same settings."
	@echo "runs/$(FIT)/kept.png shows what the cache kept of a picture."

checkpoints/smollm2: | $(STAMP)
	$(BIN)/subtoken-train data smollm2

ASK := $(BIN)/subtoken-train generate --backbone checkpoints/smollm2 --prompt - --max-new-tokens 48

real: install checkpoints/smollm2 ## a real language model: ask a compressed text, and compare ways to spend the same bytes
	@echo "about $(MINUTES) minutes on two cores. 1/3 the full cache answers a question about data/samples/reference.txt"
	$(ASK) < data/samples/reference.txt
	@echo "2/3 the same from 42 % of the entries in int8, chosen by KVzip: the bytes of 21 % in bf16"
	$(ASK) --eviction kvzip --eviction-keep 0.42 --kv-dtype int8 < data/samples/reference.txt
	@echo "3/3 twelve facts in words, hidden in three texts that are compressed before they are asked"
	$(BIN)/subtoken-train compare checkpoints/smollm2 --contexts 3 --out results/real/$$(date +%Y%m%d-%H%M%S)
	@echo "docs/real_models.md goes on from here: bigger models, routers of your own."

clean: ## remove caches and coverage; keeps .venv, data and runs
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov dist site
	find subtoken_train tests checkpoints -name __pycache__ -type d -prune -exec rm -rf {} +
