# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(OUTRIDER_SOURCE_INSTALLDIR "${CMAKE_INSTALL_DATADIR}/outrider/src")
set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/outrider")

configure_package_config_file(cmake/outriderConfig.cmake.in "${PROJECT_BINARY_DIR}/package/outriderConfig.cmake"
                              INSTALL_DESTINATION "${package_dir}"
                              PATH_VARS CMAKE_INSTALL_INCLUDEDIR OUTRIDER_SOURCE_INSTALLDIR)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/package/outriderConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)

# The names @…@ of outrider.pc.in are those Meson fills in as well.
block()
  set(includedir "${CMAKE_INSTALL_INCLUDEDIR}")
  set(sourcedir "${OUTRIDER_SOURCE_INSTALLDIR}")
  set(version "${PROJECT_VERSION}")
  configure_file(cmake/outrider.pc.in "${PROJECT_BINARY_DIR}/package/outrider.pc" @ONLY)
endblock()

install(DIRECTORY include/outrider DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(FILES src/highway_dispatch.cpp src/cuda_backend.cu DESTINATION "${OUTRIDER_SOURCE_INSTALLDIR}")
install(FILES cmake/outriderTargets.cmake "${PROJECT_BINARY_DIR}/package/outriderConfig.cmake"
              "${PROJECT_BINARY_DIR}/package/outriderConfigVersion.cmake"
        DESTINATION "${package_dir}")
install(FILES "${PROJECT_BINARY_DIR}/package/outrider.pc" DESTINATION "${CMAKE_INSTALL_DATADIR}/pkgconfig")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
