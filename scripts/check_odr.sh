#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Headers in many translation units: nothing is defined twice, and units compiled for different instruction sets can share a program, in
# either link order, without one running the other's kernels.
. "$(dirname "$0")/common.sh"

flags=$(compile_flags)
libs=$(pkg-config --libs libhwy)

# 1. All headers in two units: a definition that is not inline would be there twice.
public_headers | sed 's/.*/#include "&"/' >"$work/first.cpp"
cp "$work/first.cpp" "$work/second.cpp"
echo 'int main() {}' >>"$work/second.cpp"
printf '%s\n' first second | xargs -P "$jobs" -I{} $gxx $flags $(native_flags) -O0 -c "$work/{}.cpp" -o "$work/{}.o"
# The dispatch unit takes part: its header declares what only that unit defines.
$gxx $flags -O0 -c "$root/src/highway_dispatch.cpp" -o "$work/dispatch.o"
$gxx -fopenmp "$work/first.o" "$work/second.o" "$work/dispatch.o" $libs -o "$work/twice"

# 2. Units of different flags. -O0, where nothing is inlined and every function is a symbol the linker may merge.
avx2='-mavx2 -mfma -mf16c -mbmi -mbmi2 -maes -mpclmul'
units=(dispatch)
case $(uname -m) in
  x86_64)
    units+=(avx2)
    grep -q avx512bw /proc/cpuinfo && units+=(avx512)
    ;;
  *) units+=(native) ;;
esac
unit() {
  local extra
  case $1 in
    avx2) extra=$avx2 ;;
    avx512) extra="$avx2 -mavx512f -mavx512cd -mavx512bw -mavx512dq -mavx512vl" ;;
    native) extra=$(native_flags) ;;
    dispatch) extra=-DOUTRIDER_UNIT_DISPATCH ;;
  esac
  $gxx $flags $extra -O0 -DOUTRIDER_UNIT="\"$1\"" -c "$root/tests/odr/unit.cpp" -o "$work/unit-$1.o"
}
for name in "${units[@]}"; do unit "$name"; done
$gxx $flags -O0 -c "$root/tests/odr/main.cpp" -o "$work/main.o"

# What each unit gives when it is alone …
link() { # link NAME UNITS…
  local name=$1 objects=()
  shift
  for one in "$@"; do objects+=("$work/unit-$one.o"); done
  $gxx -fopenmp "$work/main.o" "${objects[@]}" "$work/dispatch.o" $libs -o "$work/run-$name"
  "$work/run-$name"
}
for name in "${units[@]}"; do link "alone-$name" "$name"; done | sort >"$work/expected"
# … it must give in company, whoever comes first.
link forward "${units[@]}" | sort >"$work/forward"
mapfile -t reversed < <(printf '%s\n' "${units[@]}" | tac)
link backward "${reversed[@]}" | sort >"$work/backward"
cut -d ' ' -f 1-2 "$work/expected"
for order in forward backward; do
  diff "$work/expected" "$work/$order" || fail "linked $order, a unit gives other results than alone"
done
passed "units: ${units[*]}"
