#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# The tests of the CUDA kernels notice mistakes: of the small ones that tests/cuda_emulation/mutations.txt lists, 90 in 100 at least make a test
# fail on the CPU. Takes half an hour on two cores and is run by hand.
#   check_cuda_mutations.sh [NUMBER|FILE…]   these mutations of the list, by number or by the header they change    default: all
#   OUTRIDER_CHECK_JOBS                      programs built and run at a time    default: one per processor
. "$(dirname "$0")/common.sh"

list=$root/tests/cuda_emulation/mutations.txt jobs=${OUTRIDER_CHECK_JOBS:-$jobs}
export ASAN_OPTIONS=detect_leaks=0
rm -rf "$work"
mkdir -p "$work"

# The blocks of the list, as mutations.txt describes them.
number=0 files=() tests=() olds=() news=()
while IFS= read -r line; do
  case $line in
    '#'* | '') ;;
    - | '- '*) olds[number]+=${olds[number]:+$'\n'}${line:2} ;;
    + | '+ '*) news[number]+=${news[number]:+$'\n'}${line:2} ;;
    *.cuh:*) ((++number)) && files[number]=${line%%:*} tests[number]=${line#*:} olds[number]='' news[number]='' ;;
    *) fail "$list: what is '$line'?" ;;
  esac
done <"$list"

build() { # build TEST DIRECTORY FLAGS…: the program DIRECTORY/TEST; headers in DIRECTORY/outrider come before ours
  local test=$1 directory=$2 sources=("$root"/tests/cuda_emulation/"$1"*_test.cpp "$work/main.o")
  shift 2
  case $test in
    backend | contract | decoding | faults | prompts | queue) sources+=("$root/tests/cuda_emulation/emulated_cuda.cpp" -DOUTRIDER_EMULATED_DEVICE) ;;
  esac
  nice "$gxx" -I"$directory" $(compile_flags) -I"$root/tests" -DOUTRIDER_SOURCE_DIR="\"$root\"" -O1 -ffp-contract=off -Wno-unknown-pragmas \
    "$@" "${sources[@]}" -o "$directory/$test" >"$directory/$test.log" 2>&1
}
run() { # run TEST DIRECTORY
  (cd "$root" && nice timeout 300 "$2/$1" --abort-after=1 || exit 1) >"$2/$1.log" 2>&1
}

try() { # try NUMBER: writes what became of the mutation to NUMBER/result, and prints it
  local file=${files[$1]} old=${olds[$1]} new=${news[$1]} directory=$work/$1 result=survived flags test text
  mkdir -p "$directory/outrider/backend/cuda"
  text=$(<"$root/include/outrider/backend/cuda/$file")
  printf '%s\n' "${text%%"$old"*}$new${text#*"$old"}" >"$directory/outrider/backend/cuda/$file"
  for flags in '' '-fsanitize=address,undefined -fno-sanitize-recover=all'; do  # what only touches wrong memory shows in the second round
    for test in ${tests[$1]}; do
      build "$test" "$directory" $flags || { result='does not compile' && break 2; }
      run "$test" "$directory" || { result="caught by $test: $(reason "$directory/$test.log")" && break 2; }
    done
  done
  find "$directory" -maxdepth 1 -type f -executable -delete
  echo "$result" >"$directory/result"
  printf '%3d %-24s %-60s %s\n' "$1" "$file" "$result" "$(head -n 1 <<<"$old" | sed 's/^ *//' | cut -c 1-80)"
}
reason() { # reason LOG: what a failed run says
  if grep -qE 'AddressSanitizer|runtime error:' "$1"; then echo sanitizers
  elif grep -q '^cuda_emulation: ' "$1"; then echo emulation
  elif grep -q '[0-9]: ERROR: ' "$1"; then echo values
  else echo 'crash or time'; fi
}

for argument; do
  [[ $argument =~ ^[0-9]+$ && $argument -ge 1 && $argument -le $number ]] || [[ " ${files[*]} " == *" $argument "* ]] ||
    fail "$argument is neither a mutation, 1 to $number, nor a header that one changes"
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "OUTRIDER_CHECK_JOBS is '$jobs', not a number from 1 on"
chosen=()
for ((i = 1; i <= number; ++i)); do
  (($# == 0)) || [[ " $* " == *" $i "* || " $* " == *" ${files[i]} "* ]] || continue
  text=$(<"$root/include/outrider/backend/cuda/${files[i]}")
  [[ $text == *"${olds[i]}"* && ${text#*"${olds[i]}"} != *"${olds[i]}"* ]] || fail "mutation $i: its text is not in ${files[i]} exactly once"
  chosen+=("$i")
done
((${#chosen[@]})) || fail "no such mutation"

background() { # background COMMAND…: when one of the jobs is free
  (($(jobs -rp | wc -l) < jobs)) || wait -n || true
  "$@" &
}
unchanged() { # unchanged TEST
  mkdir -p "$work/unchanged"
  build "$1" "$work/unchanged" && run "$1" "$work/unchanged" && touch "$work/unchanged/$1.passed"
}
$gxx -std=c++20 -O1 -c "$root/tests/main.cpp" -o "$work/main.o"
needed=$(for i in "${chosen[@]}"; do printf '%s\n' ${tests[i]}; done | sort -u)
for test in $needed; do background unchanged "$test"; done
wait
for test in $needed; do [[ -e $work/unchanged/$test.passed ]] || fail "$test fails without a mutation: $work/unchanged/$test.log"; done

for i in "${chosen[@]}"; do background try "$i"; done
wait
results=$(for i in "${chosen[@]}"; do sed "s/^caught.*: /caught: /" "$work/$i/result"; done)
sort <<<"$results" | uniq -c
! grep -q '^does not compile' <<<"$results" || fail "a mutation has to compile: the log is in $work"
caught=$(grep -c '^caught' <<<"$results" || true)
percent=$((100 * caught / ${#chosen[@]}))
((percent >= 90)) || fail "only $percent % are caught"
passed "$caught of ${#chosen[@]} caught, $percent %"
