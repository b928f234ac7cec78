#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Fails if one of the object files defines a weak function. The linker may use the copy of one
# object for all of them, and a copy compiled for a newer instruction set would then run on machines
# without it.
set -eu
[ $# -gt 0 ] || { echo "usage: weak_functions.sh OBJECT..." >&2; exit 2; }
if nm --defined-only --demangle "$@" | grep ' W '; then
  echo "weak functions, see above: make them NORMSCOPE_INLINE, or give them internal linkage" >&2
  exit 1
fi
