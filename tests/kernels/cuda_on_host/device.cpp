// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda_on_host/device.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <ucontext.h>

#include "tests/kernels/cuda_on_host/backend.h"

// ThreadSanitizer's own interface, if it is linked in.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

namespace normscope::cuda_on_host {
namespace {

constexpr std::size_t kStackBytes = std::size_t{64} << 10U;
constexpr std::size_t kBlocksAtOnce = 4;
constexpr std::size_t kMostThreads = 8;  // of a cluster

// A fiber as ThreadSanitizer sees it, if that is linked in. Switching fibers orders nothing; only
// declared meetings do.
class Watched {
 public:
  Watched() : fiber_(is_linked() ? __tsan_create_fiber(0) : nullptr) {}
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  ~Watched() {
    if (is_linked()) __tsan_destroy_fiber(fiber_);
  }

  void enter() const { switch_to(fiber_); }
  static void* scheduler() { return is_linked() ? __tsan_get_current_fiber() : nullptr; }
  static void leave(void* scheduler) { switch_to(scheduler); }
  static void arrive(char* meeting) {
    if (is_linked()) __tsan_release(meeting);
  }
  static void depart(char* meeting) {
    if (is_linked()) __tsan_acquire(meeting);
  }

 private:
  static bool is_linked() { return __tsan_create_fiber != nullptr; }
  static void switch_to(void* fiber) {
    constexpr unsigned kOrderNothing = 1;
    if (is_linked()) __tsan_switch_to_fiber(fiber, kOrderNothing);
  }

  void* fiber_;
};

// Where a context resumes. The compiler's own jumps take nanoseconds; swapcontext asks the
// operating system for the signal mask each time.
struct Place {
  void* registers[5];
};

enum Access { kLoad, kStore };

// Whether accesses are counted, and the instructions of all warps since then.
std::atomic<bool> are_counted = false;
std::atomic<std::int64_t> counted[2];

enum class State { kReady, kAtBarrier, kInWarp, kInCluster, kBehindEarlierKernel, kEnded };

// Where the blocks of a cluster meet. The threads of the operating system that run them wait here
// too, which orders nothing for ThreadSanitizer.
struct Cluster {
  explicit Cluster(unsigned blocks) : all(blocks) {}

  std::barrier<> all;
  char meeting = 0;
};

// The contents of the spans of an EarlierMemory.
class Contents {
 public:
  explicit Contents(const std::vector<std::span<std::byte>>& spans) : spans_(spans) { save(); }

  void save() {
    bytes_.clear();
    for (const auto& span : spans_) bytes_.insert(bytes_.end(), span.begin(), span.end());
  }
  void restore() const {
    auto from = bytes_.begin();
    for (const auto& span : spans_) {
      std::copy_n(from, span.size(), span.begin());
      from += static_cast<std::ptrdiff_t>(span.size());
    }
  }
  [[nodiscard]] bool are_those_of(const Contents& other) const { return bytes_ == other.bytes_; }

