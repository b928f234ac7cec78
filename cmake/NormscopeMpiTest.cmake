# SPDX-License-Identifier: Apache-2.0

include_guard(GLOBAL)

# normscope_add_mpi_test(<name> RANKS <number> [BEHIND <command>...] COMMAND <program> [<argument>...])
#
# Adds a ctest case that mpirun starts, after find_package(MPI). BEHIND is a command that starts
# mpirun. The environment lets Open MPI start more ranks than there are cores, also as root.
function(normscope_add_mpi_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "RANKS" "BEHIND;COMMAND")
  add_test(
    NAME ${name}
    COMMAND ${arg_BEHIND} ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${arg_RANKS} ${arg_COMMAND}
  )
  set(environment OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
                  OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
  )
  set_tests_properties(
    ${name}
    PROPERTIES LABELS mpi
               ENVIRONMENT "${environment}"
               RUN_SERIAL ON
               TIMEOUT 120
  )
endfunction()
