/* SPDX-License-Identifier: Apache-2.0
 *
 * What host_instructions.py asks of callgrind, which runs it. Does nothing without callgrind. */
#include <valgrind/callgrind.h>

void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char* name) { CALLGRIND_DUMP_STATS_AT(name); }
