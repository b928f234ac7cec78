# SPDX-License-Identifier: Apache-2.0
#
# Checks of the CUDA kernels that need no GPU, but take too long for every test run. All of them
# have the label cuda.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
find_program(NORMSCOPE_NVCC nvcc DOC "nvcc, which compiles the CUDA kernels")
if(NOT NORMSCOPE_NVCC)
  message(NOTICE "cuda: nvcc is missing; the kernels are not compiled for a device")
endif()
add_custom_target(cuda_checks)

# From the toolkit, or from the package nvidia-cuda-nvdisasm.
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c "import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])"
  OUTPUT_VARIABLE cuda_of_python
  OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_QUIET
)
find_program(
  NORMSCOPE_NVDISASM nvdisasm
  HINTS "${cuda_of_python}/bin"
  DOC "nvdisasm, which reads the kernels' machine code"
)

# Adds a test that builds targets with the kernels, without a device. The arguments after the targets
# are for ctest. A script launches nvcc, and fails if the kernels cause a warning or exceed the limits
# in their comments, or if nvdisasm is missing. Wheels contain the same object
# (scripts/build_wheel.sh). Everything else is only linked with it, and not optimized.
set(build ${CMAKE_BINARY_DIR}/kernels)
set(script ${normscope_SOURCE_DIR}/scripts/check_kernel_resources.py)
function(normscope_build_with_cuda test targets)
  list(TRANSFORM targets PREPEND "--build-target;")
  add_test(
    NAME ${test}
    COMMAND
      ${CMAKE_CTEST_COMMAND} --build-and-test ${normscope_SOURCE_DIR} ${build}
      --build-generator ${CMAKE_GENERATOR} --build-noclean ${targets}
      --build-options -DNORMSCOPE_BUILD_CUDA=ON -DNORMSCOPE_BUILD_TORCH=OFF
      -DNORMSCOPE_BUILD_TESTS=ON -DNORMSCOPE_WERROR=ON
      "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -Wno-maybe-uninitialized"
      "-DCMAKE_CUDA_COMPILER_LAUNCHER=${Python3_EXECUTABLE};${script};--nvdisasm;${NORMSCOPE_NVDISASM};${normscope_SOURCE_DIR}/normscope/kernels/cuda;--"
      ${ARGN}
  )
  set_tests_properties(${test} PROPERTIES LABELS cuda TIMEOUT 1200)
  if(NOT NORMSCOPE_NVCC)
    set_tests_properties(${test} PROPERTIES DISABLED ON)
  endif()
endfunction()

# nvcc compiles the architectures in parallel.
normscope_build_with_cuda(cuda.CompilesWithinItsLimits normscope_kernels_cuda)
set_tests_properties(
  cuda.CompilesWithinItsLimits PROPERTIES FIXTURES_SETUP cuda_object PROCESSORS 2
)
normscope_build_with_cuda(
  cuda.IsLinkedIntoTheLibrary
  "normscope;kernel_selection_test;cuda_kernels_test;cuda_batch_norm_test"
  --test-command ${build}/tests/kernels/kernel_selection_test --gtest_filter=*Kernels.*
)
set_tests_properties(cuda.IsLinkedIntoTheLibrary PROPERTIES FIXTURES_REQUIRED cuda_object)

# The suites under ThreadSanitizer: conflicting accesses of two device threads must be ordered. Ranks
# that share a device are among them.
set(on_device ${normscope_SOURCE_DIR}/tests/comm/on_device)
add_library(
  cuda_on_host_suites OBJECT
  addresses_test.cpp bits_test.cpp contract_test.cpp cuda_on_host/device.cpp
  cuda_on_host/early_start_test.cpp cuda_on_host/kernels_under_test.cpp cuda_on_host/stream.cpp
  sum_and_apply_test.cpp ${on_device}/device_communicator.cpp
  ${on_device}/device_communicator_test.cpp
  ${normscope_SOURCE_DIR}/tests/comm/worlds.cpp
)
normscope_set_compile_rules(cuda_on_host_suites)
target_include_directories(cuda_on_host_suites PRIVATE ${normscope_SOURCE_DIR})
target_link_libraries(
  cuda_on_host_suites PRIVATE normscope::kernels normscope::comm GTest::gmock
)
target_compile_options(cuda_on_host_suites PRIVATE -fsanitize=thread)

