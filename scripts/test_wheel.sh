#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: test_wheel.sh <python> <build directory> <JUnit file>
#
# Builds the wheel, installs it into a fresh environment and runs the Python tests there, with the
# sources out of reach. What is installed beside <python>, torch above all, is lent to the fresh
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

# The tests of the demo, the benchmarks and the documents are left out: none is part of the wheel.
mkdir "$away/tests"
cp pyproject.toml "$away"
cp -r docs "$away" # test_semantics.py holds itself against it
mkdir "$away/benchmarks"
cp benchmarks/models.py "$away/benchmarks" # networks that test_fusion.py fuses
cp -r tests/python "$away/tests"
if [ -d tests/support ]; then
  cp -r tests/support "$away/tests"
fi
rm -f "$away"/tests/python/test_demo*.py "$away"/tests/python/test_recommended_scopes.py \
  "$away"/tests/python/test_docs.py

cd "$away"
unset PYTHONPATH
"$fresh" -c "
import normscope, sys
assert normscope.__file__.startswith(sys.prefix), normscope.__file__"
"$fresh" -m pytest -q -m "not slow" --junitxml="$results"
