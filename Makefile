# On a fresh clone with Python and make, every target sets itself up: one virtual environment, installed once, reused.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
READY  := $(VENV)/.ready
PEERS  := .venv-peers
OUT    ?= out
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup

.PHONY: help demo reproduce goldens test test-all test-gpu check bench peers peers-test mergekit-test botorch-test science-test wild docs serve build release-test clean

help:
	@echo "make demo    train a small network, draw its posterior's error bars (out/demo)"
	@echo "make reproduce   Figures 1 and 2 and Table 1 on one page (out/reproduce/report.html); QUICK=1 in minutes"
	@echo "make goldens   the numbers that no change may lose, beside the frozen ones"
	@echo "make test    the test suite, doctests included, without what trains long or starts processes: minutes"
	@echo "make test-all   all of it"
	@echo "make test-gpu   the tests that need CUDA, with the torch of PYTHON as it is (no environment is made)"
	@echo "make check   ruff and mypy --strict"
	@echo "make docs    the documentation, warnings as errors (out/site; needs Python 3.11)"
	@echo "make serve   the same in a browser, at http://localhost:8000, with search"
	@echo "make build   the wheel and the sdist (dist)"
	@echo "make release-test   both of them installed into an empty environment, and tried there"
	@echo "make bench   the benchmarks, with their peers, in an environment of their own (make peers); QUICK=1 at their smallest"
	@echo "make wild    checkpoints written by other libraries, read and compared with the live optimiser"
	@echo "make mergekit-test   mergekit, in an environment of its own, with the methods in contrib"
	@echo "make botorch-test   the BoTorch model, in an environment of its own, under botorch's acquisition functions"
	@echo "make science-test   models from the package index, in an environment of its own: the page, the benchmark at its smallest"
	@echo "make peers-test   import every peer, run every benchmark at its smallest size"

# The package alone, which is all that the demo needs; what the tests need comes on top.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(READY): $(DEMO)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@# timm declares torchvision, which only its models need; the tests read these two packages' optimisers' states.
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps timm pytorch_optimizer
	@touch $@

demo: $(DEMO)
	$(BIN)/bayesadam demo --out $(OUT)/demo

# Hours on a CPU, fewer on a GPU; stopped, it resumes. The quick version keeps its runs apart and leaves these alone.
reproduce: $(READY)
	$(BIN)/python -m experiments report $(OUT)/reproduce $(if $(QUICK),--quick)

goldens: $(READY)
	$(BIN)/python -m benchmarks.goldens

test: $(READY)
	$(PYTEST) -m "not slow"

test-all: $(READY)
	$(PYTEST)

test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -p no:cacheprovider -m cuda tests

check: $(READY)
	$(BIN)/ruff check src experiments tests benchmarks examples contrib docs/theme
	$(BIN)/ruff format --check src experiments tests benchmarks examples contrib docs/theme
	$(BIN)/mypy
	$(BIN)/mypy contrib/curvature.py

# What builds the site is installed by this target alone; the tests run its examples without it.
$(VENV)/.docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	PYTHONPATH=docs/theme $(BIN)/zensical build --strict --clean --config-file mkdocs.yml

# Search asks the server for its index, and so does not work from file://.
PORT ?= 8000
serve: $(READY)
	@test -f out/site/index.html || $(MAKE) docs
	$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory out/site

# What builds the package, and what it is tried in, live apart: the second holds the package and what it declares, nothing else.
PACK  := .venv-build
EMPTY := .venv-empty
$(PACK)/.ready: constraints.txt
	$(PYTHON) -m venv $(PACK)
	$(PACK)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build
	@touch $@

build: $(PACK)/.ready
	rm -rf dist
	$(PACK)/bin/python -m build --outdir dist .

