# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# What the targets are: read by outrider's own build and by the installed outriderConfig.cmake, so that both mean the same.

# The headers in `include_dir` and what they need.
function(outrider_describe_library target include_dir)
  target_compile_features(${target} INTERFACE cxx_std_20)
  target_include_directories(${target} INTERFACE "${include_dir}")
  target_link_libraries(${target} INTERFACE hwy::hwy Eigen3::Eigen OpenMP::OpenMP_CXX nlohmann_json::nlohmann_json)
endfunction()

# outrider::highway_dispatch: the kernels for every SIMD target, chosen at run time. Compiled in the build that uses it, with its compiler
# and flags, and only if something links it.
function(outrider_add_highway_dispatch source)
  add_library(outrider_highway_dispatch STATIC EXCLUDE_FROM_ALL "${source}")
  add_library(outrider::highway_dispatch ALIAS outrider_highway_dispatch)
  target_compile_definitions(outrider_highway_dispatch PUBLIC OUTRIDER_HIGHWAY_DISPATCH)
  target_link_libraries(outrider_highway_dispatch PUBLIC outrider::outrider)
  # A build without a build type is a user's who did not think of one: kernels that are not optimised are fifty times slower.
  target_compile_options(outrider_highway_dispatch PRIVATE "$<$<AND:$<CONFIG:>,$<NOT:$<CXX_COMPILER_ID:MSVC>>>:-O2>")
  set_target_properties(outrider_highway_dispatch PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

# outrider::cuda_backend: the kernels of the CUDA backend, compiled by nvcc in the build that uses it, and only if something links it. It exists
# where the language CUDA is enabled with the CUDA Toolkit 12.4 or later.
function(outrider_offer_cuda_backend source)
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if(TARGET outrider::cuda_backend OR NOT "CUDA" IN_LIST languages)
    return()
  endif()
  find_package(CUDAToolkit 12.4 QUIET)
  if(NOT CUDAToolkit_FOUND)
    message(STATUS "outrider: no CUDA backend, which needs the CUDA Toolkit 12.4 or later")
    return()
  endif()
  add_library(outrider_cuda_backend STATIC EXCLUDE_FROM_ALL "${source}")
  add_library(outrider::cuda_backend ALIAS outrider_cuda_backend)
  target_compile_definitions(outrider_cuda_backend PUBLIC OUTRIDER_CUDA)
  target_compile_options(outrider_cuda_backend PRIVATE -std=c++20)  # CMake before 3.26 has no feature for it
  target_link_libraries(outrider_cuda_backend PUBLIC outrider::outrider CUDA::cudart_static CUDA::cublasLt)
  set_target_properties(outrider_cuda_backend PROPERTIES POSITION_INDEPENDENT_CODE ON)

  # Only those of the project's architectures that have what the kernels need. Without any, those of the large devices: by the intermediate code
  # of the last one later devices run as well.
  set(architectures "${CMAKE_CUDA_ARCHITECTURES}")
  foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
    if(architecture MATCHES "^all" OR (architecture MATCHES "^[0-9]+" AND CMAKE_MATCH_0 LESS 80))
      list(REMOVE_ITEM architectures "${architecture}")
    endif()
  endforeach()
  if(NOT architectures)
    set(architectures 80 90)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      list(APPEND architectures 100)
    endif()
  endif()
  if(NOT architectures STREQUAL CMAKE_CUDA_ARCHITECTURES)
    message(STATUS "outrider: the CUDA backend is compiled for the architectures ${architectures} (CMAKE_CUDA_ARCHITECTURES: ${CMAKE_CUDA_ARCHITECTURES})")
  endif()
  set_target_properties(outrider_cuda_backend PROPERTIES CUDA_ARCHITECTURES "${architectures}")
endfunction()
