#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# The whole suite, built by clang++ with the warning set as errors, under AddressSanitizer and UndefinedBehaviorSanitizer (preset `asan`).
. "$(dirname "$0")/common.sh"

cd "$root"
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:check_initialization_order=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
echo 'leak:libomp' >"$work/suppressions"  # what the OpenMP runtime keeps until the end
export LSAN_OPTIONS=suppressions=$work/suppressions:print_suppressions=0
cmake --workflow --preset asan
# The teams of threads, where a missing order of memory would show. (OpenMP's runtime is not instrumented.)
$clangxx $(compile_flags) -O1 -g1 -fsanitize=thread -I"$root/tests"  \
  "$root"/tests/main.cpp "$root"/tests/backend/*_test.cpp -o "$work/thread" -pthread
TSAN_OPTIONS=halt_on_error=1 "$work/thread" --test-case-exclude='*openmp*'
passed "no finding"
