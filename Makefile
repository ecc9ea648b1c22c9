# Two commands: `make demo` sets everything up and does the main job; `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is pinned: newer builds on PyPI bring gigabytes of CUDA packages that nothing here needs.
TORCH := torch==2.13.0
EXTRAS := export,rtx,video,eval,supervision,ray,serve,dev

.PHONY: demo test test-slow setup lint clean

demo: setup
	$(BIN)/detrt demo -o demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu and not network"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("detrt needs Python 3.10 or newer; got " + sys.version.split()[0] + "; run: make PYTHON=python3.11") if sys.version_info < (3, 10) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

lint: setup
	$(BIN)/ruff check src tests training
	$(BIN)/ruff format --check src tests training

clean:
	rm -rf demo build dist src/*.egg-info .pytest_cache .ruff_cache
