// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

namespace normscope::testing {

// A process that does nothing, until it is killed.
class Idler {
 public:
  Idler() : id_(fork()) {
    if (id_ == 0) _exit(pause());
  }
  Idler(const Idler&) = delete;
  Idler& operator=(const Idler&) = delete;
  ~Idler() { end(); }

  [[nodiscard]] pid_t id() const { return id_; }
  void end() const {
    kill(id_, SIGKILL);
    waitpid(id_, nullptr, 0);
  }

 private:
  pid_t id_;
};

}  // namespace normscope::testing
