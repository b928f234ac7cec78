# SPDX-License-Identifier: Apache-2.0

# Installs the files for find_package(normscope) and pkg-config.

include_guard(GLOBAL)
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(normscope_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/normscope)

configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/normscopeConfig.cmake.in normscopeConfig.cmake
  INSTALL_DESTINATION ${normscope_package_dir}
)
write_basic_package_version_file(normscopeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/normscopeConfig.cmake
        ${CMAKE_CURRENT_BINARY_DIR}/normscopeConfigVersion.cmake
  DESTINATION ${normscope_package_dir}
  COMPONENT core
)

# Relative to the file itself, so that the installed tree can be moved, unless the folders are absolute.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(normscope_pc_prefix ${CMAKE_INSTALL_PREFIX})
else()
  file(RELATIVE_PATH normscope_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  string(PREPEND normscope_pc_prefix "\${pcfiledir}/")
endif()
foreach(folder IN ITEMS LIBDIR INCLUDEDIR)
  set(normscope_pc_${folder} "\${prefix}")
  cmake_path(APPEND normscope_pc_${folder} "${CMAKE_INSTALL_${folder}}")
endforeach()
configure_file(${CMAKE_CURRENT_LIST_DIR}/normscope.pc.in normscope.pc @ONLY)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/normscope.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT core
)
