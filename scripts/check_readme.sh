#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# The code in the documents is good: every ```cpp block of README.md and docs/*.md that includes an outrider header compiles, and one with a
# main() runs, from the root of the repository, and returns 0. A block that occurs twice is built once.
. "$(dirname "$0")/common.sh"

rm -rf "$work"
mkdir -p "$work"
cd "$root"
awk -v work="$work" '
  FNR == 1 { inside = 0; document = FILENAME; sub(/.*\//, "", document); sub(/\.md$/, "", document) }
  /^```cpp/ { inside = 1; file = work "/" document "-line" FNR ".cpp"; text = ""; next }
  /^```/ && inside {
    inside = 0
    if (text ~ /#include [<"]outrider\// && !(text in seen)) printf "%s", text >file
    seen[text] = 1
    next
  }
  inside { text = text $0 "\n" }' README.md docs/*.md

# Without optimisation: a model's templates take most of the time, and the tiny pair needs none.
flags="$(compile_flags) $(native_flags) ${warnings[*]} -O0"
libs=$(pkg-config --libs libhwy)
try() { # try BLOCK: compiles it, and runs it if it is a program
  local stem=${1%.cpp}
  if grep -q '^int main(' "$1"; then
    $gxx $flags "$1" -o "$stem" $libs && timeout 120 "$stem" </dev/null >"$stem.out" 2>&1 && rm "$stem" && return
  else
    $gxx $flags -fsyntax-only "$1" && return
  fi
  [[ ! -e $stem.out ]] || tail -n 20 "$stem.out"
  echo "$check: $(basename "$stem") does not compile, or its program fails" >&2
  return 1
}
export -f try
export gxx flags libs check
shopt -s nullglob
blocks=("$work"/*.cpp)
printf '%s\0' "${blocks[@]}" | xargs -0 -n 1 -P "$jobs" bash -c 'try "$1"' try || fail "see above"
passed "${#blocks[@]} pieces of code, $(grep -l '^int main(' "${blocks[@]}" | wc -l) of them programs that ran"
