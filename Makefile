# Everything a newcomer needs: `make serve` runs Hocket, `make test` proves it. Both set up whatever is missing and touch no network once that is done.
#
#   PYTHON=python3.12        another interpreter (3.11 or newer)
#   TORCH_INDEX=URL          where to take torch from, such as PyTorch's own CPU index (see README.md)
#   ARGS="--port 9000"       flags for serve, pytest or bench

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch

# Debian's names; with COMMAND: before one, only where there is no such command. Without venv in the interpreter, python3-venv is added.
RUN_PACKAGES := ca-certificates libgomp1
CHECK_PACKAGES := $(RUN_PACKAGES) openssl
TEST_PACKAGES := $(CHECK_PACKAGES) chromium fonts-noto-color-emoji nginx:nginx node:nodejs npm:npm
PACKAGES ?= $(RUN_PACKAGES)

.PHONY: help system install serve test test-clients check format bench clean

help:
	@echo "make serve | test | test-clients | check | format | bench | install | system | clean"

system:
	@scripts/system-packages $(PYTHON) $(PACKAGES)

install: system $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing Hocket and what it needs into $(VENV) (torch is the large part)"
	$(TORCH)
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) --editable ".[test]"
	@touch $@

serve: install
	@$(BIN)/hocket serve $(ARGS)

test: PACKAGES := $(TEST_PACKAGES)
test: system $(VENV)/installed-test
	$(BIN)/hocket model
	$(BIN)/python -m pytest $(ARGS)

# Other people's clients, in an environment of their own: docs/clients.md
$(CLIENTS)/installed: tests/clients/requirements.txt
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

test-clients: PACKAGES := $(TEST_PACKAGES)
test-clients: system $(VENV)/installed-test $(CLIENTS)/installed
	$(BIN)/hocket model
	$(BIN)/python -m pytest $(ARGS) tests/clients

check: PACKAGES := $(CHECK_PACKAGES)
check: system $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: system $(VENV)/installed-test
	@$(BIN)/hocket bench $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis
