// SPDX-License-Identifier: Apache-2.0
//
// An allocator for tensors of the CPU that finds no memory when a thread asks it not to.
#include <cstddef>
#include <cstdint>
#include <limits>

#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

namespace {

thread_local std::int64_t requests = 0;
thread_local std::int64_t failing = -1;  // the number of the request that fails

class FailingAllocator final : public c10::Allocator {
 public:
  explicit FailingAllocator(c10::Allocator& allocator) : allocator_(allocator) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return allocator_.allocate(0);
    TORCH_CHECK_WITH(OutOfMemoryError, requests++ != failing, "the test found no memory");
    return allocator_.allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return allocator_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  c10::Allocator& allocator_;
};

// From now on, request `number` of this thread fails; -1: none. Returns the requests so far.
std::int64_t fail_request(std::int64_t number) {
  static FailingAllocator allocator(*c10::GetDefaultCPUAllocator());
  c10::SetCPUAllocator(&allocator, std::numeric_limits<std::uint8_t>::max());
  const std::int64_t before = requests;
  requests = 0;
  failing = number;
  return before;
}

}  // namespace

TORCH_LIBRARY(test_memory, m) { m.def("fail_request(int number) -> int", &fail_request); }
