# make demo        train, sample and report: the GPT of examples/gpt, a few minutes on two cores
# make test        the test suite, without a GPU
# make test-gpu    the tests of the GPU kernels; fails without a GPU
# make sanitize    the GPU kernels under compute-sanitizer, which must be installed
# make benchmark   compare attention implementations; make benchmark ARGS=--check for the CPU bars
# make lint        formatting, lint and import contracts
# make venv        build and install the package, with all that the tests need, into $(VENV)
#
# Needs Python 3.11 or newer, a C++ compiler and PyPI. The first call builds everything, later ones start at once.
#
#   PYTHON=python3.13       the interpreter to make the environment with
#   VENV=.venv-013          where the environment is
#   JAX_VERSION=0.10.2      the version of jax to install; default: the newest that pip finds
#   ARGS="--size tiny"      passed on to the program that demo, test or benchmark runs

PYTHON ?= python3
VENV ?= .venv
JAX_VERSION ?=
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1

SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
JAX := $(if $(JAX_VERSION),jax-$(JAX_VERSION),jax-any)
# Stamps: the library is built; what an extra of pyproject.toml names is installed, with the jax that was asked for.
BUILT = $(VENV)/.built
INSTALLED = $(VENV)/.installed-$(1)-$(JAX)

# The processes of the GPU tests share one device.
GPU = JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false

define PRINT_REQUIREMENTS
import sys, tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[1]], sep="\n")
endef

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-gpu sanitize benchmark lint clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

venv: $(BUILT) $(call INSTALLED,test)

demo: $(BUILT) $(call INSTALLED,demo)
	$(VENV)/bin/python -m examples.gpt $(ARGS)

test: $(BUILT) $(call INSTALLED,test)
	$(VENV)/bin/python -m pytest --numprocesses auto $(ARGS)

test-gpu: $(BUILT) $(call INSTALLED,test) $(call INSTALLED,gpu)
	$(GPU) $(VENV)/bin/python -m pytest --numprocesses auto -m gpu --require-gpu $(ARGS)

sanitize: $(BUILT) $(call INSTALLED,test) $(call INSTALLED,gpu)
	$(VENV)/bin/python tests/sanitize.py $(ARGS)

benchmark: $(BUILT) $(call INSTALLED,benchmark)
	$(VENV)/bin/python -m benchmarks.attention $(ARGS)

lint: $(call INSTALLED,dev)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run -Werror
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxflash needs Python 3.11 or newer, $(PYTHON) is older: call make with PYTHON=<a newer one>"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(BUILT): $(VENV)/bin/python $(SOURCES)
	$(VENV)/bin/python -m pip install --no-deps --editable .
	touch $@

# The environment has one version of jax, so the stamps of others are removed.
$(VENV)/.installed-%-$(JAX): pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -c '$(PRINT_REQUIREMENTS)' $* > $(VENV)/requirements-$*.txt
	$(VENV)/bin/python -m pip install -r $(VENV)/requirements-$*.txt $(if $(JAX_VERSION),jax==$(JAX_VERSION))
	find $(VENV) -maxdepth 1 -name '.installed-*' ! -name '*-$(JAX)' -delete
	touch $@
