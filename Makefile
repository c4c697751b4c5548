# unskip: `make demo` and `make test` do all set-up on a machine that has only Python and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-all test-rest test-deep lint docs clean setup

demo: $(READY)            ## the story, in a few minutes on a CPU
	$(BIN)/unskip demo

test: lint $(READY)       ## the quick suite: lint, types, one small network per family (at most 15 minutes on 2 cores)
	$(BIN)/pytest -n auto -m "not full and not deep"

test-all: test test-rest  ## everything: every model name, every fuzz case

test-rest: $(READY) docs  ## what `make test-all` adds to `make test`
	$(BIN)/pytest -n auto -m "full and not deep"

test-deep: $(READY)       ## hours: thousands of random networks, many kills and full disks; no part of .ci/run
	$(BIN)/pytest -n auto -m deep

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit('unskip needs Python 3.11 or newer; found ' + sys.version.split()[0] + '. Set PYTHON=python3.x.' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis unskip-demo
