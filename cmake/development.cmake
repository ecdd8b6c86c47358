# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# What the project's own programs are compiled with, and the libraries only they use.

# The warning set; an error with -DCMAKE_COMPILE_WARNING_AS_ERROR=ON.
add_library(outrider_warnings INTERFACE)
target_compile_options(outrider_warnings INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow)

# Flags for this very machine: what a statically compiled SIMD backend needs.
include(CheckCXXCompilerFlag)
set(OUTRIDER_NATIVE_FLAGS "")
foreach(flag -march=native -mcpu=native)
  string(MAKE_C_IDENTIFIER "OUTRIDER_HAS${flag}" has_flag)
  check_cxx_compiler_flag(${flag} ${has_flag})
  if(${has_flag})
    set(OUTRIDER_NATIVE_FLAGS ${flag})
    break()
  endif()
endforeach()

if(OUTRIDER_BUILD_EXAMPLES OR OUTRIDER_BUILD_BENCH)
  FetchContent_Declare(CLI11 GIT_REPOSITORY https://github.com/CLIUtils/CLI11.git GIT_TAG v2.4.2 GIT_SHALLOW TRUE FIND_PACKAGE_ARGS)
  FetchContent_MakeAvailable(CLI11)
endif()
if(OUTRIDER_BUILD_TESTS)
  FetchContent_Declare(doctest GIT_REPOSITORY https://github.com/doctest/doctest.git GIT_TAG v2.4.11 GIT_SHALLOW TRUE FIND_PACKAGE_ARGS)
  FetchContent_MakeAvailable(doctest)
endif()

# One program per file of a folder, named after the file; what is called <program>_….cpp belongs to it. They are compiled for any machine and
# choose the SIMD target at run time.
function(outrider_add_programs)
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.cpp")
  list(SORT sources)  # chat.cpp comes before chat_command_line.cpp
  set(programs "")
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM name)
    set(owner "")
    foreach(program IN LISTS programs)
      if(name MATCHES "^${program}_")
        set(owner "${program}")
      endif()
    endforeach()
    if(owner)
      target_sources(${owner} PRIVATE "${source}")
      continue()
    endif()
    list(APPEND programs "${name}")
    add_executable(${name} "${source}")
    target_link_libraries(${name} PRIVATE outrider::highway_dispatch $<TARGET_NAME_IF_EXISTS:outrider::cuda_backend> CLI11::CLI11
                                          outrider_warnings)
    target_compile_definitions(${name} PRIVATE OUTRIDER_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  endforeach()
endfunction()

target_link_libraries(outrider_highway_dispatch PRIVATE outrider_warnings)

# What `cmake --build --preset cuda` builds: everything that runs on a device.
if(TARGET outrider_cuda_backend)
  target_compile_options(outrider_cuda_backend PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  add_custom_target(cuda_programs)
endif()
