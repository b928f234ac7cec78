#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: build_wheel.sh <python> <build directory> <directory>
#
# Builds the wheel in the build directory and puts it into the other one, named for <python>'s torch.
# If there is an nvcc, the wheel has the CUDA kernels (docs/decisions/0034). They are compiled where
# `make check-cuda` compiles them.
set -eu

python=$1
build=$2
directory=$3
kernels=build/cuda/kernels
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

has_kernels=OFF
if command -v nvcc > /dev/null; then
  has_kernels=ON
  cmake -G Ninja -S . -B "$kernels" -DNORMSCOPE_BUILD_CUDA=ON -DNORMSCOPE_BUILD_TORCH=OFF > /dev/null
  cmake --build "$kernels" --target normscope_kernels_cuda
else
  echo "cuda: nvcc is missing, the wheel has no CUDA kernels"
fi

"$python" -m pip wheel --quiet --no-index --no-deps --no-build-isolation \
  --config-settings=build-dir="$build" \
  --config-settings=cmake.define.NORMSCOPE_BUILD_CUDA=$has_kernels \
  --config-settings=cmake.define.NORMSCOPE_CUDA_OBJECT="$(realpath -m \
    "$kernels/normscope/kernels/CMakeFiles/normscope_kernels_cuda.dir/cuda/cuda.cu.o")" \
  --wheel-dir "$scratch" .
named=$("$python" scripts/name_wheel.py "$scratch"/normscope-*-py3-none-*.whl)
mkdir -p "$directory"
mv "$named" "$directory"
echo "$directory/$(basename "$named")"
