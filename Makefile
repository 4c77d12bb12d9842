# Two targets do all the set-up: `make run` (the main job) and `make test`. Both create .venv when it is not there.
#
# PYTHON    the interpreter that creates .venv (3.11 or later)
# PIP_ARGS  for pip; on Linux `PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"` takes the
#           CPU build of torch (0.2 GB) where PyPI's own brings CUDA along (several GB)
# ARGS      for launch/ring.py, e.g. `make run ARGS="--seq 16K --heads 8 --backward --check"`

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?= --seq 64K --backward --check
PROCESSES ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TYPED := build/mypy

.PHONY: run test test-slow test-ray gpu gpu2 lint style types clean
.DELETE_ON_ERROR:

run: $(INSTALLED)
	$(BIN)/torchrun --standalone --nproc-per-node $(PROCESSES) launch/ring.py $(ARGS)

# In the order of the files: by number of tests, as xdist would, the few that take longest come last and alone.
test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# On a machine with a GPU, and on one with several (between them): tests, rates, one million tokens; 9 minutes each.
gpu: $(INSTALLED)
	$(BIN)/python launch/gpu_session.py --out build/gpu1 --gpus 1

gpu2: $(INSTALLED)
	$(BIN)/python launch/gpu_session.py --out build/gpu

# Ray clusters, also those that take long: drivers killed, hosts with a link that is cut (as root).
test-ray: $(INSTALLED)
	$(BIN)/python -m pytest tests/ray -s

lint: style types

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow the finder of an editable install, so it is shown the package as a wheel would install it:
# a directory of links, in which `kernels/` is `ringfa4/kernels`. -p checks every module below, imported or not.
types: $(INSTALLED)
	rm -rf $(TYPED)/ringfa4 && mkdir -p $(TYPED)/ringfa4
	ln -s $(CURDIR)/ringfa4/* $(CURDIR)/kernels $(CURDIR)/comm $(CURDIR)/launch $(TYPED)/ringfa4/
	cd $(TYPED) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p ringfa4

# Installed once, and again when what to install has changed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ringfa4 is developed with Python 3.11 or later, not " + sys.version + "; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,ray,cuda]'
	touch $@

clean:
	rm -rf $(VENV) build dist ringfa4.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
