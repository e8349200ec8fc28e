# What a newcomer types. `make` alone lists it.

PYTHON ?= python3
TORCH ?= 2.13.0
DATA ?=

# A finished .venv of another Python or torch will do, unless one was asked for.
ANY := $(if $(filter file,$(origin PYTHON)),--any-python) $(if $(filter file,$(origin TORCH)),--any-torch)

# The folder as it was typed, for the shell: make is not to read its dollars, nor the shell its quotes.
DATA_WORD = '$(subst ','\'',$(value DATA))'

# What was typed for a target that would not read it.
ifneq (,$(and $(filter command%,$(origin DATA)),$(filter-out demo,$(MAKECMDGOALS))))
$(error DATA is read by `make demo` alone)
endif
ifneq (,$(and $(filter command%,$(origin TORCH)),$(filter gpu-check,$(MAKECMDGOALS))))
$(error TORCH is not read by `make gpu-check`, which takes the torch of PYTHON)
endif

# What clang-format looks after.
KERNELS := $(wildcard $(foreach suffix,cpp h cu cuh,$(addsuffix /*.$(suffix),native cpu cpu/* cuda cuda/* tests/cuda/emulation)))

# What the set-up looks at before it installs: options that some targets add.
LOOK =

.PHONY: help setup python test test-fast test-emulated test-sanitized lint coverage mutation docs gpu-check wheel demo demo-translation demo-synthetic clean

help:
	@echo 'make setup             make the environment .venv, with torch, fairseq and this project in it'
	@echo 'make demo              train and compare three small language models (DATA=folder: on your text)'
	@echo 'make demo-translation  train two small models to translate numbers, score and compare them'
	@echo 'make demo-synthetic    see what memories of key-value pairs can hold and replace'
	@echo 'make test              check style and types, run all tests; the two below where their kernels changed'
	@echo 'make test-fast         run the tests that are not marked slow'
	@echo 'make test-emulated     run the long tests of the CUDA kernels in the emulator, record that they passed'
	@echo 'make test-sanitized    run the CPU kernels under sanitizers, record that they passed'
	@echo 'make lint              check style and types'
	@echo 'make coverage          run all tests, say which lines of the package they left out'
	@echo 'make mutation          change the package and the kernels by mutants, count those that the tests notice (hours)'
	@echo 'make docs              build the documentation in site/, and check its links'
	@echo 'make gpu-check         build, test, sanitize and measure on a GPU, with the torch of PYTHON'
	@echo 'make wheel             build dist/: a wheel with compiled CPU kernels for every torch from 2.10 on, and the sources'
	@echo 'make clean             remove .venv and what tools left behind'
	@echo
	@echo 'PYTHON=$(PYTHON) and TORCH=$(TORCH) choose what the environment is made from.'
	@echo 'demo, demo-translation, demo-synthetic, docs, test, test-fast and lint make it first where it is missing or unfinished.'

setup: python
	@$(PYTHON) tools/setup_environment.py --torch=$(TORCH) $(ANY) $(LOOK)

python:
	@command -v $(PYTHON) > /dev/null || { echo 'error: PYTHON=$(PYTHON) is no program' >&2; exit 1; }

test: lint
	.venv/bin/python -m pytest -n auto -q --durations=20
	.venv/bin/python tools/recorded_passes.py --changed emulated sanitized

test-fast: setup
	.venv/bin/python -m pytest -n auto -q --durations=20 -m 'not slow and not emulated'

test-emulated test-sanitized: test-%: setup
	.venv/bin/python tools/recorded_passes.py $*

lint: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run --Werror $(KERNELS)

# Which lines the tests run; processes of their own count only where they were started as pytest's workers are.
coverage: setup
	.venv/bin/python -m pytest -n auto --cov=fairseq_fastweights --cov-report=term:skip-covered --cov-report=html:build/coverage

# Several hours: runs of the suite's parts for every mutant.
mutation: setup
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt universalmutator==1.14.1
	.venv/bin/python tools/mutation.py

# Tables and reference are made of the code; a broken link is an error.
docs: setup
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
	@echo 'The site is in site/index.html'

# On a machine without a network: no set-up, whatever torch there is.
gpu-check: python
	@$(PYTHON) tools/gpu_check.py

# Its kernels use torch's stable ABI and no Python: one file for all. auditwheel says which systems it is for.
wheel: LOOK = --oldest=2.10
wheel: setup
	rm -rf dist build/dist build/lib build/lib.* build/bdist.*
	FASTWEIGHTS_BUILD=cpu FASTWEIGHTS_BUILD_ISA=all .venv/bin/python -m build --no-isolation --sdist --wheel --outdir build/dist
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist build/dist/*.whl
	cp build/dist/*.tar.gz dist

demo: LOOK = $(if $(value DATA),--data=$(DATA_WORD))
demo: setup
	.venv/bin/python examples/demo/run.py $(if $(value DATA),--data $(DATA_WORD))

demo-translation: setup
	.venv/bin/python examples/demo_translation/run.py

demo-synthetic: setup
	.venv/bin/python examples/synthetic/demo.py

clean:
	rm -rf .venv build dist site *.egg-info fairseq_fastweights/_native_* .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
