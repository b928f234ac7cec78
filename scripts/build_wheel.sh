#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: build_wheel.sh <python> <build directory> <directory>
#
# Builds the wheel in the build directory and puts it into the other one, named for <python>'s torch.
set -eu

python=$1
build=$2
directory=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m pip wheel --quiet --no-index --no-deps --no-build-isolation \
  --config-settings=build-dir="$build" --wheel-dir "$scratch" .
named=$("$python" scripts/name_wheel.py "$scratch"/normscope-*-py3-none-*.whl)
mkdir -p "$directory"
mv "$named" "$directory"
echo "$directory/$(basename "$named")"
