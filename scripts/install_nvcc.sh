#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: install_nvcc.sh <python> <directory>
#
# Installs nvcc of CUDA 13.0, with all that it needs, from the package index into the directory, and
# prints the folder for PATH. Drivers from 580 on run what the first toolkit of CUDA 13 compiles.
set -eu

"$1" -m pip install --quiet --target "$2" "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"
toolkit=$2/nvidia/cu13
# The packages lack two links.
ln -sfn lib "$toolkit/lib64"
ln -sfn libcudart.so.13 "$toolkit/lib/libcudart.so"
echo "$toolkit/bin"
