# unskip: `make demo` and `make test` do all set-up on a machine that has only Python and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OLDEST := .venv-oldest
# Tool chains of devices: the extras of each environment, and what they are imported as.
TARGETS := fpga tflite executorch
EXTRAS_fpga := hls4ml,qonnx
EXTRAS_tflite := tflite
EXTRAS_executorch := executorch
IMPORT_fpga := hls4ml, qonnx
IMPORT_tflite := litert_torch, ai_edge_quantizer
IMPORT_executorch := executorch.runtime

.PHONY: demo test test-all test-rest test-oldest test-targets test-deep lint docs clean setup

demo: $(READY)            ## the story, in a few minutes on a CPU
	$(BIN)/unskip demo

test: lint $(READY)       ## the quick suite: lint, types, one small network per family (at most 10 minutes on 2 cores)
	$(BIN)/pytest -n auto -m "not full and not deep"

test-all: test test-rest  ## everything: every model name, every fuzz case

test-rest: $(READY) docs  ## what `make test-all` adds to `make test`
	$(BIN)/pytest -n auto -m "full and not deep"

# What touches the libraries most: blocks of timm and torchvision, the compiler.
test-oldest: $(OLDEST)/.ready  ## a part of the quick suite with the oldest versions that pyproject.toml admits
	$(OLDEST)/bin/pytest -n auto -m "not full and not deep" tests/surgery tests/methods

# Whatever is not installed would be skipped, so it is imported first.
test-targets: $(TARGETS:%=.venv-targets-%/.ready)  ## devices' tool chains, in environments of up to 6 GB each; no part of .ci/run
	$(foreach t,$(TARGETS),.venv-targets-$(t)/bin/python -c 'import $(IMPORT_$(t))' && \
	  .venv-targets-$(t)/bin/python -m pytest -m targets -rs tests/targets &&) true

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

.venv-targets-%/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --no-compile --no-cache-dir --editable '.[$(EXTRAS_$*)]' 'pytest>=8'
	touch $@

$(OLDEST)/.ready: pyproject.toml .ci/oldest.py
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(PYTHON) .ci/oldest.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-compile --no-cache-dir \
	  --constraint $(OLDEST)/constraints.txt --editable '.[dists,test]' \
	  || { echo "make test-oldest: pip can't install the oldest versions that pyproject.toml admits (see above). It needs a package index and 10 GB of disk." >&2; exit 1; }
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(TARGETS:%=.venv-targets-%) docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis unskip-demo
