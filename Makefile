# make demo   train a tiny Megatron-Core GPT under four attention arms, with probes, and open the page it leaves
# make test   all CPU tests        make test-gpu   the Hopper suites        make kernels   compile csrc/
# PYTHON=/path picks the interpreter (any 3.11+), VENV=dir where the environment goes.
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
PARALLEL ?= -n 2

.PHONY: setup demo test test-gpu lint format coverage kernels clean
setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@python=$$(tools/find_python.sh) && echo "setting up $(VENV) with $$python" && $$python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[megatron,review,dev]'
	@touch $@

demo: setup
	$(BIN)/dm-plugin ab examples/ab/tiny.yaml --resume

test: setup
	$(PYTEST) $(PARALLEL)

test-gpu:
	python3 tests/sm90/run.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

coverage: setup
	$(PYTEST) $(PARALLEL) --cov=dm_plugin --cov-report=term-missing:skip-covered

kernels: setup
	$(BIN)/python csrc/build.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
