# Every target makes the virtual environment it needs, once. Python 3.11 or newer and pip are all that must be there.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
CLIENTS := .venv-clients
SUITE := .transformers
BIN := $(VENV)/bin
READY := $(VENV)/ready

# Nothing here needs a network after set-up, so nothing may wait for one.
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Threads that wait spin by default, and on a machine with other work to do that makes small steps ten times slower.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-slow test-clients test-transformers bench lint types format clean

demo: $(READY)
	$(BIN)/python -m modeling_xl.demo --output-dir demo_output

# One thread a worker: workers that share the cores would wait for each other.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not clients" -n $(JOBS) $(ARGS)

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n $(JOBS) $(ARGS)

# With programs around Transformers, several hundred megabytes, in an environment of its own.
test-clients: $(CLIENTS)/ready
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -m clients $(ARGS)

# The tests that all models of Transformers share; their marks and warnings are their own.
test-transformers: $(READY) $(SUITE)/ready
	OMP_NUM_THREADS=1 TRANSFORMERS_TESTS=$(CURDIR)/$(SUITE)/tests $(BIN)/python -m pytest -o addopts= -o filterwarnings=ignore \
		-n $(JOBS) tests/test_transformers_suite.py $(ARGS)

# About an hour and a half on two quiet cores; it goes on where it ended. Other packages get an environment in bench_output/peers.
bench: $(READY)
	$(BIN)/python benchmarks/speed.py --output-dir bench_output
	$(BIN)/python benchmarks/long_stream.py --tokens 1000000 --mem-len 1600 --call 128

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(CLIENTS) $(SUITE) demo_output bench_output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# They are in the source distribution and not in the wheel.
$(SUITE)/ready: $(READY)
	rm -rf $(SUITE)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(SUITE) "$$(grep '^transformers==' constraints.txt)"
	tar -xzf $(SUITE)/transformers-*.tar.gz -C $(SUITE) --strip-components=1
	touch $(SUITE)/tests/__init__.py $@

$(READY): EXTRAS := train,dev,bench
$(CLIENTS)/ready: EXTRAS := dev,clients

# torch alone and first: a wider request may choose another build of it, with gigabytes of CUDA libraries.
$(READY) $(CLIENTS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(@D)/bin/python -m pip install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@
