#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
set -euo pipefail
export LC_ALL=C.UTF-8

usage() {
  cat <<'END'
Everything that needs an NVIDIA device, in less than 8 minutes: builds, runs the tests of label gpu, measures pairs of the shapes of E2B and
12B with random weights, and decodes with the tiny pair under compute-sanitizer.

  tests/gpu/run.sh [--quick] [FOLDER] [-- CMAKE_ARGUMENT…]

  --quick          leave out the measurements of 12B
  FOLDER           where results go: results.json, and a log for every step; build/gpu-results if not given
  CMAKE_ARGUMENT   for the configuration, such as -DCMAKE_PREFIX_PATH=… where libraries lie elsewhere

Needs a driver, the CUDA Toolkit 12.4 or later, CMake 3.25, Ninja, and outrider's libraries: of the system, or a network to fetch them.
Leaves with 1 if something failed. A goal of speed that is missed is reported, and no failure.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
limit=470 # seconds for everything, and 10 until what hangs is gone
results=
quick=
cmake_arguments=()
while (($#)); do
  case $1 in
    --quick) quick=yes ;;
    --help | -h)
      usage
      exit
      ;;
    --)
      shift
      cmake_arguments=("$@")
      break
      ;;
    -*)
      echo "run.sh: $1: there is no such option; --help lists them" >&2
      exit 2
      ;;
    *)
      [[ -z $results ]] || { echo "run.sh: $1: results go to one folder, and that is $results" >&2; exit 2; }
      results=$1
      ;;
  esac
  shift
done

fail() {
  echo "run.sh: $*" >&2
  exit 1
}

names=() outcomes=() times=()
remember() { # NAME OUTCOME SECONDS
  names+=("$1") outcomes+=("$2") times+=("$3")
  echo "== $1: $2, $3 s"
}
# Runs a command for at most SECONDS, less where the time for everything is nearly over; what it prints goes to NAME.log as well.
step() { # NAME SECONDS COMMAND…
  local name=$1 most=$2 begin=$SECONDS status=0
  shift 2
  ((most <= limit - SECONDS)) || most=$((limit - SECONDS))
  if ((most <= 0)); then
    remember "$name" "FAILED: no time was left" 0
    return 1
  fi
  echo "== $name: $*"
  timeout --kill-after=10 "$most" "$@" 2>&1 | tee "$results/$name.log" || status=$?
  case $status in
    0) remember "$name" passed $((SECONDS - begin)) ;;
    124 | 137) remember "$name" "FAILED: not done after $most s" $((SECONDS - begin)) ;;
    *) remember "$name" "FAILED: exit status $status" $((SECONDS - begin)) ;;
  esac
  return "$status"
}
not_run() { # NAME WHY
  remember "$1" "not run: $2" 0
}
# The summary, results.json, and the exit status.
finish() {
  local i status=0 separator=
  printf '\n== summary of %s s\n' "$SECONDS"
  for i in "${!names[@]}"; do
    printf '%-22s %4s s  %s\n' "${names[i]}" "${times[i]}" "${outcomes[i]}"
    [[ ${outcomes[i]} != FAILED* ]] || status=1
  done
  grep -H 'goal ' "$results"/device-*.log 2>/dev/null | sed -e "s|^$results/||" -e 's/\.log:|/:/' -e 's/ |$//' || true
  {
    printf '{"seconds": %s, "device": "%s", "steps": [' "$SECONDS" "$device"
    for i in "${!names[@]}"; do
      printf '%s\n  {"name": "%s", "outcome": "%s", "seconds": %s}' "$separator" "${names[i]}" "${outcomes[i]}" "${times[i]}"
      separator=,
    done
    printf '], "measured": ['
    separator=
    for file in "$results"/device-*.json; do
      [[ -s $file ]] || continue
      printf '%s\n' "$separator"
      cat "$file"
      separator=,
    done
    printf ']}\n'
  } >"$results/results.json"
  echo "== figures and outcomes: $results/results.json"
  exit "$status"
}

# What is there.
command -v nvidia-smi >/dev/null || fail "no NVIDIA driver: there is no nvidia-smi"
device=$(nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version --format=csv,noheader 2>&1 | head -n 1) ||
  fail "no NVIDIA device: nvidia-smi says: $device"
[[ $device =~ ,\ ([0-9]+)\.[0-9]+,\ ([0-9]+)\ MiB ]] || fail "no NVIDIA device: nvidia-smi says: $device"
capability=${BASH_REMATCH[1]} memory=${BASH_REMATCH[2]}
((capability >= 8)) || fail "compute capability 8.0 or later is needed; this device is: $device"
nvcc=${CUDACXX:-$(PATH=$PATH:/usr/local/cuda/bin command -v nvcc || true)}
[[ -n $nvcc ]] || fail "no CUDA Toolkit: nvcc is neither in PATH nor in /usr/local/cuda/bin, and CUDACXX is not set"
version=$("$nvcc" --version) || fail "$nvcc --version fails"
export CUDACXX=$nvcc
for tool in cmake ctest ninja c++; do
  command -v "$tool" >/dev/null || fail "$tool is missing"
