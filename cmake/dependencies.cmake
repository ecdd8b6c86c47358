# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# The four dependencies. A system package is taken where there is one; only without it is the source fetched.
include(FetchContent)

FetchContent_Declare(hwy GIT_REPOSITORY https://github.com/google/highway.git GIT_TAG 1.2.0 GIT_SHALLOW TRUE
                     FIND_PACKAGE_ARGS 1.0.3)
FetchContent_Declare(Eigen3 GIT_REPOSITORY https://gitlab.com/libeigen/eigen.git GIT_TAG 3.4.0 GIT_SHALLOW TRUE
                     FIND_PACKAGE_ARGS 3.4)
FetchContent_Declare(nlohmann_json GIT_REPOSITORY https://github.com/nlohmann/json.git GIT_TAG v3.11.3 GIT_SHALLOW TRUE
                     FIND_PACKAGE_ARGS 3.11)

# A fetched dependency brings its library, not its tests and documents.
block()
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
  set(BUILD_TESTING OFF)
  set(HWY_ENABLE_TESTS OFF)
  set(HWY_ENABLE_EXAMPLES OFF)
  set(HWY_ENABLE_CONTRIB OFF)
  set(EIGEN_BUILD_DOC OFF)
  set(EIGEN_BUILD_PKGCONFIG OFF)
  FetchContent_MakeAvailable(hwy Eigen3 nlohmann_json)
endblock()
if(TARGET hwy AND NOT TARGET hwy::hwy)
  add_library(hwy::hwy ALIAS hwy)
endif()

find_package(OpenMP REQUIRED COMPONENTS CXX)
