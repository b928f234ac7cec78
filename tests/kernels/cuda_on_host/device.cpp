// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda_on_host/device.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ucontext.h>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace normscope::cuda_on_host {
namespace {

constexpr int kWarpThreads = 32;
constexpr std::size_t kStackBytes = std::size_t{64} << 10U;
constexpr std::size_t kBlocksAtOnce = 8;

// ThreadSanitizer's view of fibers, or nothing.
#if defined(__SANITIZE_THREAD__)
class Watched {
 public:
  Watched() : fiber_(__tsan_create_fiber(0)) {}
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  ~Watched() { __tsan_destroy_fiber(fiber_); }

  void enter() const { __tsan_switch_to_fiber(fiber_, __tsan_switch_to_fiber_no_sync); }
  static void* scheduler() { return __tsan_get_current_fiber(); }
  static void leave(void* scheduler) {
    __tsan_switch_to_fiber(scheduler, __tsan_switch_to_fiber_no_sync);
  }
  static void arrive(void* meeting) { __tsan_release(meeting); }
  static void depart(void* meeting) { __tsan_acquire(meeting); }

 private:
  void* fiber_;
};
#else
class Watched {
 public:
  void enter() const {}
  static void* scheduler() { return nullptr; }
  static void leave(void*) {}
  static void arrive(void*) {}
  static void depart(void*) {}
};
#endif

enum class State { kReady, kAtBarrier, kInWarp, kEnded };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
  Watched watched;
  State state = State::kReady;
  int exchanges = 0;  // made in its warp
};

struct Warp {
  // Two sets of slots: a thread may be one exchange ahead of another that has yet to read.
  std::uint64_t slots[2][kWarpThreads] = {};
  char meeting = 0;
};

// One block, on the thread of the operating system that runs it.
class Block {
 public:
  Block(Index of_grid, Index of_block, Index place, unsigned seed,
        const std::function<void()>& body)
      : grid(of_grid),
        size(of_block),
        index(place),
        body_(body),
        random_(seed),
        fibers_(std::size_t{of_block.x} * of_block.y),
        warps_((fibers_.size() + kWarpThreads - 1) / kWarpThreads) {}

  void run() {
    here = this;
    scheduler_ = Watched::scheduler();
    for (Fiber& fiber : fibers_) start(fiber);
    while (advance()) {
    }
    for (const Fiber& fiber : fibers_) {
      if (fiber.state != State::kEnded) {
        throw std::logic_error("threads of a block wait for threads that wait elsewhere or ended");
      }
    }
  }

  void wait(State state, char* meeting) {
    Fiber& fiber = fibers_[current];
    fiber.state = state;
    Watched::arrive(meeting);
    leave(fiber);
    Watched::depart(meeting);
  }

  [[nodiscard]] Warp& warp() { return warps_[current / kWarpThreads]; }
  [[nodiscard]] Fiber& fiber() { return fibers_[current]; }

  static thread_local Block* here;

  const Index grid;
  const Index size;
  const Index index;
  std::size_t current = 0;
  char barrier = 0;

 private:
  static void enter() {
    Block& block = *here;
    block.body_();
    block.fiber().state = State::kEnded;
    block.leave(block.fiber());
  }

  void start(Fiber& fiber) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Block::enter, 0);
  }

  void leave(Fiber& fiber) {
    Watched::leave(scheduler_);
    swapcontext(&fiber.context, &main_);
  }

  // Runs every fiber that may go on, and releases those that have all met. Whether any went on.
  bool advance() {
    std::vector<std::size_t> order(fibers_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random_);
    bool any = false;
    for (const std::size_t i : order) {
      if (fibers_[i].state != State::kReady) continue;
      any = true;
      current = i;
      fibers_[i].watched.enter();
      swapcontext(&main_, &fibers_[i].context);
    }
    for (std::size_t w = 0; w < warps_.size(); ++w) {
      const std::size_t begin = w * kWarpThreads;
      release(State::kInWarp, begin, std::min(begin + kWarpThreads, fibers_.size()));
    }
    release(State::kAtBarrier, 0, fibers_.size());
    return any;
  }

  // Lets the fibers go on if all of them wait there.
  void release(State state, std::size_t begin, std::size_t end) {
    const auto first = fibers_.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = fibers_.begin() + static_cast<std::ptrdiff_t>(end);
    if (!std::all_of(first, last, [&](const Fiber& f) { return f.state == state; })) return;
    for (auto fiber = first; fiber != last; ++fiber) fiber->state = State::kReady;
  }

  const std::function<void()>& body_;
  std::minstd_rand random_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  ucontext_t main_ = {};
  void* scheduler_ = nullptr;
};

thread_local Block* Block::here = nullptr;

}  // namespace

Index ThisThread::thread() {
  const auto i = static_cast<unsigned>(Block::here->current);
  return {i % Block::here->size.x, i / Block::here->size.x};
}
Index ThisThread::block() { return Block::here->index; }
Index ThisThread::block_size() { return Block::here->size; }
Index ThisThread::grid_size() { return Block::here->grid; }
int ThisThread::lane() { return static_cast<int>(Block::here->current % kWarpThreads); }

void ThisThread::wait_for_block() { Block::here->wait(State::kAtBarrier, &Block::here->barrier); }

std::uint64_t ThisThread::exchange_in_warp(std::uint64_t own, int source) {
  Block& block = *Block::here;
  Warp& warp = block.warp();
  std::uint64_t* slots = warp.slots[block.fiber().exchanges++ % 2];
  slots[lane()] = own;
  block.wait(State::kInWarp, &warp.meeting);
  return slots[source];
}

void run_grid(Index grid, Index block, const std::function<void()>& body) {
  static std::atomic<unsigned> launches = 0;
  const unsigned launch = launches++;
  const std::size_t blocks = std::size_t{grid.x} * grid.y;
  std::vector<std::exception_ptr> errors(blocks);
  for (std::size_t begin = 0; begin < blocks; begin += kBlocksAtOnce) {
    std::vector<std::jthread> threads;
    for (std::size_t i = begin; i < std::min(begin + kBlocksAtOnce, blocks); ++i) {
      threads.emplace_back([&, i] {
        try {
          const Index index{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x)};
          Block(grid, block, index, launch * 7919U + static_cast<unsigned>(i), body).run();
        } catch (...) {
          errors[i] = std::current_exception();
        }
      });
    }
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace normscope::cuda_on_host
