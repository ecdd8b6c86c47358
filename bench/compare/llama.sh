#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#
# Measures outrider against llama.cpp: the same random files of true shapes, the same threads, the same machine, in turn. Prints the project's
# goals with what was measured. Everything that is fetched, built or generated stays in one folder outside the tree.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: llama.sh [options]
  --json [FILE]       the figures of every round as JSON instead of the table; with FILE, written there besides the table
  --models LIST       of SIZE-TYPE, default e2b-q4_0,e2b-q8_0; SIZE: e2b, e4b, 12b, 26b, 31b (all but e2b cut to a few layers),
                      TYPE: q4_0, q8_0, bf16, f16. A file takes 3 to 10 GB of disk and, while it is made, of memory
  --rounds N          default 3; a round takes 2 to 5 minutes a model
  --threads N         default: all processors
  --long-context N    positions of the long context, default 8192; 0 leaves it out
  --mac-rate TYPE=R   GMAC/s of all threads as bench/ops says, for the roofline of passes; may be repeated
  --work DIR          where everything goes, default ${XDG_CACHE_HOME:-~/.cache}/outrider-compare
  --llama-build DIR   a finished build of llama.cpp with llama-bench and llama-speculative-simple
  --decode PROGRAM    a finished bench/decode
TEXT
}
die() {
  echo "llama.sh: $*" >&2
  exit 2
}
skip() {
  echo "llama.sh: skipped: $*"
  exit 0
}
say() { echo "$(date +%H:%M:%S) $*" >&2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
work=${XDG_CACHE_HOME:-$HOME/.cache}/outrider-compare
models=e2b-q4_0,e2b-q8_0 rounds=3 threads=$(nproc) long=8192 llama="" decode="" json=no json_file="" rates=()
while (($#)); do
  option=$1 value=${2-}
  case $option in
    --json)
      json=yes
      if [[ -n $value && $value != --* ]]; then json_file=$value; shift; fi
      shift
      continue
      ;;
    --help | -h) usage; exit 0 ;;
    --models | --rounds | --threads | --long-context | --mac-rate | --work | --llama-build | --decode) ;;
    *) usage >&2; die "unknown option $option" ;;
  esac
  [[ $# -ge 2 ]] || die "$option needs a value"
  case $option in
    --models) models=$value ;;
    --rounds) rounds=$value ;;
    --threads) threads=$value ;;
    --long-context) long=$value ;;
    --mac-rate) rates+=(--mac-rate "$value") ;;
    --work) work=$value ;;
    --llama-build) llama=$value ;;
    --decode) decode=$value ;;
  esac
  shift 2
done
for number in "$rounds" "$threads"; do [[ $number =~ ^[1-9][0-9]*$ ]] || die "$number is not a number of rounds or threads"; done
[[ $long =~ ^[0-9]+$ ]] || die "$long is not a number of positions"
IFS=, read -ra wanted <<<"$models"
for model in "${wanted[@]}"; do
  [[ $model =~ ^(e2b|e4b|12b|26b|31b)-(q4_0|q8_0|bf16|f16)$ ]] || die "$model is not SIZE-TYPE, such as e2b-q4_0"
done

command -v python3 >/dev/null || skip "there is no python3"
mkdir -p "$work"
work=$(cd "$work" && pwd)

# logged FILE COMMAND…: quiet unless it fails.
logged() {
  local log=$1
  shift
  "$@" >"$log" 2>&1 || { tail -n 20 "$log" >&2; return 1; }
}