 private:
  std::vector<std::span<std::byte>> spans_;
  std::vector<std::byte> bytes_;
};

// The spans of the calling thread's EarlierMemory, and what they contained when the last kernel
// that does not start early began.
thread_local std::optional<Contents> earlier;

struct Fiber {
  Place place;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
  Watched watched;
  State state = State::kEnded;
  bool is_started = false;
  int exchanges = 0;  // made in its warp
  bool has_waited_for_earlier_kernel = false;
  std::map<std::pair<Access, const void*>, std::int64_t> accesses;  // by their place in the code
};

struct Warp {
  // Two sets of slots: a thread may be one exchange ahead of another that has not read yet.
  std::uint64_t slots[2][kWarpThreads] = {};
  char meeting = 0;
};

// Runs one block after the other, each on the calling thread of the operating system. Fibers
// outlive their block, because making one takes long.
class BlockRunner {  // NOLINT(bugprone-random-generator-seed): run() seeds it
 public:
  // seen_early: what an early kernel sees until it has waited; nullptr: what there is.
  void run(Index of_grid, Index of_block, Index place, Cluster& of_cluster, Start start,
           const Contents* seen_early, unsigned seed, const std::function<void()>& body) {
    here = this;
    cluster = &of_cluster;
    grid = of_grid;
    size = of_block;
    index = place;
    body_ = &body;
    random_.seed(seed);
    threads_ = std::size_t{of_block.x} * of_block.y;
    while (fibers_.size() < threads_) fibers_.push_back(std::make_unique<Fiber>());
    warps_.resize((threads_ + kWarpThreads - 1) / kWarpThreads);
    order_.resize(threads_);
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    for (std::size_t i = 0; i < threads_; ++i) {
      fibers_[i]->state = State::kReady;
      fibers_[i]->exchanges = 0;
      fibers_[i]->has_waited_for_earlier_kernel = false;
      fibers_[i]->accesses.clear();
    }
    lets_next_kernel_start = false;
    is_aligned_ = true;
    scheduler_ = Watched::scheduler();
    std::optional<Contents> now;
    if (start == Start::kEarly && seen_early != nullptr) {
      now = *seen_early;
      now->save();
      seen_early->restore();
    }
    Watched::arrive(&begin_);
    if (start == Start::kEarly) run_until_all_wait(seen_early, now);
    do {
      while (advance()) {
      }
    } while (meet_in_cluster());
    Watched::depart(&end_);
    if (!all_are(State::kEnded, 0, threads_)) {
      throw std::logic_error("threads of a block wait for threads that wait elsewhere or ended");
    }
    if (!is_aligned_) throw std::logic_error("an access is not aligned");
    if (are_counted) count_instructions();
  }

  void wait(State state, char* meeting) {
    Fiber& fiber = *fibers_[current];
    fiber.state = state;
    Watched::arrive(meeting);
    leave(fiber);
    Watched::depart(meeting);
  }

  void access(Access kind, const void* place, const void* address, std::size_t bytes) {
    if (are_counted) ++fiber().accesses[{kind, place}];
    is_aligned_ = is_aligned_ && reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  }

  [[nodiscard]] Warp& warp() { return warps_[current / kWarpThreads]; }
  [[nodiscard]] Fiber& fiber() { return *fibers_[current]; }

  static thread_local BlockRunner* here;

  Index grid = {};
  Index size = {};
  Index index = {};
  std::size_t current = 0;
  Cluster* cluster = nullptr;
  char barrier = 0;
  char earlier_kernel = 0;
  bool lets_next_kernel_start = false;

 private:
  // Runs an early kernel until all threads wait for the one before it, and lets them see what there
  // is from then on.
  void run_until_all_wait(const Contents* seen_early, const std::optional<Contents>& now) {
    while (advance()) {
    }
    Watched::depart(&earlier_kernel);
    for (std::size_t i = 0; i < threads_; ++i) {
      if (fibers_[i]->has_waited_for_earlier_kernel) continue;
      throw std::logic_error("a kernel that starts early does not wait for the one before it");
    }
    if (now) {
      Contents left = *seen_early;
      left.save();
      now->restore();
      if (!left.are_those_of(*seen_early)) {
        throw std::logic_error("a kernel writes before it has waited for the one before it");
      }
    }
    Watched::arrive(&earlier_kernel);
    release(State::kBehindEarlierKernel, 0, threads_);
  }

  // The body of a fiber: its part of one block after the other. It must not read `here` after a
  // wait, because the next block may run on another thread of the operating system.
  static void live() {
    BlockRunner& runner = *here;
    Fiber& fiber = runner.fiber();
    while (true) {
      Watched::depart(&runner.begin_);
      (*runner.body_)();
      fiber.state = State::kEnded;
      Watched::arrive(&runner.end_);
      runner.leave(fiber);
    }
  }

  // Hidden from the callers' optimizer (noipa): they must expect every register to change.
  [[gnu::noipa]] void leave(Fiber& fiber) {
    Watched::leave(scheduler_);
    if (__builtin_setjmp(fiber.place.registers) == 0) go_to(main_);
  }
  [[gnu::noipa]] void enter(Fiber& fiber) {
    fiber.watched.enter();
    if (__builtin_setjmp(main_.registers) != 0) return;
    if (fiber.is_started) go_to(fiber.place);
    fiber.is_started = true;
    start(fiber);
  }
  [[gnu::noipa, noreturn]] static void go_to(Place& place) {
    __builtin_longjmp(place.registers, 1);
  }
  [[gnu::noipa, noreturn]] static void start(Fiber& fiber) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &BlockRunner::live, 0);
    setcontext(&context);
    std::terminate();
  }

