# Installs the C++ library: headers, static library and what find_package(flashqla) needs. A wheel build (SKBUILD) installs the op library instead.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(FLASHQLA_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/flashqla)

install(TARGETS flashqla EXPORT flashqlaTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flashqla ${PROJECT_BINARY_DIR}/include/flashqla
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(EXPORT flashqlaTargets NAMESPACE flashqla:: DESTINATION ${FLASHQLA_CMAKE_DIR})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/flashqlaConfig.cmake.in ${PROJECT_BINARY_DIR}/flashqlaConfig.cmake
  INSTALL_DESTINATION ${FLASHQLA_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flashqlaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashqlaConfig.cmake ${PROJECT_BINARY_DIR}/flashqlaConfigVersion.cmake
  DESTINATION ${FLASHQLA_CMAKE_DIR})
