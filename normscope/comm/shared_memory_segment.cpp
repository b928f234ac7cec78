// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/shared_memory_segment.h"

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "normscope/comm/slot_memory.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/error.h"

namespace normscope {
namespace {

// The first cache line of a segment; the group's memory follows.
struct alignas(kCacheLine) Label {
  std::uint64_t magic;
  std::int64_t version;
  std::int64_t nonce;
};

constexpr std::uint64_t kMagic = 0x65706f63736d726e;  // "nrmscope"

// Increase it with every change to the layout of the label or of the group's memory.
constexpr std::int64_t kVersion = 3;

// Nobody can shrink the memory while another process reads it.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throw_error(const std::string& what, int error) {
  throw CommunicationError("shared memory: cannot " + what + ": " +
                           std::generic_category().message(error));
}

[[noreturn]] void throw_another(const std::string& path, const std::string& reason) {
  throw CommunicationError("shared memory: " + path + " is not the memory of a group: " + reason);
}

// Owns `descriptor`.
std::shared_ptr<const int> own_descriptor(int descriptor) {
  return {new int(descriptor), [](const int* owned) {
            close(*owned);
            delete owned;
          }};
}

// The descriptor stays open as long as the mapping.
std::shared_ptr<void> map(const std::shared_ptr<const int>& descriptor, std::size_t bytes,
                          int protection) {
  void* address = mmap(nullptr, bytes, protection, MAP_SHARED, *descriptor, 0);
  if (address == MAP_FAILED) throw_error("map a segment", errno);
  return {address, [bytes, descriptor](void* mapped) { munmap(mapped, bytes); }};
}

// Never 0: an address of zeros means that there is no segment. Below 2^53: exact as a float64.
std::int64_t new_nonce() {
  std::uint64_t random = 0;
  if (getentropy(&random, sizeof(random)) != 0) throw_error("get a random number", errno);
  return static_cast<std::int64_t>(random >> 11) | 1;
}

}  // namespace

SharedMemorySegment SharedMemorySegment::create(int ranks, const ExchangeOptions& options) {
  const auto bytes = static_cast<std::size_t>(SlotMemory::bytes(ranks, options)) + sizeof(Label);
  const int created = memfd_create("normscope", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (created < 0) throw_error("create a segment", errno);
  const auto descriptor = own_descriptor(created);
  // Reserve all pages now: with no memory left, a later access would kill the process (SIGBUS).
  // On older kernels a signal, such as that of a profiler's timer, undoes the call.
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(created, 0, static_cast<off_t>(bytes));
  if (error != 0) throw_error("reserve " + std::to_string(bytes) + " bytes", error);
  if (fcntl(created, F_ADD_SEALS, kSeals) != 0) throw_error("seal a segment", errno);

  const auto mapping = map(descriptor, bytes, PROT_READ | PROT_WRITE);
  auto* label =
      new (mapping.get()) Label{.magic = kMagic, .version = kVersion, .nonce = new_nonce()};
  SlotMemory::initialize(label + 1, ranks, options);
  return {descriptor, mapping, bytes};
}

SharedMemorySegment SharedMemorySegment::open(const SharedMemoryAddress& address) {
  const std::string path =
      "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.descriptor);
  SharedMemorySegment segment = open(path, Access::kWrite);
  if (segment.nonce_ != address.nonce) throw_another(path, "it has another nonce");
  return segment;
}

SharedMemorySegment SharedMemorySegment::look_into(const std::string& path) {
  return open(path, Access::kRead);
}

SharedMemorySegment SharedMemorySegment::open(const std::string& path, Access access) {
  // The path may now be something else, such as a pipe: opening it must not block or change it.
  const bool writes = access == Access::kWrite;
  const int opened =
      ::open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (opened < 0) throw_error("open " + path, errno);
  const auto descriptor = own_descriptor(opened);
  struct stat status = {};
  if (fstat(opened, &status) != 0) throw_error("look at " + path, errno);
  const auto bytes = static_cast<std::size_t>(status.st_size);
  const int seals = fcntl(opened, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) throw_another(path, "its size may change");
  if (bytes <= sizeof(Label)) throw_another(path, "it has " + std::to_string(bytes) + " bytes");
  const auto mapping = map(descriptor, bytes, writes ? PROT_READ | PROT_WRITE : PROT_READ);
  const auto* label = static_cast<const Label*>(mapping.get());
  if (label->magic != kMagic) throw_another(path, "it does not begin like one");
  if (label->version != kVersion) {
    throw_another(path, "it has version " + std::to_string(label->version) + " and not " +
                            std::to_string(kVersion));
  }
  return {descriptor, mapping, bytes};
}

SharedMemoryAddress SharedMemorySegment::address() const {
  return {.process = getpid(), .descriptor = *descriptor_, .nonce = nonce_};
}

SharedMemorySegment::SharedMemorySegment(std::shared_ptr<const int> descriptor,
                                         const std::shared_ptr<void>& mapping, std::size_t bytes)
    : descriptor_(std::move(descriptor)),
      memory_(mapping, static_cast<Label*>(mapping.get()) + 1),
      bytes_(static_cast<std::int64_t>(bytes - sizeof(Label))),
      nonce_(static_cast<const Label*>(mapping.get())->nonce) {}

}  // namespace normscope
