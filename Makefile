# `make train`, `make train-lm`, `make train-vl` and `make test` create .venv on first use; later calls reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: train train-lm train-vl test test-slow test-all test-lowest lint docs
train: $(VENV)/installed
	$(BIN)/python -m dcvision fit --config configs/vision/digits.yaml

train-lm: $(VENV)/installed
	$(BIN)/python -m dclm fit --config configs/lm/stdlib.yaml

train-vl: $(VENV)/installed
	$(BIN)/python -m dcvl fit --config configs/vl/scenes.yaml

test: $(VENV)/installed
	$(PYTEST)

# The second tier: tests that `make test` skips, except the long ones.
test-slow: $(VENV)/installed
	$(PYTEST) -m "slow and not long"

test-all: $(VENV)/installed
	$(PYTEST) -m "slow or not slow"

# Test the operator with the oldest supported torch and minimal dependencies.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet torch==2.10.0 "numpy<2.4" pytest safetensors
	.venv-lowest/bin/python -m pytest -m 'not long' tests/dcmha

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Build the documentation site in site/.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
