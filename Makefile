# Everything a user or developer does, one word each. `make help` lists them.
# All set-up happens by itself: a virtual environment in .venv (tools/set_up.py), then the build with cmake and ninja.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv/bin
CMAKE := $(VENV)/cmake
CTEST := $(VENV)/ctest
# Only the plugins that are named: a user's Python may bring others.
PYTEST = PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OMP_NUM_THREADS=1 $(VENV)/python -m pytest -p xdist
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# More options for cmake, such as CMAKE_OPTIONS=-DFLASHQLA_WERROR=ON.
CMAKE_OPTIONS ?=
CONFIGURE = $(CMAKE) --log-level=WARNING -S . -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/ninja -DCMAKE_PREFIX_PATH=$(CURDIR)/.deps/usr $(CMAKE_OPTIONS)
RELEASE = -G Ninja -B build/release -DCMAKE_BUILD_TYPE=Release $(WITH_TORCH)
CLANG ?= $(firstword $(shell command -v clang++ clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++-14))
FUZZ_SECONDS ?= 60
# EMULATED=emulated-asan: under the sanitizers.
EMULATED ?= emulated
# An nvcc that can build the CUDA kernels (12.8 or newer); empty without one. `make NVCC= ...` goes without.
NVCC ?= $(shell nvcc --version 2>/dev/null | awk '/release/ { split($$5, v, /[.,]/); if (v[1] > 12 || v[1] == 12 && v[2] >= 8) print "nvcc" }')
WITH_TORCH = -DPython_EXECUTABLE=$(CURDIR)/$(VENV)/python -DFLASHQLA_TORCH=ON
GPU := $(wildcard /dev/nvidia0)

.PHONY: help setup setup-tests setup-emulated build build-tests cuda-library test cuda emulated demo bench asan fuzz format lint api-reference wheel \
  clean distclean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22
	@echo
	@echo "  PYTHON=...  the Python to build for (default python3; 3.10 or newer)      JOBS=...  compile and test jobs at once"
	@echo "  demo: TEXT=file to train on, DEVICE=cpu or cuda      fuzz: FUZZ_SECONDS=60 a target      CMAKE_OPTIONS=-D...  more options for cmake"
	@echo "  NVCC=    (empty) builds nothing for CUDA, where there is an nvcc"

setup:
	@$(PYTHON) tools/set_up.py

setup-tests:
	@$(PYTHON) tools/set_up.py --tests

setup-emulated:
	@$(PYTHON) tools/set_up.py --tests --emulation

build: setup cuda-library  ## build the library and the PyTorch op libraries (into python/flash_qla/lib)
	@$(CONFIGURE) $(RELEASE)
	@$(CMAKE) --build build/release -j $(JOBS) --target flashqla flashqla_torch

build-tests: setup-tests cuda-library
	@$(CONFIGURE) $(RELEASE) -DFLASHQLA_TESTS=ON
	@$(CMAKE) --build build/release -j $(JOBS)

# The PyTorch op library for CUDA, where there is an nvcc.
cuda-library: setup
ifneq ($(NVCC),)
	@$(CONFIGURE) -G Ninja -B build/cuda -DCMAKE_BUILD_TYPE=Release -DFLASHQLA_CUDA=ON $(WITH_TORCH)
	@$(CMAKE) --build build/cuda -j $(JOBS) --target flashqla_torch_cuda
endif

test: build-tests $(if $(and $(NVCC),$(GPU)),cuda)  ## all tests: C++ (googletest), then Python (pytest)
	@$(CTEST) --test-dir build/release --output-on-failure -j $(JOBS)
	@$(if $(and $(NVCC),$(GPU)),$(CTEST) --test-dir build/cuda --output-on-failure -L cuda)
	@$(PYTEST) -q -n $(JOBS)

cuda: setup-tests cuda-library  ## build the CUDA kernels, their tests and their benchmark into build/cuda (needs nvcc)
	@$(CONFIGURE) --preset cuda $(WITH_TORCH)
	@$(CMAKE) --build --preset cuda -j $(JOBS)
	@$(VENV)/python tools/check_ptxas.py build/cuda

emulated: setup-emulated  ## the tests of the CUDA kernels on the CPU, without a device or nvcc, in build/emulated
	@$(CONFIGURE) --preset $(EMULATED)
	@$(CMAKE) --build --preset $(EMULATED) -j $(JOBS)
	@$(CTEST) --preset $(EMULATED) -j $(JOBS)

demo: build  ## train and run a small language model on real text (about three minutes on two cores)
	@TEXT="$(TEXT)" DEVICE="$(DEVICE)" $(VENV)/python demo/main.py

bench: setup  ## measure: table, JSON and plot in bench/results
	@$(CONFIGURE) $(RELEASE) -DFLASHQLA_BENCH=ON
	@$(CMAKE) --build build/release -j $(JOBS) --target flashqla_bench flashqla_torch
	@$(VENV)/python bench/bench.py --program build/release/bench/flashqla_bench $(BENCH_OPTIONS)

asan: setup-tests  ## the C++ tests under the address and undefined-behaviour sanitizers
	@$(CONFIGURE) --preset asan
	@$(CMAKE) --build --preset asan -j $(JOBS)
	@$(CTEST) --preset asan -j $(JOBS)

fuzz: setup  ## fuzz descriptors, tensors and offsets with libFuzzer (needs clang)
	@[[ -n "$(CLANG)" ]] || { echo "make fuzz needs clang++. On Debian or Ubuntu: sudo apt-get install clang"; exit 1; }
	@CXX=$(CLANG) $(CONFIGURE) --preset fuzz
	@$(CMAKE) --build --preset fuzz -j $(JOBS)
	@for source in tests/fuzz/fuzz_*.cpp; do name=$$(basename $$source .cpp); echo "fuzzing: $$name"; \
	  build/fuzz/tests/fuzz/$$name -max_total_time=$(FUZZ_SECONDS) -max_len=512 -len_control=0 -print_funcs=0; done

format: setup  ## format the C++ and Python sources in place
	@git ls-files -z '*.cpp' '*.hpp' '*.inl' '*.cu' '*.cuh' | xargs -0 -r $(VENV)/clang-format -i
	@$(VENV)/ruff format -q . && $(VENV)/ruff check -q --fix .

lint: setup  ## check formatting, layering, and that every header compiles alone
	@git ls-files -z '*.cpp' '*.hpp' '*.inl' '*.cu' '*.cuh' | xargs -0 -r $(VENV)/clang-format --dry-run --Werror
	@$(VENV)/ruff format -q --check . && $(VENV)/ruff check -q .
	@$(VENV)/python tools/check_layers.py
	@$(VENV)/python tools/check_headers.py -j $(JOBS) --torch
	@$(VENV)/python tools/api_reference.py --check

api-reference: setup  ## write docs/api/python.md from the docstrings
	@$(VENV)/python tools/api_reference.py

wheel: setup  ## build the wheel into dist
	@$(VENV)/python -m pip wheel -q --no-deps -w dist .

clean:  ## remove what was built
	@rm -rf build dist python/flash_qla/lib

distclean: clean  ## ... and what the set-up made (.venv, .deps)
	@rm -rf .venv .deps
