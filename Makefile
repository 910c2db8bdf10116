# On a fresh clone with Python and make, every target sets itself up: one virtual environment, installed once, reused.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := .venv-peers
OUT    ?= out

.PHONY: help demo test check bench peers clean

help:
	@echo "make demo    train a small network, read its posterior, draw one picture (out/demo)"
	@echo "make test    the test suite, doctests included"
	@echo "make check   ruff and mypy --strict"
	@echo "make bench   the benchmarks, beside peers in an environment of their own"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@# timm declares torchvision, which only its models need; the tests read its optimisers' states.
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps timm
	@touch $@

demo: $(READY)
	$(BIN)/bayesadam demo --out $(OUT)/demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

# Peers live apart: what they pin must not reach the project's own environment.
$(PEERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@# Without their dependencies: those would bring another torch, and torchvision, which only their examples need.
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
	  ivon-opt laplace-torch==0.3 asdfghjkl==0.1a4 backpack-for-pytorch==1.7.1 curvlinops-for-pytorch==3.0.1 \
	  einops==0.8.2 opt_einsum==3.4.0 torchmetrics lightning-utilities vowpalwabbit==9.11.9
	@touch $@

peers: $(PEERS)/.ready

bench: $(PEERS)/.ready
	$(PEERS)/bin/python benchmarks/step.py
	$(PEERS)/bin/python benchmarks/sample.py
	$(PEERS)/bin/python benchmarks/predict.py --out $(OUT)/bench

clean:
	rm -rf $(VENV) $(PEERS) $(OUT) build dist .mypy_cache .ruff_cache .pytest_cache
