// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/groups/watched_calls.h"

#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/Logging.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/describe.h"
#include "normscope/core/environment.h"
#include "normscope/core/text.h"
#include "normscope/torch/tensors/op.h"

namespace normscope::binding {
namespace {

using std::chrono::milliseconds;

// The open profiler events of a thread.
struct Events {
  std::optional<at::RecordFunction> exchange;
  std::optional<at::RecordFunction> wait;
  bool has_warned = false;  // in this wait
};
thread_local Events events;

// `name` is called only if something is recording.
template <class Name>
void begin(std::optional<at::RecordFunction>& event, const Name& name) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  event.emplace(std::move(*callbacks));
  event->before(name());
}

// Python defines the op.
bool has_python() {
  static const bool kHas =
      c10::Dispatcher::singleton().findSchema({"normscope::check_signals", ""}).has_value();
  return kHas;
}

// Python runs signal handlers only in its main thread. Their exceptions pass through here as
// torch's, and reach Python again.
void check_signals() {
  if (syscall(SYS_gettid) != getpid() || !has_python()) return;
  op_named<void()>("normscope::check_signals").call();
}

class CallWatch final : public CallObserver {
 public:
  void warn_after(std::optional<milliseconds> limit) noexcept {
    warn_after_ = limit ? Duration(*limit) : Duration::max();
  }

  void begin_call(const CallName& name, std::string_view scope, std::size_t bytes) override {
    begin(events.exchange, [&] {
      std::string text = "normscope::exchange ";
      text += printable(name.what) + " of " + printable(name.layer) + ", scope ";
      return text + std::string(scope) + ", " + std::to_string(bytes) + " bytes";
    });
  }
  void end_call() noexcept override { events.exchange.reset(); }

  void begin_wait() override {
    events.has_warned = false;
    begin(events.wait, [] { return std::string("normscope::wait"); });
  }
  void end_wait() noexcept override { events.wait.reset(); }

  void during_wait(std::chrono::steady_clock::duration waited,
                   const std::function<std::string()>& who_is_where) override {
    check_signals();
    if (events.has_warned || waited < warn_after_.load()) return;
    events.has_warned = true;
    LOG(WARNING) << "normscope has waited " << in_seconds(waited) << ": " << who_is_where();
  }

 private:
  using Duration = std::chrono::steady_clock::duration;

  std::atomic<Duration> warn_after_ = Duration::max();
};

}  // namespace

void watch_calls() {
  static CallWatch watch;
  watch.warn_after(warning_limit());
  if (call_observer() == nullptr) observe_calls(&watch);
}

}  // namespace normscope::binding
