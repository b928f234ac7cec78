# SPDX-License-Identifier: Apache-2.0

include_guard(GLOBAL)

# Lets find_package(Torch) find the torch that the Python interpreter imports: the library is loaded
# into that very process, so any other torch would be a wrong one.
# Choose the interpreter with -DPython_EXECUTABLE=..., or point Torch_DIR at a libtorch.
macro(normscope_use_torch_of_python)
  if(NOT Torch_DIR)
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE normscope_torch_prefix
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_VARIABLE normscope_torch_import_error
      RESULT_VARIABLE normscope_torch_import_result
    )
    if(NOT normscope_torch_import_result EQUAL 0)
      message(
        FATAL_ERROR
          "normscope is compiled against the torch that it will be used with, and "
          "${Python_EXECUTABLE} cannot import one:\n${normscope_torch_import_error}"
          "Install torch first, then build without isolation:\n"
          "  pip install torch scikit-build-core cmake ninja\n"
          "  pip install --no-build-isolation .\n"
          "or configure with -DNORMSCOPE_BUILD_TORCH=OFF for the C++ library alone."
      )
    endif()
    list(APPEND CMAKE_PREFIX_PATH ${normscope_torch_prefix})
  endif()
endmacro()
