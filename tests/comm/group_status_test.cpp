// SPDX-License-Identifier: Apache-2.0
//
// The status of a process whose files have the name of a group's memory, and any content.
#include "normscope/comm/group_status.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/text.h"
#include "tests/support/random.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A segment begins with a label of one cache line: magic, version, nonce. Then come the numbers of
// ranks, the slot's length and the time limit.
constexpr std::size_t kVersion = 8;
constexpr std::size_t kRanks = 64;
constexpr std::size_t kSlotLength = 72;
constexpr std::size_t kAfterNumbers = 128;

std::string status() { return status_of_process(getpid()); }

// A file of this process with the name of a group's memory.
class File {
 public:
  explicit File(const std::vector<char>& content, int seals = kSeals)
      : descriptor_(memfd_create("normscope", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    EXPECT_EQ(write(descriptor_, content.data(), content.size()),
              static_cast<ssize_t>(content.size()));
    EXPECT_EQ(fcntl(descriptor_, F_ADD_SEALS, seals), 0);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(descriptor_); }

  [[nodiscard]] std::string skipped() const {
    const std::string process = std::to_string(getpid());
    return "process " + process + ": /proc/" + process + "/fd/" + std::to_string(descriptor_) +
           " is skipped: ";
  }

 private:
  int descriptor_;
};

// What the segment of a group of two ranks contains after a call.
std::vector<char> content_of_segment() {
  const auto segment = SharedMemorySegment::create(2);
  const auto rank = make_shared_memory_communicator(segment, 0);
  rank->calls()->begin({.what = "forward", .layer = "layer"});
  const std::size_t label = 64;
  std::vector<char> content(static_cast<std::size_t>(segment.bytes()) + label);
  EXPECT_EQ(
      pread(static_cast<int>(segment.address().descriptor), content.data(), content.size(), 0),
      static_cast<ssize_t>(content.size()));
  return content;
}

template <class Number>
void put(std::vector<char>& content, std::size_t at, Number number) {
  std::memcpy(content.data() + at, &number, sizeof(number));
}

TEST(GroupStatus, ShowsACopyOfASegmentAndWhyOtherFilesAreSkipped) {
  struct Other {
    std::vector<char> content;
    const char* reason;
    int seals = kSeals;
  };
  const std::vector<char> segment = content_of_segment();
  const auto with = [&](std::size_t at, auto number) {
    std::vector<char> content = segment;
    put(content, at, number);
    return content;
  };
  std::vector<Other> others{{{}, ""},
                            {std::vector<char>(4096), "does not begin like one"},
                            {segment, "its size may change", 0},
                            {with(kVersion, std::int64_t{1}), "it has version 1 and not "}};
  for (const std::size_t size : {std::size_t{65}, std::size_t{200}, std::size_t{4096},
                                 segment.size() - 1, segment.size() + 1}) {
    others.push_back({segment, "bytes, got "});
    others.back().content.resize(size);
  }
  for (const std::int32_t ranks :
       {-1, 0, 1, 3, 65536, 65537, std::numeric_limits<std::int32_t>::max()}) {
    others.push_back({with(kRanks, ranks), ""});
  }
  for (const std::int64_t length : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1} << 30,
                                    std::numeric_limits<std::int64_t>::max()}) {
    others.push_back({with(kSlotLength, length), ""});
  }
  const File copy(segment);
  for (const Other& other : others) {
    const File file(other.content, other.seals);
    EXPECT_THAT(status(), AllOf(HasSubstr("rank 0 waits in forward of layer"),
                                HasSubstr(file.skipped()), HasSubstr(other.reason)));
    EXPECT_EQ(fault_of_peers(getpid()), "");
  }
}

TEST(GroupStatus, AnyBytesInASegmentGiveAPrintableText) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<char> content = content_of_segment();
    const auto begin = content.begin() + kAfterNumbers;
    const auto end = begin + 4096;
    if (round == 0) {
      std::fill(begin, end, '\xff');
    } else {
      // A failure that is complete, and states that exist.
      std::generate(begin, end,
                    [&] { return static_cast<char>(random.bits() % (round < 100 ? 3 : 256)); });
      put(content, kAfterNumbers, std::uint32_t{2});
    }
    const File file(content);

    std::string text = status();

    if (!text.empty() && text.back() == '\n') text.pop_back();
    EXPECT_EQ(text, printable(text));
  }
}

}  // namespace
}  // namespace normscope::testing
