#!/usr/bin/sed -f
# SPDX-License-Identifier: Apache-2.0
#
# Plain comments of C++ into those that Doxygen reads.
1,/^#pragma once/b

# For linters.
/^ *\/\/ NOLINT/d
s/ *\/\/ NOLINT.*//

# Above a declaration; what is indented there stays as it is.
s/^\( *\)\/\/   *\( .*\)/\1\/\/\/    \2/
s/^\( *\)\/\/ /\1\/\/\/ /
s/^\( *\)\/\/$/\1\/\/\//

# Behind a member.
s/\([;,({]\) *\/\/ /\1 \/\/\/< /
