#!/usr/bin/sed -f
# SPDX-License-Identifier: Apache-2.0
#
# Turns plain C++ comments into comments for Doxygen.
1,/^#pragma once/b

# Comments for linters.
/^ *\/\/ NOLINT/d
s/ *\/\/ NOLINT.*//

# Comments above a declaration; indented text in them is kept.
s/^\( *\)\/\/   *\( .*\)/\1\/\/\/    \2/
s/^\( *\)\/\/ /\1\/\/\/ /
s/^\( *\)\/\/$/\1\/\/\//

# Comments after a member.
s/\([;,({]\) *\/\/ /\1 \/\/\/< /
