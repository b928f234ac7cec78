#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: test_wheel.sh <python> <build directory> <JUnit file>
#
# Builds the wheel, installs it into a fresh environment and runs Python tests there, with the
# sources out of reach. The whole suite has passed over the same library: here it matters that
# nothing is missing, so the examples of every module run, the command, and tests that go through all
# parts on ranks. What is installed beside <python>, torch above all, is lent to the fresh
# environment, so that nothing is fetched twice.
set -eu

python=$1
build=$2
results=$(realpath -m "$3")
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT

"$python" -m pip wheel --quiet --no-index --no-deps --no-build-isolation \
  --config-settings=build-dir="$build" --wheel-dir "$away/dist" .
ls "$away"/dist/normscope-*-py3-none-*.whl

"$python" -m venv "$away/venv"
fresh=$away/venv/bin/python
site=$("$fresh" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
# A path file's entries come after the fresh environment's own packages.
"$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$site/lent.pth"
"$fresh" -m pip install --quiet --no-index --no-deps --force-reinstall "$away"/dist/*.whl

mkdir "$away/tests"
cp pyproject.toml "$away"
cp -r cmake docs "$away" # test_compiled.py and test_semantics.py read them
cp -r tests/conftest.py tests/python tests/support "$away/tests"

cd "$away"
unset PYTHONPATH
"$fresh" -c "
import normscope, sys
assert normscope.__file__.startswith(sys.prefix), normscope.__file__"
"$fresh" -m pytest -q -m "not slow" --doctest-modules --junitxml="$results" --pyargs normscope \
  tests/python/test_command.py tests/python/test_compiled.py tests/python/test_conversion.py \
  tests/python/test_graphs.py tests/python/test_own_groups.py tests/python/test_semantics.py
