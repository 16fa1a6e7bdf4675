# make demo: install, convert SmolLM2, calibrate, generate in each mode, print the table.   make test: all tests.

PYTHON ?= python3
BIN    := .venv/bin
# cmake and ninja of the venv serve where the system has none
TOOLS  := PATH="$(CURDIR)/$(BIN):$$PATH"
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

PLUGIN_SOURCES  := $(shell find CMakeLists.txt ggml-twobit -type f)
PACKAGE_SOURCES := $(shell find twobit_gguf -name '*.py' -o -name '*.json') pyproject.toml

.PHONY: demo test build lint asan clean

demo: .venv/.stamp-build
	$(BIN)/python scripts/demo.py

test: .venv/.stamp-build
	$(BIN)/python scripts/build_llama_tools.py
	$(TOOLS) $(BIN)/pytest

build: .venv/.stamp-build

lint: .venv/.stamp-build
	$(BIN)/ruff check .
	$(BIN)/mypy

asan: .venv/.stamp-build
	$(TOOLS) $(BIN)/pytest tests/test_asan.py

# The package itself, again whenever a source changes; what CMake built before stays in build/, so this takes seconds.
.venv/.stamp-build: .venv/.stamp-requirements $(PLUGIN_SOURCES) $(PACKAGE_SOURCES) README.md
	$(TOOLS) $(PIP) install --no-deps --no-build-isolation --force-reinstall .
	touch $@

# Everything else: llama-cpp-python compiles for about three minutes, once (pip keeps the wheel).
.venv/.stamp-requirements: pyproject.toml scripts/requirements.py
	$(PYTHON) -m venv .venv
	$(BIN)/python scripts/requirements.py > .venv/requirements.txt
	$(PIP) install -r .venv/requirements.txt
	touch $@

clean:
	rm -rf .venv build out
