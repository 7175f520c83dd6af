VENV ?= .venv
RUN ?= runs/demo
JOBS ?= 2
BIN = $(VENV)/bin
READY = $(VENV)/.ready
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-fast check setup clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(READY) ## Set up, compare the shipped checkpoint in BF16, FP16 and FP32, and say where the report is
	$(BIN)/mismatch-probe compare --model demo --dtype bf16 --dtype fp16 --dtype fp32 --out $(RUN) $(if $(wildcard $(RUN)/manifest.json),--resume)

test: check ## Set up and run every test
	$(PYTEST)

test-fast: $(READY) ## The tests that start no engine
	$(PYTEST) -m "not slow"

check: $(READY) ## Lint, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(READY) ## Make the virtual environment

$(READY): pyproject.toml requirements/cpu.lock scripts/setup.sh
	bash scripts/setup.sh $(VENV)
	touch $@

clean: ## Remove the virtual environment and the demo run
	rm -rf $(VENV) $(RUN)