done
# Earlier results go only now that there will be others.
mkdir -p "${results:=$root/build/gpu-results}"
results=$(cd "$results" && pwd)
rm -f "$results"/{results,device-*}.json "$results"/{libraries,configure,build,tests,memcheck-*,racecheck-*,device-*}.log "$results/tests.xml"
cd "$root"
echo "== $device"
echo "== $(grep release <<<"$version"), $nvcc"

# The libraries, by the way the build finds them. Only where one is missing does the build need a network.
declare -A package_of=([hwy]=libhwy-dev [Eigen3]=libeigen3-dev [nlohmann_json]=nlohmann-json3-dev [CLI11]=libcli11-dev [doctest]=doctest-dev)
mkdir -p "$results/libraries"
cat >"$results/libraries/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(libraries LANGUAGES CXX)
foreach(library hwy Eigen3 nlohmann_json CLI11 doctest)
  string(TOUPPER "FETCHCONTENT_SOURCE_DIR_${library}" source)
  find_package(${library} QUIET)
  if(NOT ${library}_FOUND AND NOT ${source})
    message("missing library: ${library}")
  endif()
endforeach()
END
rm -rf "$results/libraries/build"
begin=$SECONDS
cmake -S "$results/libraries" -B "$results/libraries/build" -G Ninja -Wno-dev --no-warn-unused-cli "${cmake_arguments[@]}" \
  >"$results/libraries.log" 2>&1 || { cat "$results/libraries.log"; fail "CMake cannot configure an empty project, see above"; }
missing=
while read -r library; do missing+=" ${package_of[$library]}"; done < <(sed -n 's/^missing library: //p' "$results/libraries.log")
if [[ -n $missing ]]; then
  timeout 15 git ls-remote --exit-code https://github.com/google/highway.git HEAD >/dev/null 2>&1 ||
    fail "libraries are missing and there is no network to fetch them: apt-get install$missing, or say where they are: -- -DCMAKE_PREFIX_PATH=…"
  echo "== to be fetched, since the system does not have them:$missing"
fi
remember libraries passed $((SECONDS - begin))

step configure 120 cmake --preset cuda -DCMAKE_CUDA_ARCHITECTURES=native "${cmake_arguments[@]}" || finish
step build 300 cmake --build --preset cuda --parallel "$(nproc)" || finish

step tests 180 ctest --test-dir build/cuda -L gpu --no-tests=error --output-on-failure --output-junit "$results/tests.xml" || true

# MiB of device memory that a pair takes: weights, keys and values, and what is read to know the device's rate (4 GiB at most, given back).
declare -A needed=([e2b-q4_0]=5000 [e2b-bf16]=12000 [12b-q4_0]=9000 [12b-bf16]=27000)
for pair in e2b-q4_0 e2b-bf16 12b-q4_0 12b-bf16; do
  if [[ -n $quick && $pair == 12b* ]]; then
    not_run "device-$pair" "--quick"
  elif ((memory < needed[$pair])); then
    not_run "device-$pair" "it needs ${needed[$pair]} MiB of device memory, there are $memory"
  else
    step "device-$pair" 60 build/cuda/bench/device --shape "${pair%-*}" --weights "${pair#*-}" --json "$results/device-$pair.json" || true
  fi
done

sanitizer=$(PATH=$PATH:$(dirname "$nvcc"):/usr/local/cuda/bin command -v compute-sanitizer || true)
pair=examples/data/tiny-kjv
declare -A texts=(
  [bf16]="--target $pair/target --assistant $pair/assistant"
  [q4_0]="--target $pair/gguf/target-q4_0.gguf --assistant $pair/gguf/assistant-q8_0.gguf --kv bf16"
  [q4_k_m]="--target $pair/gguf/target-q4_k_m.gguf --assistant $pair/gguf/assistant-q8_0.gguf --kv q8_0 --temperature 1 --top-k 40 --top-p 0.95"
)
for tool in memcheck racecheck; do
  for text in bf16 q4_0 q4_k_m; do
    if [[ -z $sanitizer ]]; then
      not_run "$tool-$text" "compute-sanitizer is not installed"
      continue
    fi
    # shellcheck disable=SC2086
    step "$tool-$text" 60 "$sanitizer" --tool "$tool" --error-exitcode 1 \
      build/cuda/examples/speculate --backend cuda ${texts[$text]} --draft 3 --max-new-tokens 8 --quiet || true
  done
done
finish