# Adds an executable of the suites with the kernels of a tree.
function(normscope_cuda_on_host_executable target tree)
  add_executable(${target} cuda_on_host/backend.cpp)
  normscope_set_compile_rules(${target})
  target_include_directories(${target} PRIVATE ${tree} ${normscope_SOURCE_DIR})
  target_link_libraries(
    ${target} PRIVATE cuda_on_host_suites normscope::kernels normscope::comm GTest::gmock
                      GTest::gtest_main
  )
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:cuda_on_host_suites>)
  target_compile_options(${target} PRIVATE -fsanitize=thread -O1)
  target_link_options(${target} PRIVATE -fsanitize=thread)
  add_dependencies(cuda_checks ${target})
endfunction()

# Adds a test of some cases of an executable. The arguments after them are environment variables.
function(normscope_cuda_on_host_test test target cases)
  add_test(NAME ${test} COMMAND ${target} --gtest_fail_fast --gtest_filter=${cases})
  set_tests_properties(
    ${test} PROPERTIES LABELS cuda TIMEOUT 300 ENVIRONMENT "TSAN_OPTIONS=halt_on_error=1;${ARGN}"
  )
endfunction()

set(cases "*FollowTheSpecification/*_float32_channels_")
set(early_cases "*EarlyKernels*")
set(apply_cases "Device/SumAndApply.*float32_channels_")
set(ranks_cases "*FollowEachOther*")
normscope_cuda_on_host_executable(cuda_threads ${normscope_SOURCE_DIR})
normscope_cuda_on_host_test(cuda.ThreadsDoNotRace cuda_threads ${cases}*:${early_cases}:${apply_cases}*)
normscope_cuda_on_host_test(cuda.RanksDoNotRace cuda_threads ${ranks_cases})

# The suites must fail if a synchronization between threads is removed, or if kernels are wrong about
# the elements before and after packs.
set(mutants ${CMAKE_CURRENT_BINARY_DIR}/mutants)
execute_process(
  COMMAND ${Python3_EXECUTABLE} ${normscope_SOURCE_DIR}/scripts/mutate_cuda_kernels.py
          ${normscope_SOURCE_DIR} ${mutants}
  OUTPUT_VARIABLE names
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY
)
string(REPLACE "\n" ";" names "${names}")
normscope_cuda_on_host_executable(cuda_mutants ${mutants})
set(number 0)
foreach(name IN LISTS names)
  math(EXPR number "${number} + 1")
  if(name MATCHES "^exchange_over_peers")
    normscope_cuda_on_host_test(
      cuda.Misses/${name} cuda_mutants ${ranks_cases}/3 NORMSCOPE_MUTANT=${number}
    )
  elseif(name MATCHES "_without_(head|tail|part|rotation|address|stride)$")
    normscope_cuda_on_host_test(
      cuda.Misses/${name} cuda_mutants "*Addresses.${cases}first" NORMSCOPE_MUTANT=${number}
    )
  elseif(name MATCHES "^sum_and_apply_.*_without_(barrier|cluster)$")
    set(layout $<IF:$<STREQUAL:${CMAKE_MATCH_1},cluster>,last,first>)
    normscope_cuda_on_host_test(
      cuda.Misses/${name} cuda_mutants ${apply_cases}${layout} NORMSCOPE_MUTANT=${number}
    )
  elseif(name MATCHES "_without_(wait|order|start)$")
    normscope_cuda_on_host_test(
      cuda.Misses/${name} cuda_mutants ${early_cases} NORMSCOPE_MUTANT=${number}
    )
  else()
    string(REGEX MATCH "^(last_block|sum_channels_last)" is_last ${name})
    set(layout $<IF:$<BOOL:${is_last}>,last,first>)
    normscope_cuda_on_host_test(
      cuda.Misses/${name} cuda_mutants ${cases}${layout} NORMSCOPE_MUTANT=${number}
    )
  endif()
  set_tests_properties(
    cuda.Misses/${name}
    PROPERTIES PASS_REGULAR_EXPRESSION "ThreadSanitizer: data race;\\[  FAILED  \\]"
  )
endforeach()
file(GLOB kernels ${normscope_SOURCE_DIR}/normscope/kernels/cuda/*.cuh)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${kernels})
