# `make run` and `make test` do all their own set-up; both are safe to repeat and quick the second time.
.PHONY: run test clients check soak stubs format clean help
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Of the tests; a whole core each.
PROCESSES ?= 2

help:
	@echo "make run    a cluster on this machine: two replicas, a real model, cached tokens"
	@echo "make test   all tests (no GPU, no network beyond the package index)"
	@echo "make clients  aiperf, guidellm, schemathesis and others against a live cluster (docs/clients.md)"
	@echo "make check  ruff, mypy --strict, stubs, import direction, style"
	@echo "make soak   the full sizes of the fault scenarios (hours)"

$(STAMP): pyproject.toml
	@python=$$(for p in $(PYTHON) python3.11 python3.12 python3 python; do \
	    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	    && echo $$p && break; done); \
	  test -n "$$python" || { echo "Banyan needs Python 3.11 or 3.12; none was found."; exit 1; }; \
	  echo "Installing Banyan into $(VENV) (a few minutes, once) ..."; \
	  $$python -m venv $(VENV) && $(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

run: $(STAMP)
	@$(PY) -m banyan demo

model: $(STAMP)
	@$(PY) -m banyan model fetch demo

test: model
	@$(PY) -m pytest -m 'not soak' -n $(PROCESSES) --no-loadscope-reorder --durations=15

clients: model
	@$(PY) tests/clients/run.py

soak: model
	@$(PY) -m pytest -m soak --timeout=0

check: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m pytest -q tests/repo

stubs: $(STAMP)
	@$(PY) tools/stubs.py

format: $(STAMP)
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
