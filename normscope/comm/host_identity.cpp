// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/host_identity.h"

#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include <unistd.h>

#include "normscope/core/hash.h"

namespace normscope {
namespace {

constexpr int kIdentityBits = 52;

std::string name_of_host() {
  const char* chosen = std::getenv("NORMSCOPE_NODE");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  std::string boot_id;
  if (std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot_id)) return boot_id;
  char name[256] = {};  // longer than POSIX allows a host's name to be
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

std::int64_t host_identity() {
  Hash hash;
  hash.add(name_of_host());
  return static_cast<std::int64_t>(hash.low_bits(kIdentityBits));
}

}  // namespace normscope
