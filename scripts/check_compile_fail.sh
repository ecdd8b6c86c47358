#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Misuse gives a readable message. Every tests/compile_fail/*.cpp must be refused with a message that matches each of its lines
#   // expect: REGEX
# and must compile with -DOUTRIDER_TWIN, where it does the same thing properly: so it is refused for the reason it names. A line
#   // twin flags: FLAGS
# adds flags for the twin, and `// machine: NAME` keeps a case to one kind of processor (uname -m).
. "$(dirname "$0")/common.sh"

flags=$(compile_flags)
cases=("$root"/tests/compile_fail/*.cpp)
status=0
for file in "${cases[@]}"; do
  name=$(basename "$file" .cpp)
  machine=$(sed -n 's|^// machine: ||p' "$file")
  [[ -z $machine || $machine == "$(uname -m)" ]] || continue
  mapfile -t expected < <(sed -n 's|^// expect: ||p' "$file")
  twin_flags=$(sed -n 's|^// twin flags: ||p' "$file")
  [[ ${#expected[@]} -gt 0 ]] || fail "$name has no line '// expect: REGEX'"
  for compiler in "$gxx" "$clangxx"; do
    log=$work/$name.log
    if $compiler $flags -fsyntax-only "$file" >"$log" 2>&1; then
      echo "$name: compiles with $compiler, and must not"
      status=1
    fi
    for regex in "${expected[@]}"; do
      grep -qE -- "$regex" "$log" && continue
      echo "$name: $compiler does not say '$regex' but:"
      head -n 10 "$log"
      status=1
    done
    if ! $compiler $flags $twin_flags "${warnings[@]}" -DOUTRIDER_TWIN -fsyntax-only "$file" >"$log" 2>&1; then
      echo "$name: its twin does not compile with $compiler:"
      head -n 10 "$log"
      status=1
    fi
  done
done
[[ $status == 0 ]] || fail "see above"
passed "${#cases[@]} cases, two compilers"
