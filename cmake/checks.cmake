# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# The checks of docs/contributing.md as targets: `cmake --build build/test --target check_headers`. None is part of `all`. Each is a script
# of scripts/ that also runs by itself.
function(outrider_add_check name script)
  add_custom_target(${name} COMMAND ${CMAKE_COMMAND} -E env "OUTRIDER_CHECK_DIR=${PROJECT_BINARY_DIR}/checks"
                            "${PROJECT_SOURCE_DIR}/scripts/${script}.sh" ${ARGN}
                    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" USES_TERMINAL VERBATIM)
endfunction()

outrider_add_check(check_warnings_gcc check_warnings gcc)
outrider_add_check(check_warnings_clang check_warnings clang)
foreach(check sanitizers fuzz cuda cuda_mutations headers compile_fail odr consumers meson format layers readme doxygen)
  outrider_add_check(check_${check} check_${check})
endforeach()
