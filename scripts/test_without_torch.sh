#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: test_without_torch.sh <JUnit file>
#
# Checks that nothing depends on normscope/torch: a copy of the tree without it, and without Python,
# builds, a program builds against the installed copy, and the tests of the core pass. The presets of
# the sanitizers build all other tests without torch.
set -eu

results=$(realpath -m "$1")
copy=build/without-torch
build=$copy/build/release # as deep as the usual build, whose objects a compiler cache can then reuse
mkdir -p "$copy"
find "$copy" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +

git ls-files -z --cached --others --exclude-standard -- \
  CMakeLists.txt cmake normscope tests ':!normscope/torch' ':!tests/python' |
  xargs -0 cp --parents --preserve=timestamps -t "$copy"

cmake -G Ninja -S "$copy" -B "$build" -DNORMSCOPE_BUILD_TESTS=ON -DNORMSCOPE_TEST_CUDA_ON_HOST=OFF \
  -DNORMSCOPE_WERROR="${WERROR:-OFF}" > /dev/null
cmake --build "$build" --target normscope core_test
cmake --install "$build" --prefix "$copy/install" > /dev/null
cmake -G Ninja -S tests/consumer -B "$copy/consumer" --fresh -DCMAKE_PREFIX_PATH="$PWD/$copy/install" \
  -Dcomponents=core > /dev/null
cmake --build "$copy/consumer"
ctest --test-dir "$copy/consumer" --no-tests=error --output-on-failure
ctest --test-dir "$build" --no-tests=error --output-on-failure -j "${CMAKE_BUILD_PARALLEL_LEVEL:-1}" \
  -R '^core_test' --output-junit "$results"
