#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: test_without_torch.sh <JUnit file>
#
# Checks that nothing depends on normscope/torch: a copy of the tree without it, and without Python,
# builds and passes its C++ tests, and a program builds against the installed copy.
set -eu

results=$(realpath -m "$1")
copy=build/without-torch
rm -rf "$copy/source"
mkdir -p "$copy/source"

git ls-files -z --cached --others --exclude-standard -- \
  CMakeLists.txt cmake normscope tests ':!normscope/torch' ':!tests/python' |
  xargs -0 cp --parents --preserve=timestamps -t "$copy/source"

cmake -G Ninja -S "$copy/source" -B "$copy/build" -DNORMSCOPE_BUILD_TESTS=ON > /dev/null
cmake --build "$copy/build"
cmake --install "$copy/build" --prefix "$copy/install" > /dev/null
cmake -G Ninja -S tests/consumer -B "$copy/consumer" --fresh -DCMAKE_PREFIX_PATH="$PWD/$copy/install" \
  -Dcomponents=core > /dev/null
cmake --build "$copy/consumer"
ctest --test-dir "$copy/consumer" --no-tests=error --output-on-failure
ctest --test-dir "$copy/build" --no-tests=error --output-on-failure --output-junit "$results"
