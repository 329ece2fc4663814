# Two commands: `make run` (the main job) and `make test`. Both make .venv when it is missing or stale.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
ARGS ?=

.PHONY: help run test lint bench clean

help:
	@echo "make run    three tasks, five rounds, four unequal simulated clients (ARGS=... for the wrapper)"
	@echo "make test   the tests (ARGS=... for pytest)"
	@echo "make lint   ruff and mypy"
	@echo "make bench  how competitive sharing compares on this machine, quick version"
	@echo "make clean  remove .venv and caches"

run: .venv/.installed
	@$(BIN)/python -m simulations.run $(ARGS)

test: .venv/.installed
	@$(BIN)/python -m pytest -q $(ARGS)

lint: .venv/.installed
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: .venv/.installed
	@$(BIN)/python -m simulations.bench competitive --quick $(ARGS)

.venv/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Paceline needs Python 3.11 or newer; none was found on PATH" >&2; exit 1; }
	@echo "installing Paceline's dependencies into .venv (a few minutes, about 6 GB; log: .venv/install.log)"
	@$(PYTHON) -m venv .venv
	@$(PYTHON) scripts/requirements.py > .venv/requirements.txt
	@$(BIN)/python -m pip install --disable-pip-version-check -r .venv/requirements.txt > .venv/install.log 2>&1 \
	  || { grep -m 3 ERROR .venv/install.log >&2; echo "installation failed; see .venv/install.log" >&2; exit 1; }
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
