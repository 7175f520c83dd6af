VENV ?= .venv
RUN ?= runs/demo
REAL ?= build/real
PAPER ?= build/paper
JOBS ?= 2
DOCS_VENV ?= build/docs-venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Or each of the processes would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo real paper test test-real lines test-fast check lint types documents docs release-check setup clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

demo: $(READY) ## Set up, compare the shipped checkpoint in BF16, FP16 and FP32, and say where the report is
	$(BIN)/mismatch-probe compare --model demo --dtype bf16 --dtype fp16 --dtype fp32 --out $(RUN) $(if $(wildcard $(RUN)/manifest.json),--resume)

real: $(READY) ## Make two real checkpoints in REAL (build/real), and compare SmolLM2 in BF16, FP16 and FP32 on the shipped prompts
	bash scripts/real.sh $(REAL) $(VENV)
	$(BIN)/mismatch-probe compare --model $(REAL)/smollm2 --prompts examples/prompts/chats.jsonl --max-new-tokens 64 \
		--dtype bf16 --dtype fp16 --dtype fp32 --out $(REAL)/run $(if $(wildcard $(REAL)/run/manifest.json),--resume)

paper: $(READY) ## Train the grids of reports/paper and write their records; resumable, hours on two cores
	bash scripts/paper.sh $(PAPER) $(VENV)

# Types and fast tests take what the slow ones leave of the cores while they wait for a process.
test: lint ## Set up and run every check and test
	@nice $(BIN)/mypy > $(VENV)/types.log 2>&1 & types=$$!; \
	nice $(BIN)/python -m pytest -q -p no:cacheprovider -m "not slow" > $(VENV)/fast.log 2>&1 & fast=$$!; \
	$(PYTEST) -m "slow and not lines and not real"; slow=$$?; \
	wait $$fast; fast=$$?; cat $(VENV)/fast.log; \
	wait $$types; types=$$?; cat $(VENV)/types.log; exit $$((slow | fast | types))

test-real: $(READY) ## The tests on real checkpoints, which are made in REAL first; skipped with a reason where they cannot be had
	-bash scripts/real.sh $(REAL) $(VENV)
	REAL=$(abspath $(REAL)) $(BIN)/python -m pytest -m real -rs tests/real

lines: $(READY) ## Run every command line of the documents as it is written; takes long
	$(BIN)/python -m pytest -m lines tests/docs/test_lines_as_written.py

test-fast: $(READY) ## The tests that take less than a tenth of a second each and start no engine
	$(PYTEST) -m "not slow"

check: lint types documents ## Lint, types, import contract, links and names in the documents

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

documents: $(READY)
	$(BIN)/python -m pytest -q -m "not slow" tests/docs

docs: $(DOCS_VENV)/.ready ## Make the site of the documents in build/docs; broken links fail
	$(DOCS_VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky --fresh-env docs build/docs
	@echo "The site: build/docs/index.html"

$(DOCS_VENV)/.ready: requirements/docs.lock
	$${PYTHON:-$$(command -v python3.11 || command -v python3)} -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r requirements/docs.lock
	touch $@

release-check: $(READY) ## Build sdist and wheel into dist, and try the wheel in an environment with nothing but what it declares; FROM_INDEX=1 has pip install that
	rm -rf dist
	DIST=$(abspath dist) $(BIN)/python -m pytest -q tests/release
	$(BIN)/python -m tests.release.installs
	@grep -q "^## .*(unreleased)" CHANGELOG.md && echo "Before an upload: put the date into the first heading of CHANGELOG.md" || ls dist

setup: $(READY) ## Make the virtual environment

$(READY): pyproject.toml requirements/cpu.lock scripts/setup.sh
	bash scripts/setup.sh $(VENV)
	touch $@

clean: ## Remove the virtual environments, the demo run, the site and the real checkpoints
	rm -rf $(VENV) $(RUN) build dist
