#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Builds everything, tests included, with the warning set as errors: check_warnings.sh gcc|clang
# Without optimisation, for time; what g++ sees only when it optimises, it says in the test build.
. "$(dirname "$0")/common.sh"

case ${1:-} in
  gcc) compiler=$gxx ;;
  clang) compiler=$clangxx ;;
  *) fail "say which compiler: gcc or clang" ;;
esac
cmake -S "$root" -B "$work/$1" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O0 \
  -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
cmake --build "$work/$1"
passed "everything built by $compiler"
