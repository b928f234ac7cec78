# SPDX-License-Identifier: Apache-2.0
#
# Defines NCCL::NCCL, from the system or from the PyPI package nvidia-nccl-cu13, which PyTorch
# itself uses. Set NCCL_INCLUDE_DIR and NCCL_LIBRARY to use another one.
if(NOT NCCL_INCLUDE_DIR)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import nvidia.nccl; print(nvidia.nccl.__path__[0])"
      OUTPUT_VARIABLE NCCL_OF_PYTHON
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET
    )
  endif()
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS "${NCCL_OF_PYTHON}/include")
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS "${NCCL_OF_PYTHON}/lib")
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR)
if(NCCL_FOUND AND NOT TARGET NCCL::NCCL)
  add_library(NCCL::NCCL UNKNOWN IMPORTED)
  set_target_properties(
    NCCL::NCCL PROPERTIES IMPORTED_LOCATION "${NCCL_LIBRARY}"
                          INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}"
  )
endif()
