// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// What every exception of this library derives from. The text says which argument, what was
// expected and what was given.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's arguments do not fit. Nothing was updated, nothing was sent.
class ArgumentError : public Error {
 public:
  using Error::Error;
};

// A norm batch has one value per channel, which has no variance. On several ranks all of them find
// this together, and the group stays usable.
class OneValueError : public ArgumentError {
 public:
  using ArgumentError::ArgumentError;
};

// The ranks of a group could not exchange: the transport failed, a peer failed, or the group was
// marked as failed earlier. The group cannot be used any more.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

// A wait ended at its time limit; the text names the ranks that have not come where the transport
// can tell. The group cannot be used any more.
class TimeoutError : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

// A device refused what it was asked for: the text says what, and the device's own reason.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// The ranks met in one exchange with different calls (another layer, direction, number of channels
// or scope). Every rank gets this error; the group stays usable.
class MismatchError : public Error {
 public:
  using Error::Error;
};

}  // namespace normscope
