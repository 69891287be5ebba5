# Everything a newcomer needs: `make serve` runs Hocket, `make test` proves it. Both set up whatever is missing and touch no network once that is done.
#
#   PYTHON=python3.12        another interpreter (3.11 or newer)
#   TORCH_INDEX=URL          where to take torch from, such as PyTorch's own CPU index (see README.md)
#   ARGS="--port 9000"       flags for serve, pytest or bench

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch

# Debian's names. Without venv in the interpreter, python3-venv is added.
RUN_PACKAGES := ca-certificates libgomp1
TEST_PACKAGES := chromium fonts-noto-color-emoji
PACKAGES ?= $(RUN_PACKAGES)

.PHONY: help system install serve test check format bench clean

help:
	@echo "make serve | test | check | format | bench | install | system | clean"

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

test: PACKAGES := $(RUN_PACKAGES) $(TEST_PACKAGES)
test: system $(VENV)/installed-test
	$(BIN)/hocket model
	$(BIN)/python -m pytest $(ARGS)

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
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
