#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# The whole suite, built by clang++ with the warning set as errors, under AddressSanitizer and UndefinedBehaviorSanitizer (preset `asan`).
. "$(dirname "$0")/common.sh"

cd "$root"
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:check_initialization_order=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
cmake --workflow --preset asan
passed "no finding"
