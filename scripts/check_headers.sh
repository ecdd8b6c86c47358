#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Every header compiles alone, with g++ and clang++ and the warnings as errors; and again while min, max, I and small are macros, as
# <windows.h> and <complex.h> leave them behind. The SIMD headers are compiled for this machine.
. "$(dirname "$0")/common.sh"

# System headers come before the macros: the second pass is about our own text.
system_headers=$(grep -rhoE '^ *# *include <[^>]+>' "$root/include" | sed 's/^ *# *//; s/^/#/' | grep -v '<hwy/\|<cuda' | sort -u)
macros='#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define I _Imaginary_unit
#define small char'
flags="$(compile_flags) $(native_flags) ${warnings[*]} -fsyntax-only"

# one COMPILER HEADER: both passes; a failure prints the first lines of what the compiler said.
one() {
  local name=$work/$(basename "$1")-${2//\//_}
  printf '#include "%s"\n#include "%s"\n' "$2" "$2" >"$name.alone.cpp"
  {
    echo "$system_headers"
    # Whoever includes Highway takes it in before the macros too, without the header of ours that wraps it.
    grep -q 'hwy/highway.h' <<<"$($1 $flags -M "$name.alone.cpp" 2>/dev/null)" && echo '#include <hwy/highway.h>'
    printf '%s\n#include "%s"\n' "$macros" "$2"
  } >"$name.macros.cpp"
  local pass
  for pass in alone macros; do
    $1 $flags "$name.$pass.cpp" >"$name.log" 2>&1 && continue
    echo "$2 ($pass, $1):"
    head -n 20 "$name.log"
    return 1
  done
}
export -f one
export work system_headers macros flags

mapfile -t headers < <(public_headers)
printf '%s\n' "${headers[@]}" | xargs -P "$jobs" -I{} bash -c "one '$gxx' '{}' && one '$clangxx' '{}'" || fail "see above"
passed "${#headers[@]} headers, two compilers"
