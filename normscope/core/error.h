// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// The base class of all exceptions of this library. The text names the wrong argument, the expected
// value and the given one.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's arguments do not fit. Nothing was updated and nothing was sent.
class ArgumentError : public Error {
 public:
  using Error::Error;
};

// A norm batch has one value per channel, which has no variance. With several ranks, every rank of
// the norm batch throws this, and the group stays usable.
class OneValueError : public ArgumentError {
 public:
  using ArgumentError::ArgumentError;
};

// A scope does not fit its group. Every rank of the group throws this, and the group stays usable.
class ScopeError : public ArgumentError {
 public:
  using ArgumentError::ArgumentError;
};

// The ranks of a group could not exchange: the transport failed, a peer failed, or the group was
// marked as failed earlier. The group cannot be used any more.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

// A wait reached its time limit. The text names the missing ranks if the transport knows them. The
// group cannot be used any more.
class TimeoutError : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

// A device refused a request. The text says which one, and gives the device's own reason.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// The ranks of one exchange made different calls (another layer, direction, number of channels or
// scope). Every rank gets this error; the group stays usable.
class MismatchError : public Error {
 public:
  using Error::Error;
};

}  // namespace normscope