# llama.cpp from the source archive of a Python package: a registry that is reachable where GitHub may not be.
build_llama() {
  local source line after=0
  llama=$work/llama/build
  [[ -x $llama/bin/llama-bench && -x $llama/bin/llama-speculative-simple ]] && return
  command -v cmake >/dev/null || skip "building llama.cpp needs cmake"
  python3 -m pip --version >/dev/null 2>&1 || skip "getting llama.cpp needs pip, which is not available"
  mkdir -p "$work/llama"
  if ! compgen -G "$work/llama/llama_cpp_python-*.tar.gz" >/dev/null; then
    say "downloading the source archive of llama-cpp-python"
    logged "$work/llama/pip.log" python3 -m pip download --no-deps --no-binary :all: --dest "$work/llama" llama-cpp-python ||
      skip "pip could not download the source archive of llama-cpp-python"
  fi
  compgen -G "$work/llama/llama_cpp_python-*/" >/dev/null || tar -xzf "$work"/llama/llama_cpp_python-*.tar.gz -C "$work/llama"
  source=$(compgen -G "$work/llama/llama_cpp_python-*/vendor/llama.cpp" | head -n 1)
  say "building llama.cpp, 10 to 15 minutes on two cores; log: $work/llama/build.log"
  logged "$work/llama/cmake.log" cmake -S "$source" -B "$llama" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF ||
    die "llama.cpp cannot be configured"
  cmake --build "$llama" --target llama-bench llama-speculative-simple -j "$(nproc)" 2>&1 | tee "$work/llama/build.log" |
    while read -r line; do
      [[ $line =~ ^\[\ *([0-9]+)% ]] && ((BASH_REMATCH[1] >= after)) || continue
      say "llama.cpp: ${BASH_REMATCH[1]} %"
      after=$((BASH_REMATCH[1] + 10))
    done ||
    { tail -n 20 "$work/llama/build.log" >&2; die "llama.cpp does not build"; }
}
[[ -n $llama ]] || build_llama
[[ -x $llama/bin/llama-bench && -x $llama/bin/llama-speculative-simple ]] || die "$llama/bin lacks llama-bench or llama-speculative-simple"

if [[ -z $decode ]]; then
  say "building bench/decode"
  command -v cmake >/dev/null || skip "building outrider needs cmake"
  logged "$work/outrider.log" cmake -S "$root" -B "$work/outrider" -DCMAKE_BUILD_TYPE=Release -DOUTRIDER_BUILD_BENCH=ON \
    -DOUTRIDER_BUILD_TESTS=OFF -DOUTRIDER_BUILD_EXAMPLES=OFF || die "outrider cannot be configured"
  logged "$work/outrider.log" cmake --build "$work/outrider" --target decode || die "bench/decode does not build"
  decode=$work/outrider/bench/decode
fi
[[ -x $decode ]] || die "$decode is no program"

python=python3
find_python() {
  for python in python3 "$work/venv/bin/python"; do
    "$python" -c 'import gguf, numpy' 2>/dev/null && return
  done
  say "installing the Python packages gguf and numpy into $work/venv"
  logged "$work/venv.log" python3 -m venv "$work/venv" || skip "random files need the Python packages gguf and numpy, and there is no venv"
  logged "$work/venv.log" "$work/venv/bin/python" -m pip install gguf numpy ||
    skip "random files need the Python packages gguf and numpy, which pip could not install"
  python=$work/venv/bin/python
}

# make FILE OPTION…: a random file, unless it is there.
make() {
  local file=$work/models/$1
  shift
  [[ -f $file ]] && return
  [[ $python == python3 ]] && find_python
  say "making $(basename "$file")"
  logged "$work/models.log" "$python" "$here/random_gguf.py" "$1" "$file.part" "${@:2}" || die "$(basename "$file") cannot be made"
  mv "$file.part" "$file"
}
mkdir -p "$work/models"
arguments=()
for model in "${wanted[@]}"; do
  size=${model%-*} type=${model#*-} layers=() name=$model
  case $size in
    e4b) layers=(--layers 12) name=e4b-12-layers-$type ;;
    12b | 26b | 31b) layers=(--layers 6) name=$size-6-layers-$type ;;
  esac
  make "$name.gguf" "$size" --type "$type" "${layers[@]}"
  make "$size-assistant.gguf" "$size" --type q8_0 --assistant
  theirs=$size-assistant.gguf
  if [[ $size == e?b ]]; then  # the other sizes have no sparse head
    theirs=$size-assistant-dense.gguf
    make "$theirs" "$size" --type q8_0 --assistant --no-centroids
  fi
  arguments+=(--model "${name%-"$type"}" "$type" "$work/models/$name.gguf" "$work/models/$size-assistant.gguf" "$work/models/$theirs")
done

result=${json_file:-$work/result.json}
python3 "$here/measure.py" --decode "$decode" --llama "$llama/bin" --threads "$threads" --rounds "$rounds" --long-context "$long" --json "$result" "${arguments[@]}"
if [[ $json == yes && -z $json_file ]]; then
  cat "$result"
else
  python3 "$here/goals.py" "$result" "${rates[@]}"
fi
