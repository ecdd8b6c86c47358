#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Every header compiles alone, with g++ and clang++ and the warnings as errors; and all of them together while min, max, I and small are
# macros, as <windows.h> and <complex.h> leave them behind. The SIMD headers are compiled for this machine.
. "$(dirname "$0")/common.sh"

flags="$(compile_flags) $(native_flags) ${warnings[*]} -fsyntax-only"
mapfile -t headers < <(public_headers)

# compile COMPILER FILE WHAT: a failure prints the first lines of what the compiler said.
compile() {
  $1 $flags "$2" >"$2.log" 2>&1 && return
  echo "$3 ($1):"
  head -n 20 "$2.log"
  return 1
}
alone() {
  local file=$work/${2//\//_}.$1.cpp
  printf '#include "%s"\n#include "%s"\n' "$2" "$2" >"$file"
  compile "$1" "$file" "$2 alone"
}
export -f compile alone
export work flags

for compiler in "$gxx" "$clangxx"; do
  printf '%s\n' "${headers[@]}" | xargs -P "$jobs" -I{} bash -c "alone '$compiler' '{}'" || fail "a header does not compile alone"
done

# System headers come before the macros: this pass is about our own text. (Highway's, too, and it refuses some processors unless told this.)
{
  echo '#define HWY_COMPILE_ONLY_STATIC'
  grep -rhoE '^ *# *include <[^>]+>' "$root/include" --include='*.hpp' | sed 's/^ *# *//; s/^/#/' | grep -v '<cuda' | sort -u
  echo '#define min(a, b) (((a) < (b)) ? (a) : (b))'
  echo '#define max(a, b) (((a) > (b)) ? (a) : (b))'
  echo '#define I _Imaginary_unit'
  echo '#define small char'
  printf '#include "%s"\n' "${headers[@]}"
} >"$work/macros.cpp"
for compiler in "$gxx" "$clangxx"; do
  compile "$compiler" "$work/macros.cpp" "all headers after '#define min, max, I, small'" || fail "a header uses one of these names bare"
done
passed "${#headers[@]} headers, two compilers"
