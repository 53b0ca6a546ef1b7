# Everything needs Python 3.11 or newer and make; the rest is installed into .venv on the first run.
#   make demo   train a small language model on 8 virtual CPU devices: plan, audit, numerics check
#   make test   the tests
#   make lint   formatting, lint, types
#   make docs   the documentation as a site, in out/docs/html; it executes every example
#   make docs-check   looks at each page of it in Chromium, which has to be installed
#   make test-newest  some tests on the newest Python and jax, if there is a Python 3.12 or 3.13

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# JAX's CUDA plugin compiles for GPU meshes without a GPU. It lies beside the environment, because JAX would try to start it.
CUDA := $(VENV)/cuda-plugin
TESTS ?=
WORKERS ?= auto

# An environment of its own, with neither TPU's compiler nor Ray: the tests are those that need none.
NEWEST := $(VENV)/newest
NEWEST_TESTS ?= tests/test_api.py tests/test_reports.py tests/context/test_typed.py tests/step/jitted tests/step/report \
	tests/pipeline/run/test_routes.py tests/trace/capture/portable/test_collectives.py tests/trace/capture/portable/test_one_device.py

# Python keeps its bytecode: the tests start hundreds of processes, and each would compile spmdctx anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := demo
.PHONY: demo test test-newest lint docs docs-check benchmark-matrix clean

demo: $(VENV)/.installed
	JAX_PLATFORMS=cpu $(BIN)/spmdctx train $(ARGS)

test: $(VENV)/.installed-test
	PYTHONPATH=$(CUDA) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

test-newest:
	@python=$$(.ci/newest-python); if test -z "$$python"; then \
		echo "test-newest is skipped: there is no Python 3.12 or 3.13 on PATH, nor from pyenv or uv."; \
	else \
		$(MAKE) --no-print-directory PYTHON="$$python" VENV=$(NEWEST) $(NEWEST)/.installed-test-small && \
		JAX_PLATFORMS=cpu $(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(NEWEST_TESTS); \
	fi

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	$(BIN)/python -m docs.site.build $(ARGS)

docs-check: docs
	$(BIN)/python -m docs.site.check

benchmark-matrix: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.matrix

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "spmdctx needs Python 3.11 or newer; give its path as PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(PIP) --editable '.[pinned]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[test]'
	test "$$(uname -s)" != Linux || { version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
		$(PIP) --no-deps --upgrade --target $(CUDA) jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version; }
	touch $@

$(VENV)/.installed-test-small: $(VENV)/.installed
	$(PIP) --editable '.[test-small]'
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(PIP) --editable '.[pinned,lint]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) out build dist
