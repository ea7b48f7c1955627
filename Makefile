# `make train`, `make train-lm` and `make test` set up .venv on first use; later calls go straight to work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train train-lm test lint
train: $(VENV)/installed
	$(BIN)/python -m dcvision fit --config configs/vision/digits.yaml

train-lm: $(VENV)/installed
	$(BIN)/python -m dclm fit --config configs/lm/stdlib.yaml

test: $(VENV)/installed
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
