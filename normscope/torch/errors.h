// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string_view>

#include <c10/util/Exception.h>

#include "normscope/core/error.h"

namespace normscope::binding {

// Returns call(). Converts its errors to torch's types, which Python knows.
template <class Call>
decltype(auto) as_torch(const Call& call) {
  try {
    return call();
  } catch (const ArgumentError& error) {
    C10_THROW_ERROR(ValueError, error.what());
  } catch (const CommunicationError& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  } catch (const MismatchError& error) {
    C10_THROW_ERROR(DistError, error.what());
  }
}

// The function, for an op: as_torch() converts its errors.
template <class Result, class... Arguments>
auto op_of(Result (*function)(Arguments...)) {
  return [function](Arguments... arguments) -> Result {
    return as_torch([&]() -> Result { return function(arguments...); });
  };
}

// An error's text, without the backtrace that torch adds. Valid as long as the error: there may be
// no memory for a copy.
[[nodiscard]] inline std::string_view what_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace normscope::binding
