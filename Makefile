# `make demo` and `make test` need Python >= 3.10 with venv, make and a package index; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Directories are listed too: their time changes when a file goes away.
SOURCES := $(shell find lightning_hiercomm -name __pycache__ -prune -o -print)

MARKDOWN := $(wildcard *.md docs/*.md docs/*/*.md docs/*/*/*.md examples/*.md examples/*/*.md benchmarks/*.md)

# Exact versions of everything that is installed; the wheel's own requirements are ranges. `make test CONSTRAINTS=` takes the newest.
CONSTRAINTS := .ci/constraints.txt
PIP := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(BIN)/pip install --disable-pip-version-check
INSTALL := $(PIP) --quiet

.PHONY: demo test docs format constraints versions clean

demo: $(VENV)/.installed-demo  ## train digits on two nodes of two ranks, all on this machine's CPU
	$(BIN)/python examples/digits/main.py fit --config examples/digits/config.yaml
	@echo 'Curves of loss, accuracy and traffic: $(BIN)/tensorboard --logdir runs'

# Three workers on two cores, because many tests wait for processes. Files are in the order of tests/support/pairwise.py, longest first. A worker
# that crashes is not replaced, because xdist would then hang. `make test NIGHTLY=--nightly` runs all tests.
test: $(VENV)/.installed-dev  ## all checks and tests, against the installed package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/codespell --dictionary tools/vocabulary.txt $(MARKDOWN)
	$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(NIGHTLY)

docs: $(VENV)/.installed-docs  ## the documentation, in docs/_build/html; a warning is an error
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch 2.14.1 is the newest that all supported versions of Python can install.
constraints: | $(BIN)/python  ## move the pins to the newest versions
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	printf '%s\n' mpich torch==2.14.1 torchvision==0.29.1 | $(BIN)/uv pip compile --quiet --upgrade --universal \
		--python-version 3.10 --extra dev --no-annotate --custom-compile-command 'make constraints' \
		--output-file .ci/constraints.txt pyproject.toml -

versions:  ## list what is installed in .venv
	@$(BIN)/python --version
	@$(BIN)/pip list --format freeze --disable-pip-version-check | paste -sd ' ' | fold -sw 120

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# pip re-installs a local directory even when its version has not changed; dependencies that fit are left alone. The
# words come before the environment is made, which takes seconds too.
$(VENV)/.installed-demo: pyproject.toml $(CONSTRAINTS) $(SOURCES)
	@echo 'Installing torch with its CUDA packages and the rest into $(VENV): 5.8 GB, some minutes.'
	@echo 'On a machine without a GPU 1 GB is enough: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo'
	@$(MAKE) --no-print-directory --silent $(BIN)/python
	$(PIP) '.[cli,examples]'
	touch $@

# The site is built from the committed pages alone, without the package.
$(VENV)/.installed-docs: $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) furo myst-parser sphinx
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) $(SOURCES) | $(BIN)/python
	$(INSTALL) '.[dev]'
	$(INSTALL) --no-deps --prefix $(VENV)/mpich mpich
	touch $@
