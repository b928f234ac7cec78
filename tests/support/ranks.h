// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace normscope::testing {

using RankBody = std::function<void(int rank)>;

// Runs body(0) ... body(ranks - 1), each in its own thread. Rethrows what was thrown first in time:
// what others throw is often only a consequence.
inline void spawn_threads(int ranks, const RankBody& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

struct RankFailure {
  int rank = 0;
  std::string reason;  // "killed by signal 9", "failed assertions", or the text of an exception
};

// One message from a rank's process. At most PIPE_BUF long, which keeps messages from mixing.
struct RankReport {
  int rank;
  char reason[1000];
};

// The entire life of a rank's process.
[[noreturn]] inline void live_as_rank(int rank, const RankBody& body, int report_to) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::string reason;
  try {
    body(rank);
    if (::testing::Test::HasFailure()) reason = "failed assertions";
  } catch (const std::exception& error) {
    reason = error.what();
  }
  std::fflush(nullptr);
  if (!reason.empty()) {
    RankReport report{.rank = rank, .reason = {}};
    reason.copy(report.reason, sizeof(report.reason) - 1);
    if (write(report_to, &report, sizeof(report)) != sizeof(report)) std::abort();
  }
  _exit(0);
}

// Runs body(0) ... body(ranks - 1), each in a forked process of its own. Returns the ranks that
// failed, in order of time; those killed by a signal come last.
inline std::vector<RankFailure> failures_of_processes(int ranks, const RankBody& body) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) throw std::runtime_error("cannot make a pipe");
  std::fflush(nullptr);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t process = fork();
    if (process == 0) {
      close(pipe_ends[0]);
      live_as_rank(rank, body, pipe_ends[1]);
    }
    processes.push_back(process);
  }
  close(pipe_ends[1]);

  std::vector<RankFailure> failures;
  RankReport report;
  while (read(pipe_ends[0], &report, sizeof(report)) == sizeof(report)) {
    failures.push_back({report.rank, report.reason});
  }
  close(pipe_ends[0]);
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    const pid_t process = processes[static_cast<std::size_t>(rank)];
    if (process < 0 || waitpid(process, &status, 0) != process) {
      failures.push_back({rank, "could not be started"});
    } else if (WIFSIGNALED(status)) {
      failures.push_back({rank, "killed by signal " + std::to_string(WTERMSIG(status))});
    } else if (WEXITSTATUS(status) != 0) {
      failures.push_back({rank, "exit status " + std::to_string(WEXITSTATUS(status))});
    }
  }
  return failures;
}

// The same, but throws the first failure as std::runtime_error.
inline void spawn_processes(int ranks, const RankBody& body) {
  const std::vector<RankFailure> failures = failures_of_processes(ranks, body);
  if (failures.empty()) return;
  throw std::runtime_error("rank " + std::to_string(failures[0].rank) + ": " + failures[0].reason);
}

// Holds ranks back without a call to the group under test.
class Gate {
 public:
  Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  virtual ~Gate() = default;

  // Lets `ranks` calls of wait() pass.
  virtual void open_for(int ranks) = 0;
  virtual void wait() = 0;
};

// For threads, and for processes that were forked after it was made.
class PipeGate final : public Gate {
 public:
  PipeGate() {
    if (pipe(ends_) != 0) throw std::runtime_error("cannot make a pipe");
  }
  PipeGate(const PipeGate&) = delete;
  PipeGate& operator=(const PipeGate&) = delete;
  ~PipeGate() override {
    close(ends_[0]);
    close(ends_[1]);
  }

  void open_for(int ranks) override {
    const std::string tokens(static_cast<std::size_t>(ranks), '.');
    if (write(ends_[1], tokens.data(), tokens.size()) != ranks) {
      throw std::runtime_error("cannot open the gate");
    }
  }

  void wait() override {
    char token;
    if (read(ends_[0], &token, 1) != 1) throw std::runtime_error("cannot wait at the gate");
  }

 private:
  int ends_[2];
};

}  // namespace normscope::testing
