# SPDX-License-Identifier: Apache-2.0

include_guard(GLOBAL)

# Makes find_package(Torch) find the torch that the Python interpreter imports. The library is
# loaded into the process of this interpreter, and would not work with any other torch. Select the
# interpreter with -DPython_EXECUTABLE=..., or set Torch_DIR to a libtorch.
macro(normscope_use_torch_of_python)
  # The build directory caches the torch that it found; another interpreter has a different one.
  if(DEFINED Python_EXECUTABLE
     AND DEFINED NORMSCOPE_PYTHON_OF_TORCH
     AND NOT Python_EXECUTABLE STREQUAL NORMSCOPE_PYTHON_OF_TORCH
  )
    foreach(normscope_found IN ITEMS Torch_DIR Caffe2_DIR TORCH_LIBRARY c10_LIBRARY NORMSCOPE_PYTHON_OF_TORCH)
      unset(${normscope_found} CACHE)
    endforeach()
  endif()
  if(NOT Torch_DIR)
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE normscope_torch_prefix
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_VARIABLE normscope_torch_import_error
      ERROR_STRIP_TRAILING_WHITESPACE
      RESULT_VARIABLE normscope_torch_import_result
    )
    if(NOT normscope_torch_import_result EQUAL 0)
      # The last line of a traceback.
      string(REGEX REPLACE ".*\n" "" normscope_torch_import_error "${normscope_torch_import_error}")
      message(
        FATAL_ERROR
          "Install torch first, then install normscope without build isolation:\n"
          "  pip install torch scikit-build-core cmake ninja\n"
          "  pip install --no-build-isolation .\n"
          "normscope is compiled against the torch that will load it, and "
          "${Python_EXECUTABLE} has none (${normscope_torch_import_error}): a plain \"pip install .\" "
          "builds in an empty environment. "
          "The C++ library alone needs no torch: configure it with -DNORMSCOPE_BUILD_TORCH=OFF."
      )
    endif()
    set(NORMSCOPE_PYTHON_OF_TORCH ${Python_EXECUTABLE} CACHE INTERNAL "Interpreter whose torch was found")
    list(APPEND CMAKE_PREFIX_PATH ${normscope_torch_prefix})
  endif()
endmacro()