# With another torch than the constraint's, as `make release-test TORCH=2.6.0`, and another Python by PYTHON=python3.13.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
release-test: build
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(PACK)/constraints.txt
	set -e; for file in dist/*.whl dist/*.tar.gz; do \
	  $(PYTHON) -m venv --clear $(EMPTY); \
	  $(EMPTY)/bin/pip install --quiet --disable-pip-version-check --constraint $(PACK)/constraints.txt $$file; \
	  $(EMPTY)/bin/python -I tests/smoke.py; \
	done

# Peers live apart: what they pin must not reach the project's own environment.
$(PEERS)/.ready: pyproject.toml constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[sklearn,transformers,onnx]' onnxruntime pooch pytest
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement benchmarks/peers.txt
	@touch $@

peers: $(PEERS)/.ready

peers-test: $(PEERS)/.ready
	$(PEERS)/bin/python -m pytest $(shell find benchmarks -name "test_*.py")

# A benchmark whose peer cannot be imported fails. The others run by name: benchmarks/README.md.
BENCHES := doubt.error_bars speed.run speed.training
bench: $(PEERS)/.ready
	set -e; for name in $(BENCHES); do $(PEERS)/bin/python -m benchmarks.$$name --out $(OUT)/bench $(if $(QUICK),--quick); done

# mergekit declares datasets and evaluation packages that merging does not import: it is installed without them.
MERGEKIT := .venv-mergekit
$(MERGEKIT)/.ready: pyproject.toml constraints.txt contrib/mergekit.txt
	$(PYTHON) -m venv $(MERGEKIT)
	$(MERGEKIT)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[transformers]' pytest
	$(MERGEKIT)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement contrib/mergekit.txt
	@touch $@

mergekit-test: $(MERGEKIT)/.ready
	OMP_NUM_THREADS=1 $(MERGEKIT)/bin/python -m pytest tests/contrib/test_mergekit.py

# botorch's releases may ask for another torch: it is installed without its own dependencies.
BOTORCH := .venv-botorch
$(BOTORCH)/.ready: pyproject.toml constraints.txt tests/botorch.txt
	$(PYTHON) -m venv $(BOTORCH)
	$(BOTORCH)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[sklearn]' pytest
	$(BOTORCH)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement tests/botorch.txt
	@touch $@

botorch-test: $(BOTORCH)/.ready
	OMP_NUM_THREADS=1 $(BOTORCH)/bin/python -m pytest tests/test_botorch.py

# Models that the package index has with the state of their optimisers.
SCIENCE := .venv-science
$(SCIENCE)/.ready: pyproject.toml constraints.txt benchmarks/science/packages.txt
	$(PYTHON) -m venv $(SCIENCE)
	$(SCIENCE)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable . pytest pyyaml scikit-learn ase==3.29.0 pymatgen==2026.10.24
	$(SCIENCE)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement benchmarks/science/packages.txt
	@touch $@

science-test: $(SCIENCE)/.ready
	OMP_NUM_THREADS=1 $(SCIENCE)/bin/python -m pytest benchmarks/science/test_crystals.py \
	  "tests/docs/test_examples.py::test_every_page_runs_as_it_is_shown[from-the-package-index]" \
	  "tests/examples/test_examples.py::test_it_prints_what_it_promises[crystals.py]"
	for what in "potentials chgnet" "potentials sevennet" voice backbone; do \
	  OMP_NUM_THREADS=1 $(SCIENCE)/bin/python -m benchmarks.science.$$what --quick --out $(OUT)/bench || exit 1; \
	done

# Checkpoints of other libraries: two environments, as Lightning 1.x and 2.x exclude each other.
WILD := .venv-wild
$(WILD)%/.ready: benchmarks/checkpoints/wild.txt benchmarks/checkpoints/wild-lightning1.txt constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $(if $(filter 1,$*),benchmarks/checkpoints/wild-lightning1.txt,benchmarks/checkpoints/wild.txt)
	@touch $@

wild: $(WILD)2/.ready $(WILD)1/.ready
	$(WILD)2/bin/python -m benchmarks.checkpoints.wild --also $(CURDIR)/$(WILD)1/bin/python --out $(OUT)/bench

clean:
	rm -rf $(VENV) $(PEERS) $(MERGEKIT) $(BOTORCH) $(SCIENCE) $(PACK) $(EMPTY) $(WILD)1 $(WILD)2 $(OUT) .cache build dist .mypy_cache .ruff_cache .pytest_cache
