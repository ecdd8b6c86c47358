#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#
# What including outrider costs: processor seconds (user + system) of the compiler, the median of three runs, against the project's ceilings.
#   bench/compile_time.sh [--check]        --check: exit code 1 if a ceiling is passed
# GXX chooses the compiler, OUTRIDER_CHECK_DIR where files go.
. "$(dirname "$0")/../scripts/common.sh"

ceiling_check=no
for argument; do
  case $argument in
    --check) ceiling_check=yes ;;
    *) fail "unknown argument $argument; allowed: --check" ;;
  esac
done

# Processor time counts, not the clock: it hardly changes when the machine is busy.
seconds() {
  local TIMEFORMAT='%U %S'
  for _ in 1 2 3; do
    { time "$@" >"$work/log" 2>&1 || echo failed; } 2>&1
  done | awk '/failed/ { bad = 1 } { print $1 + $2 } END { exit bad }' | sort -n | sed -n 2p
}

status=0
# row WHAT CEILING FILE FLAG…
row() {
  local what=$1 ceiling=$2 file=$3 took verdict=within
  shift 3
  took=$(seconds "$gxx" $(compile_flags) -O2 "$@" -c "$file" -o "$work/object.o") || { cat "$work/log"; fail "$what does not compile"; }
  awk -v a="$took" -v b="$ceiling" 'BEGIN { exit !(a > b) }' && { verdict=over; status=1; }
  printf '| %s | %.2f s | %.1f s | %s |\n' "$what" "$took" "$ceiling" "$verdict"
}

(cd "$root/include" && printf '#include "%s"\n' outrider/core/*.hpp) >"$work/core.cpp"
printf '#include "outrider/outrider.hpp"\n\nusing backend = outrider::cpu;\n' >"$work/umbrella.cpp"

echo "$("$gxx" --version | head -n 1), -O2, processor seconds, median of 3"
echo
echo "| | took | ceiling | |"
echo "|---|---|---|---|"
row "core/*.hpp" 0.4 "$work/core.cpp"
row "outrider.hpp, kernels for this machine" 8 "$work/umbrella.cpp" $(native_flags)
row "outrider.hpp, kernels in another file" 8 "$work/umbrella.cpp" -DOUTRIDER_HIGHWAY_DISPATCH
row "examples/speculate.cpp" 25 "$root/examples/speculate.cpp" -DOUTRIDER_HIGHWAY_DISPATCH "-DOUTRIDER_SOURCE_DIR=\"$root\""
[[ $ceiling_check == no || $status == 0 ]] || fail "over a ceiling, see above"
