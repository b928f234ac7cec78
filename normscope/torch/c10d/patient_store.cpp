// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/patient_store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace normscope::binding {

// The pause before a server that was late is asked again.
constexpr std::chrono::minutes kSilence{1};

PatientStore PatientStore::under(const std::string& prefix) const {
  return {prefix_.empty() ? prefix : prefix_ + "/" + prefix, server_};
}

PatientStore::Store PatientStore::Server::keys_under(const std::string& prefix) {
  try {
    if (!own) own = programs->clone();
  } catch (const std::exception&) {  // a store of the program's, or no connection
    own = programs;
  }
  if (prefix.empty()) return own;
  return c10::make_intrusive<c10d::PrefixStore>(prefix, own);
}

bool PatientStore::is_silent() const noexcept {
  return Clock::now().time_since_epoch().count() < server_->ask_again.load();
}

void PatientStore::note_silence() const noexcept {
  server_->ask_again.store((Clock::now() + kSilence).time_since_epoch().count());
}

}  // namespace normscope::binding