  // Runs every fiber that can go on, and releases those that have all met. Returns whether any ran.
  bool advance() {
    std::shuffle(order_.begin(), order_.end(), random_);
    bool any = false;
    for (const std::size_t i : order_) {
      if (fibers_[i]->state != State::kReady) continue;
      any = true;
      current = i;
      enter(*fibers_[i]);
    }
    for (std::size_t begin = 0; begin < threads_; begin += kWarpThreads) {
      release(State::kInWarp, begin, std::min(begin + kWarpThreads, threads_));
    }
    release(State::kAtBarrier, 0, threads_);
    return any;
  }

  // Lets the fibers go on that wait for their cluster, when those of all blocks do. Returns whether
  // there were any.
  bool meet_in_cluster() {
    if (!all_are(State::kInCluster, 0, threads_)) return false;
    cluster->all.arrive_and_wait();
    release(State::kInCluster, 0, threads_);
    return true;
  }

  [[nodiscard]] bool all_are(State state, std::size_t begin, std::size_t end) const {
    for (std::size_t i = begin; i < end; ++i) {
      if (fibers_[i]->state != state) return false;
    }
    return true;
  }

  // Lets the fibers go on if all of them wait in `state`.
  void release(State state, std::size_t begin, std::size_t end) {
    if (!all_are(state, begin, end)) return;
    for (std::size_t i = begin; i < end; ++i) fibers_[i]->state = State::kReady;
  }

  // A warp executes an instruction as often as the thread that needs it most often.
  void count_instructions() const {
    for (std::size_t begin = 0; begin < threads_; begin += kWarpThreads) {
      std::map<std::pair<Access, const void*>, std::int64_t> of_warp;
      for (std::size_t i = begin; i < std::min(begin + kWarpThreads, threads_); ++i) {
        for (const auto& [instruction, times] : fibers_[i]->accesses) {
          of_warp[instruction] = std::max(of_warp[instruction], times);
        }
      }
      for (const auto& [instruction, times] : of_warp) counted[instruction.first] += times;
    }
  }

  const std::function<void()>* body_ = nullptr;
  std::minstd_rand random_;
  std::size_t threads_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  std::vector<std::size_t> order_;
  Place main_ = {};
  void* scheduler_ = nullptr;
  char begin_ = 0;
  char end_ = 0;
  bool is_aligned_ = true;  // all accesses of the block
};

thread_local BlockRunner* BlockRunner::here = nullptr;

}  // namespace

Index ThisThread::thread() {
  const auto i = static_cast<unsigned>(BlockRunner::here->current);
  return {i % BlockRunner::here->size.x, i / BlockRunner::here->size.x, 0};
}
Index ThisThread::block() { return BlockRunner::here->index; }
Index ThisThread::block_size() { return BlockRunner::here->size; }
Index ThisThread::grid_size() { return BlockRunner::here->grid; }
int ThisThread::lane() { return static_cast<int>(BlockRunner::here->current % kWarpThreads); }

void ThisThread::wait_for_block() {
  BlockRunner::here->wait(State::kAtBarrier, &BlockRunner::here->barrier);
}

void ThisThread::meet_in_cluster() {
  BlockRunner::here->wait(State::kInCluster, &BlockRunner::here->cluster->meeting);
}

const std::uint64_t* ThisThread::exchange_in_warp(std::uint64_t own) {
  BlockRunner& runner = *BlockRunner::here;
  Warp& warp = runner.warp();
  std::uint64_t* slots = warp.slots[runner.fiber().exchanges++ % 2];
  slots[lane()] = own;
  runner.wait(State::kInWarp, &warp.meeting);
  return slots;
}

unsigned ThisThread::take_ticket(unsigned* ticket, unsigned last) {
  Watched::arrive(reinterpret_cast<char*>(ticket));
  const std::atomic_ref<unsigned> number(*ticket);
  unsigned taken = number.load(std::memory_order_relaxed);
  while (!number.compare_exchange_weak(taken, taken >= last ? 0 : taken + 1,
                                       std::memory_order_acq_rel, std::memory_order_relaxed)) {
  }
  Watched::depart(reinterpret_cast<char*>(ticket));
  return taken;
}

