#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# usage: ensure_cmake_package.sh <CMake package> <apt package>...
#
# Makes sure that CMake finds a C++ library. If it does not, the script installs the library with
# apt, or prints what to install if that would need a password.
set -eu

package=$1
shift

is_found() {
  probe=$(mktemp -d)
  cat > "$probe/CMakeLists.txt" << EOS
cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES CXX)
find_package($package REQUIRED)
EOS
  status=0
  cmake -G Ninja -S "$probe" -B "$probe/build" > /dev/null 2>&1 || status=1
  rm -rf "$probe"
  return $status
}

if is_found; then
  exit 0
fi

"$(dirname "$0")/install_with_apt.sh" "$@" || true

if ! is_found; then
  echo "CMake does not find $package. Install it, on Debian and Ubuntu with:" >&2
  echo "  sudo apt-get install $*" >&2
  exit 1
fi
