// SPDX-License-Identifier: Apache-2.0
#include "tests/torch_device/device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <unistd.h>

namespace normscope::test_device {
namespace {

// ---- Memory ------------------------------------------------------------------------------------

// Host memory at the address that tensors have for it: its own if it is pinned, else that of pages
// that nothing may access.
struct Block {
  c10::DataPtr host;
  char* address = nullptr;
  std::size_t size = 0;
  bool is_pinned = false;
};

// All memory, by its addresses. torch also makes tensors of addresses alone.
struct Memory {
  std::mutex mutex;
  std::map<const void*, Block> blocks;
};

Memory& memory() {
  static auto& all = *new Memory;
  return all;
}

// The block at an address; nullptr if there is none.
const Block* block_at(const void* address) {
  auto& [mutex, blocks] = memory();
  const std::lock_guard lock(mutex);
  const auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return nullptr;
  const Block& block = std::prev(after)->second;
  return address < block.address + block.size ? &block : nullptr;
}

void release(void* address) {
  auto& [mutex, blocks] = memory();
  const std::lock_guard lock(mutex);
  const auto at = blocks.find(address);
  if (!at->second.is_pinned) munmap(address, at->second.size);
  blocks.erase(at);
}

// Where the host finds the memory of an address of the device.
void* host_address(const void* address) {
  if (address == nullptr) return nullptr;
  const Block* const block = block_at(address);
  TORCH_CHECK(block != nullptr, "device of tests: expected an address of its memory, got another");
  return static_cast<char*>(block->host.get()) +
         (static_cast<const char*>(address) - block->address);
}

thread_local c10::DeviceIndex current_device = 0;

struct BlockAllocator final : c10::Allocator {
  explicit BlockAllocator(bool pinned) : is_pinned(pinned) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    const auto device =
        is_pinned ? c10::Device(c10::DeviceType::CPU) : c10::Device(kType, current_device);
    if (bytes == 0) return {nullptr, device};
    Block block{c10::GetCPUAllocator()->allocate(bytes), nullptr, bytes, is_pinned};
    std::memset(block.host.get(), 0xff, bytes);  // NaN: what is read before it is written shows
    void* const address =
        is_pinned ? block.host.get() : mmap(nullptr, bytes, PROT_NONE, kNoMemory, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    block.address = static_cast<char*>(address);
    auto& [mutex, blocks] = memory();
    const std::lock_guard lock(mutex);
    blocks.emplace(address, std::move(block));
    return {address, address, release, device};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(host_address(to), host_address(from), bytes);
  }

  static constexpr int kNoMemory = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  bool is_pinned;
};

BlockAllocator device_allocator(false);
BlockAllocator pinned_allocator(true);
REGISTER_ALLOCATOR(kType, &device_allocator)

// ---- Streams and events ------------------------------------------------------------------------

thread_local std::array<c10::StreamId, kDevices> current_streams = {};
std::atomic<c10::StreamId> last_stream = 0;
std::atomic<std::int64_t> last_event = 0;

struct Event {
  c10::DeviceIndex device;
  std::int64_t number;  // events are recorded in this order
};

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "device of tests: expected an index below ",
              static_cast<int>(kDevices), ", got ", static_cast<int>(device));
  return std::exchange(current_device, device);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static std::size_t index_of(c10::Device device) {
    return static_cast<std::size_t>(device.has_index() ? device.index() : current_device);
  }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    const c10::Device with_index(kType, static_cast<c10::DeviceIndex>(index_of(device)));
    return c10::Stream(c10::Stream::UNSAFE, with_index, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*priority*/) const override {
    return stream(device, ++last_stream);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return stream(device, ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device(),
                  std::exchange(current_streams[index_of(next.device())], next.id()));
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {}

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream.device_index(), ++last_event};
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& /*stream*/) const override {
    TORCH_CHECK(event != nullptr, "device of tests: a stream waits for an event without a record");
  }
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override {}
  // The number of events between them.
  double elapsedTime(void* first, void* last, c10::DeviceIndex /*device*/) const override {
    return static_cast<double>(static_cast<Event*>(last)->number -
                               static_cast<Event*>(first)->number);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- Random numbers ----------------------------------------------------------------------------

// Those of the CPU's generator.
struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(c10::DeviceIndex device, at::Generator generator)
      : GeneratorImpl({kType, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(generator)) {}

  void set_current_seed(std::uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { host.set_offset(offset); }
  std::uint64_t get_offset() const override { return host.get_offset(); }
  std::uint64_t current_seed() const override { return host.current_seed(); }
  std::uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device_.index(), host.clone());
  }

  at::Generator host;
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

// ---- What torch asks a device type -------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  bool isPinnedPtr(const void* data) const override {
    const Block* const block = block_at(data);
    return block != nullptr && block->is_pinned;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize(storage, bytes);
  }
};

const bool kHooksAreRegistered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

c10::Allocator* allocator() { return &device_allocator; }

at::Tensor on_host(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr memory(
      host_address(storage.data()), new c10::Storage(storage),
      [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::DeviceType::CPU);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory),
                   c10::GetCPUAllocator(), /*resizable=*/true),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return view;
}

at::Generator on_host(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* const generators =
      new std::array<at::Generator, kDevices>{new_generator(0), new_generator(1)};
  return generators->at(static_cast<std::size_t>(device));
}

void resize(const c10::Storage& storage, std::size_t bytes) {
  const c10::DeviceIndex before = std::exchange(current_device, storage.device().index());
  c10::DataPtr memory = allocator()->allocate(bytes);
  current_device = before;
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) allocator()->copy_data(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

}  // namespace normscope::test_device
