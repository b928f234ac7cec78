# SPDX-License-Identifier: Apache-2.0
"""The C++ library: loads it, calls its ops, and gives it process groups.

All other packages depend on this one. An import of any of its modules loads the library first.
"""

from normscope._binding import load as load
