# Everything runs from .venv, installed from exact versions; nothing else is touched.
VENV    ?= .venv
PYTHON  ?= python3
RUN_DIR ?= .run/default
MODEL   ?=
ENGINE  ?= real
PORT    ?=
SEED    ?=
PEERS   ?=
ARGS    ?=

shoal   := $(VENV)/bin/shoal
up_args := --run-dir '$(RUN_DIR)' --engine $(ENGINE) $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port $(PORT))
locks   := requirements.lock requirements-models.lock
stamp    = $(VENV)/installed-$(shell cat $(locks) pyproject.toml | sha256sum | cut -c1-16)

.DEFAULT_GOAL := help
.PHONY: help install up down status logs scale rolling chat test check chaos invariance bench quality kv clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16
	@echo "Variables: MODEL=FILE|DIR  ENGINE=real|sim  PORT=N  RUN_DIR=DIR  SEED=N  ARGS='gpu_worker.replicas=2'"

install: ## exact versions of everything into .venv
	@test -e $(stamp) || bash deploy/install.sh $(PYTHON) $(VENV) $(stamp) $(locks)

up: install ## start the mesh, see a model answer, keep it running
	@$(shoal) up $(up_args) $(ARGS)

down: install ## stop the mesh; only its logs stay
	@$(shoal) down --run-dir '$(RUN_DIR)'

status: install ## every process: state, load, restarts
	@$(shoal) status --run-dir '$(RUN_DIR)'

logs: install ## last lines of each log (ARGS='gateway-0 -f' for one)
	@$(shoal) logs --run-dir '$(RUN_DIR)' $(ARGS)

scale: install ## more or fewer processes of a role (ARGS='gpu_worker=3')
	@$(shoal) scale --run-dir '$(RUN_DIR)' $(ARGS)

rolling: install ## replace every service process while the mesh serves; NATS and Redis stay
	@$(shoal) rolling --run-dir '$(RUN_DIR)' $(ARGS)

chat: install ## talk to the running mesh
	@$(shoal) chat --run-dir '$(RUN_DIR)' $(ARGS)

test: install ## all tests, on real servers and the real model
	@$(VENV)/bin/pytest $(ARGS)

check: install ## exactly what CI checks: format, lint, types, imports, budgets
	$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pytest -q tests/test_budgets.py

chaos: install ## break a mesh in every way, compare every answer (SEED=N replays, 40 minutes)
	@$(shoal) chaos $(if $(SEED),--seed $(SEED)) $(ARGS)

invariance: install ## 200 requests one by one and 32 at once: in fp32 all answers are the same
	@$(VENV)/bin/python -m tests.mesh.invariance $(ARGS)

bench: install ## tokens/s and latencies, ours beside PEERS='name=URL; name=COMMAND'
	@$(VENV)/bin/python -m tests.bench $(if $(PEERS),--peers '$(PEERS)') $(ARGS)

quality: install ## perplexity of each precision and of each way to keep less of K and V
	@$(VENV)/bin/python -m tests.quality $(if $(MODEL),--model '$(MODEL)') $(ARGS)

kv: install ## what the L2 cache brings, costs and may not change, on the real model (10 minutes)
	@$(VENV)/bin/python -m tests.kv $(ARGS)

clean: ## remove .venv and caches (running meshes keep their .run)
	rm -rf $(VENV) kernels/cpu/built .cache/packed *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
