# Every target is a few commands; the first one lists them.
# make VENV=/elsewhere TARGET keeps the environment out of the checkout.

PYTHON ?= python3
VENV ?= .venv
MODELS ?= models
BIN := $(VENV)/bin
SMALL := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: help run answer install test check cubin device-check bench bench-peer bench-cpu models clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

run: install  ## set up and show the embedded pair at work, checked against plain decoding
	$(BIN)/cudflash demo

answer: install  ## fetch a small model (98 MB) and answer one question
	$(BIN)/python scripts/fetch_models.py --dir $(MODELS) smollm2
	$(BIN)/cudflash generate -m $(SMALL) --chat -p "What is gravity?" -n 48 --temp 0

install: $(VENV)/installed  ## set up cudflash, editable, in .venv

test: $(VENV)/installed-test  ## set up with what the tests need, run them
	$(BIN)/python -m pytest -n auto --dist loadfile --max-worker-restart=0

check: $(VENV)/installed-test  ## lint
	$(BIN)/ruff check .

cubin: $(VENV)/installed-cubin  ## compile and inspect every CUDA kernel for every architecture (no GPU, no toolkit)
	$(BIN)/python -m scripts.build_cubins

device-check:  ## check and measure a real card (needs CuPy; PYTHON=... runs another environment)
	$(PYTHON) -m scripts.device_check

bench: $(VENV)/installed-bench  ## time kernels and rounds, judge them against the baseline
	$(BIN)/python -m pytest tests/benchmarks -o python_files='bench_*.py' \
		-o python_functions='bench_*' -p no:xdist -q --benchmark-json=.benchmarks.json
	$(BIN)/python scripts/bench_regression.py .benchmarks.json

bench-peer: install  ## compare speeds with llama.cpp on the same files, where it is there
	$(BIN)/python scripts/bench_peer.py --models-dir $(MODELS) $(PEER)

bench-cpu: install models  ## measure the CPU backend on the small models
	$(BIN)/python scripts/bench_cpu.py

models: install  ## fetch the two small models (340 MB)
	$(BIN)/python scripts/fetch_models.py --dir $(MODELS)

clean:  ## remove environment, builds and caches; models stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[$*]'
	touch $@ $(VENV)/installed