void ThisThread::announce(std::uint64_t* word, std::uint64_t value) {
  Watched::arrive(reinterpret_cast<char*>(word));
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

std::uint64_t ThisThread::look_at(std::uint64_t* word) {
  // Whoever announces it may need this core. Between busy processes, a thread that yields waits for
  // all their turns; one that sleeps is the next to run.
  std::this_thread::sleep_for(std::chrono::microseconds(1));
  const std::uint64_t value = std::atomic_ref(*word).load(std::memory_order_acquire);
  Watched::depart(reinterpret_cast<char*>(word));
  return value;
}

std::int64_t ThisThread::nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void ThisThread::wait_for_earlier_kernel() {
  BlockRunner& runner = *BlockRunner::here;
  if (std::exchange(runner.fiber().has_waited_for_earlier_kernel, true)) return;
  runner.wait(State::kBehindEarlierKernel, &runner.earlier_kernel);
}

void ThisThread::let_next_kernel_start() { BlockRunner::here->lets_next_kernel_start = true; }

void ThisThread::load(const void* address, std::size_t bytes) {
  BlockRunner::here->access(kLoad, __builtin_return_address(0), address, bytes);
}
void ThisThread::store(const void* address, std::size_t bytes) {
  BlockRunner::here->access(kStore, __builtin_return_address(0), address, bytes);
}

EarlierMemory::EarlierMemory(const std::vector<std::span<std::byte>>& spans) {
  earlier.emplace(spans);
}
EarlierMemory::~EarlierMemory() { earlier.reset(); }

MemoryInstructions memory_instructions(const std::function<void()>& work) {
  for (std::atomic<std::int64_t>& count : counted) count = 0;
  are_counted = true;
  work();
  are_counted = false;
  return {counted[kLoad], counted[kStore]};
}

bool run_grid(Index grid, Index block, unsigned cluster, Start start,
              const std::function<void()>& body) {
  static std::atomic<unsigned> launches = 0;
  static thread_local std::unique_ptr<BlockRunner> runners[kMostThreads];
  const unsigned launch = launches++;
  const std::size_t blocks = std::size_t{grid.x} * grid.y * grid.z;
  std::exception_ptr errors[kMostThreads];
  std::atomic<std::size_t> letting = 0;
  const Contents* const seen_early = earlier ? &*earlier : nullptr;
  if (earlier && start == Start::kAfterOthers) earlier->save();
  // One block after the other if all of them change what memory there is.
  const std::size_t at_once = start == Start::kEarly && earlier ? 1 : kBlocksAtOnce;
  {
    // Blocks begin in their order, as kernels that wait for other ranks need it. The first ones run
    // in threads of their own: nothing orders what two of them do. Clusters run one after the
    // other, each block in the thread of its number.
    const std::size_t workers = cluster > 1 ? cluster : std::min(at_once, blocks);
    std::atomic<std::size_t> next = workers;
    Cluster meetings(cluster);
    std::vector<std::jthread> threads;
    for (std::size_t w = 0; w < workers; ++w) {
      if (runners[w] == nullptr) runners[w] = std::make_unique<BlockRunner>();
      threads.emplace_back([&, runner = runners[w].get(), w] {
        const auto run = [&](Index index) {
          const std::size_t i = (std::size_t{index.z} * grid.y + index.y) * grid.x + index.x;
          runner->run(grid, block, index, meetings, start, seen_early,
                      launch * 7919U + static_cast<unsigned>(i), body);
          if (runner->lets_next_kernel_start) ++letting;
        };
        try {
          if (cluster > 1) {
            for (unsigned x = 0; x < grid.x; ++x) run({x, static_cast<unsigned>(w), 0});
            return;
          }
          for (std::size_t i = w; i < blocks; i = next.fetch_add(1, std::memory_order_relaxed)) {
            run({static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                 static_cast<unsigned>(i / grid.x / grid.y)});
          }
        } catch (...) {
          errors[w] = std::current_exception();
          if (cluster > 1) meetings.all.arrive_and_drop();
        }
      });
    }
  }
  for (const std::exception_ptr& error : errors) {
    if (error == nullptr) continue;
    for (std::unique_ptr<BlockRunner>& runner : runners) runner.reset();  // fibers wait in there
    std::rethrow_exception(error);
  }
  return letting == blocks;
}

}  // namespace normscope::cuda_on_host
