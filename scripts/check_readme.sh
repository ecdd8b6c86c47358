#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# The code in the documents compiles: every ```cpp block of README.md and docs/*.md that includes an outrider header.
. "$(dirname "$0")/common.sh"

rm -f "$work"/*.cpp
cd "$root"
for document in README.md docs/*.md; do
  [[ -e $document ]] || continue
  awk -v stem="$work/$(basename "$document" .md)" '
    /^```cpp/ { inside = 1; file = stem "-line" NR ".cpp"; text = ""; next }
    /^```/ && inside { inside = 0; if (text ~ /#include [<"]outrider\//) printf "%s", text >file; next }
    inside { text = text $0 "\n" }' "$document"
done

flags="$(compile_flags) $(native_flags) -Wall -Wextra -fsyntax-only"
shopt -s nullglob
blocks=("$work"/*.cpp)
for block in "${blocks[@]}"; do
  $gxx $flags "$block" || fail "$(basename "$block" .cpp) does not compile"
done
passed "${#blocks[@]} pieces of code"
