# SPDX-License-Identifier: Apache-2.0
#
# One function per kind of target. The CMakeLists.txt of a folder only lists its contents with:
#
#   normscope_library(normscope_<folder> [SHARED] SOURCES ... DEPENDS ...)
#   normscope_install(<shared library> NAME <name> COMPONENT <component> HEADERS ...)
#   normscope_test(<name> SOURCES ... DEPENDS ... LABELS unit|ranks|mpi|cuda [TIMEOUT seconds])
#   normscope_mpi_test(<name> RANKS 1 2 ... SOURCES ... DEPENDS ...)
#   normscope_benchmark(<name> SOURCES ... DEPENDS ...)

include_guard(GLOBAL)
include(GNUInstallDirs)
include(GoogleTest)
include(NormscopeMpiTest)

# Long enough for sanitizers on two cores.
set(NORMSCOPE_TEST_TIMEOUT 120 CACHE STRING "Time limit of a test case in seconds")

# Options of all targets. Results must have the same bits with all instruction sets: multiplication
# and addition are rounded separately everywhere, so contraction into FMA is off.
function(normscope_set_compile_rules target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(
    ${target}
    PRIVATE -Wall
            -Wextra
            -Wpedantic
            -Wshadow
            -Wconversion
            -ffp-contract=off
            $<$<BOOL:${NORMSCOPE_WERROR}>:-Werror>
  )
  set_target_properties(
    ${target}
    PROPERTIES CXX_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               POSITION_INDEPENDENT_CODE ON
               VISIBILITY_INLINES_HIDDEN ON
  )
endfunction()

# Compiles all files of a target as a single one. Most of the time for any file that includes torch or
# GoogleTest goes into the parsing of headers. -DCMAKE_UNITY_BUILD=OFF compiles each file by itself.
function(normscope_compile_as_one target)
  if(NOT DEFINED CMAKE_UNITY_BUILD)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  endif()
endfunction()

# Optimizes less: tests spend more time in the compiler than they take to run.
function(normscope_compile_fast target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# Adds a folder of normscope/ as the target normscope_<folder>, alias normscope::<folder>: a static
# library, or a shared one with SHARED. DEPENDS are public, because the headers of a folder include
# those of the folders below it.
function(normscope_library target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SHARED" "" "SOURCES;DEPENDS")
  if(NOT target MATCHES "^normscope_(.+)$")
    message(FATAL_ERROR "normscope_library: expected a name normscope_<folder>, got ${target}")
  endif()
  set(folder ${CMAKE_MATCH_1})

  if(arg_SHARED)
    add_library(${target} SHARED ${arg_SOURCES})
  else()
    add_library(${target} STATIC ${arg_SOURCES})
  endif()
  add_library(normscope::${folder} ALIAS ${target})
  normscope_set_compile_rules(${target})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${normscope_SOURCE_DIR}>)
  target_link_libraries(${target} PUBLIC ${arg_DEPENDS})
endfunction()

# Installs a shared library. find_package(normscope COMPONENTS <component>) then provides the target
# normscope::<name> and the given headers, each of which must compile on its own. Versions 0.x are
# only compatible within a minor version.
function(normscope_install target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NAME;COMPONENT" "HEADERS")
  target_sources(
    ${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${normscope_SOURCE_DIR} FILES ${arg_HEADERS}
  )
  set_target_properties(
    ${target}
    PROPERTIES EXPORT_NAME ${arg_NAME}
               INSTALL_RPATH "$ORIGIN"
               SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
               VERIFY_INTERFACE_HEADER_SETS ON
  )
  install(
    TARGETS ${target}
    EXPORT normscope_${arg_COMPONENT}
    LIBRARY COMPONENT ${arg_COMPONENT} NAMELINK_COMPONENT ${arg_COMPONENT}
    FILE_SET HEADERS COMPONENT ${arg_COMPONENT}
  )
  # Only once per component, which may have several libraries.
  get_property(components GLOBAL PROPERTY normscope_installed_components)
  if(arg_COMPONENT IN_LIST components)
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY normscope_installed_components ${arg_COMPONENT})
  install(
    EXPORT normscope_${arg_COMPONENT}
    NAMESPACE normscope::
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/normscope
    COMPONENT ${arg_COMPONENT}
  )
endfunction()

# Adds an executable for tests or benchmarks.
function(normscope_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPENDS")
  add_executable(${name} ${arg_SOURCES})
  normscope_set_compile_rules(${name})
  target_include_directories(${name} PRIVATE ${normscope_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${arg_DEPENDS})
endfunction()

# Adds a GoogleTest executable. Each of its cases is a ctest case with the label, and runs with the
# variables of ENVIRONMENT. `unit` cases run in a single thread; `ranks` cases start ranks (threads
# or processes) that wait for each other; `mpi` cases only exist if the library is built with MPI.
function(normscope_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LABELS;TIMEOUT;ENVIRONMENT" "SOURCES;DEPENDS")
  if(NOT arg_LABELS MATCHES "^(unit|ranks|mpi|cuda)$")
    message(FATAL_ERROR "normscope_test(${name}): LABELS: expected unit, ranks, mpi or cuda, got ${arg_LABELS}")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT ${NORMSCOPE_TEST_TIMEOUT})
  endif()

  normscope_executable(${name} SOURCES ${arg_SOURCES} DEPENDS ${arg_DEPENDS} GTest::gmock GTest::gtest_main)
  normscope_compile_as_one(${name})
  normscope_compile_fast(${name})
  # The prefix distinguishes suites of the same name in different folders. Without NO_PRETTY_VALUES,
  # cases would be named after their parameters, which are printed as bytes if the type has no
  # printer.
  gtest_discover_tests(
    ${name}
    NO_PRETTY_VALUES
    TEST_PREFIX "${name}."
    DISCOVERY_MODE PRE_TEST
    PROPERTIES LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${arg_ENVIRONMENT}"
  )
endfunction()

# Adds a GoogleTest executable with its own main(), in which each process is a rank. There is one
# ctest case for each number of ranks, labeled mpi.
function(normscope_mpi_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "RANKS;SOURCES;DEPENDS")
  normscope_executable(${name} SOURCES ${arg_SOURCES} DEPENDS ${arg_DEPENDS} GTest::gmock)
  foreach(ranks IN LISTS arg_RANKS)
    normscope_add_mpi_test(${name}.OnRanks/${ranks} RANKS ${ranks} COMMAND $<TARGET_FILE:${name}>)
  endforeach()
endfunction()

# Adds a Google Benchmark executable.
function(normscope_benchmark name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPENDS")
  normscope_executable(${name} SOURCES ${arg_SOURCES} DEPENDS ${arg_DEPENDS} benchmark::benchmark_main)
endfunction()

# Adds a shared library that the Python benchmarks load from the build directory.
function(normscope_benchmark_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPENDS")
  add_library(${name} MODULE ${arg_SOURCES})
  normscope_set_compile_rules(${name})
  target_include_directories(${name} PRIVATE ${normscope_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${arg_DEPENDS})
  set_target_properties(${name} PROPERTIES PREFIX "")
endfunction()
