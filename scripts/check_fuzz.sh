#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer on everything that reads bytes of others (tests/fuzz). An input that is found
# stays in the directory this prints: mend the reader, and put the input into tests/fuzz/regressions/<target>/, which the tests replay.
#   check_fuzz.sh [TARGET…]   default: all of them
#   FUZZ_SECONDS              for each target    default: 30
#   FUZZ_SEED                                    default: 0, a new one each time, printed
. "$(dirname "$0")/common.sh"

cd "$root"
programs=build/fuzz/tests/fuzz
fuzz=tests/fuzz
(($#)) || set -- $(ls "$fuzz"/fuzz_*.cpp | sed 's|.*/fuzz_||; s|\.cpp$||')
cmake --preset fuzz >"$work/configure.log"
cmake --build build/fuzz --target "${@/#/fuzz_}"

seeds() { # directories of inputs to start from, besides what earlier runs found
  local more=()
  [[ $1 != config ]] || more=(tests/golden/bad_configs/accept tests/golden/bad_configs/reject)
  for directory in "$fuzz/corpus/$1" "$fuzz/regressions/$1" "${more[@]}"; do [[ ! -d $directory ]] || echo "$directory"; done
}

export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
run() { # run TARGET
  mkdir -p "$work/corpus/$1" "$work/found/$1"
  # Nothing here needs much memory or time: 512 MiB in one piece, 2 GiB or 10 s for one input are findings too.
  "$programs/fuzz_$1" -max_total_time="${FUZZ_SECONDS:-30}" -seed="${FUZZ_SEED:-0}" -max_len=8192 -timeout=10 -rss_limit_mb=2048 \
    -malloc_limit_mb=512 -dict="$fuzz/$1.dict" -artifact_prefix="$work/found/$1/" -print_final_stats=1 \
    "$work/corpus/$1" $(seeds "$1") >"$work/$1.log" 2>&1 || {
    grep 'INFO: Seed' "$work/$1.log"
    grep -vE '^#[0-9]+' "$work/$1.log" | tail -n 60
    echo "$1: a finding; its input is in $work/found/$1"
    return 1
  }
  echo "$1: $(sed -n 's/^stat::number_of_executed_units: *//p' "$work/$1.log") inputs"
}
export -f seeds run
export programs fuzz work
printf '%s\n' "$@" | xargs -P "$jobs" -I{} bash -c 'run {}' || fail "a target has a finding, see above"
passed "no finding in $# targets"
