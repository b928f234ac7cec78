#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: test_wheel.sh <python> <build directory> <JUnit file>
#
# Builds the wheel, installs it into a fresh environment and runs Python tests there, without access
# to the sources. The whole suite is run elsewhere with the same library. This script checks that no
# file is missing: it runs the examples of all modules, the command, tests that use all parts on
# ranks, and tests of the CUDA kernels in the wheel. The fresh environment can import the packages of
# <python>, such as torch, so nothing is downloaded again.
set -eu

python=$1
build=$2
results=$(realpath -m "$3")
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT

scripts/build_wheel.sh "$python" "$build" "$away/dist"
ls "$away"/dist/normscope-*+torch*-py3-none-*.whl

"$python" -m venv "$away/venv"
fresh=$away/venv/bin/python
site=$("$fresh" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
# The entries of a path file come after the packages of the fresh environment itself.
"$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$site/lent.pth"
"$fresh" -m pip install --quiet --no-index --no-deps --force-reinstall "$away"/dist/*.whl

mkdir "$away/tests"
cp pyproject.toml "$away"
cp -r cmake "$away" # test_compiled.py reads it
cp -r tests/conftest.py tests/python tests/support tests/wheel "$away/tests"

cd "$away"
unset PYTHONPATH
"$fresh" -c "
import normscope, sys
assert normscope.__file__.startswith(sys.prefix), normscope.__file__
# pip's view of the wheel is true of the torch that it is tried with.
from importlib.metadata import requires, version
from packaging.requirements import Requirement
assert version('normscope').startswith(f'{normscope.__version__}+torch'), version('normscope')
[needed] = [one for one in map(Requirement, requires('normscope')) if one.name == 'torch']
assert str(needed.specifier).startswith('=='), needed
assert version('torch') in needed.specifier, (version('torch'), needed)"
NORMSCOPE_TEST_WHEEL=$(ls "$away"/dist/*.whl)
export NORMSCOPE_TEST_WHEEL
"$fresh" -m pytest -q -m "not slow" --doctest-modules --junitxml="$results" \
  --ignore-glob "*/scopes/transformers.py" --pyargs normscope \
  tests/python/test_command.py tests/python/test_compiled.py tests/python/test_conversion.py \
  tests/python/test_graphs.py tests/python/test_scopes.py tests/python/test_own_groups.py \
  tests/wheel
