# SPDX-License-Identifier: Apache-2.0

include_guard(GLOBAL)

# Sets Torch_DIR to the CMake folder of the torch that the Python interpreter imports. The library is
# loaded into the process of this interpreter, and would not work with any other torch. Select the
# interpreter with -DPython_EXECUTABLE=..., or set Torch_DIR to the folder of a libtorch.
macro(normscope_find_torch_of_python)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  # Without pip's build environment, if that has none: PYTHONPATH is what isolates it.
  foreach(options IN ITEMS "" -E)
    execute_process(
      COMMAND
        ${Python_EXECUTABLE} ${options} -c
        "from importlib.util import find_spec; print(find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE torch
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET
    )
    if(torch)
      break()
    endif()
  endforeach()
  if(NOT torch)
    message(
      FATAL_ERROR
        "Type \"pip install torch\" and then \"pip install .\": normscope is compiled with the torch that "
        "will load it, and ${Python_EXECUTABLE} has none. If the torch of another Python is to load "
        "it, as under uv, add --no-build-isolation, which needs scikit-build-core, cmake and ninja."
    )
  endif()
  set(Torch_DIR ${torch}/share/cmake/Torch)
endmacro()

# Defines the targets torch_cpu and torch, which are also those of find_package(Torch), and sets
# Torch_VERSION. find_package(Torch) would search for all that torch was built with: with a torch for
# CUDA, which is what the package index has, it fails if there is no CUDA toolkit. normscope links
# only libraries that all builds of torch have.
function(normscope_find_torch)
  if(TARGET torch_cpu)
    return()
  endif()
  if(NOT Torch_DIR)
    normscope_find_torch_of_python()
  endif()
  include(${Torch_DIR}/TorchConfigVersion.cmake)
  set(Torch_DIR ${Torch_DIR} PARENT_SCOPE)
  set(Torch_VERSION ${PACKAGE_VERSION} PARENT_SCOPE)
  cmake_path(SET root NORMALIZE ${Torch_DIR}/../../..)

  foreach(name IN ITEMS c10 torch_cpu torch)
    add_library(${name} SHARED IMPORTED GLOBAL)
    set_target_properties(
      ${name}
      PROPERTIES IMPORTED_LOCATION ${root}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}${name}${CMAKE_SHARED_LIBRARY_SUFFIX}
    )
  endforeach()
  target_include_directories(c10 INTERFACE ${root}/include)
  target_link_libraries(torch_cpu INTERFACE c10)
  target_include_directories(torch INTERFACE ${root}/include/torch/csrc/api/include)
  target_link_libraries(torch INTERFACE torch_cpu)
endfunction()

# Refuses to build CUDA kernels with a toolkit of another major version than that of torch, whose
# driver requirements and runtime differ. A torch without CUDA accepts every toolkit. Sets Torch_CUDA:
# whether the torch may be one for CUDA.
function(normscope_check_cuda_of_torch)
  set(Torch_CUDA ON PARENT_SCOPE)
  set(version_file ${Torch_DIR}/../../../version.py)
  if(NOT EXISTS ${version_file}) # a libtorch
    return()
  endif()
  file(READ ${version_file} text)
  if(NOT text MATCHES "\ncuda[^=\n]*= '([0-9]+)[.]([0-9]+)")
    set(Torch_CUDA OFF PARENT_SCOPE)
    return()
  endif()
  if(NOT CUDAToolkit_VERSION_MAJOR EQUAL CMAKE_MATCH_1)
    message(
      FATAL_ERROR
        "NORMSCOPE_BUILD_CUDA: expected nvcc ${CMAKE_MATCH_1}.x, as torch was built with CUDA "
        "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}, got ${CUDAToolkit_VERSION} "
        "(${CUDAToolkit_NVCC_EXECUTABLE}); put the bin folder of another toolkit first in PATH."
    )
  endif()
endfunction()
