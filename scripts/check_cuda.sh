#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# The CUDA backend without a device: nvcc takes all headers it may meet and compiles the backend for every architecture of the preset, no
# kernel spills registers or outgrows its ceiling of scripts/cuda_ceilings.txt, our programs and those of other projects link, and say in a
# sentence what is missing on a machine like this. The toolkit: nvcc from CUDACXX, PATH or /usr/local/cuda, else from PyPI.
. "$(dirname "$0")/common.sh"

export PATH=$PATH:/usr/local/cuda/bin
toolkit_from_pypi() { # PACKAGE…
  [[ -x $work/python/bin/pip ]] || python3 -m venv "$work/python"
  "$work/python/bin/pip" install --quiet "$@"
  packages=$(echo "$work"/python/lib/python3*/site-packages/nvidia/cu13)
}
nvcc=${CUDACXX:-$(command -v nvcc || true)}
if [[ -z $nvcc ]]; then
  # One release of the compiler, as the ceilings are those of its code. The packages have no names for the linker.
  toolkit_from_pypi 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
    'nvidia-cuda-cccl==13.0.*' 'nvidia-cublas==13.*'
  nvcc=$packages/bin/nvcc
  ln -sfn lib "$packages/lib64"
  for library in "$packages"/lib/*.so.*; do ln -sf "${library##*/}" "${library%%.so.*}.so"; done
  export LD_LIBRARY_PATH=$packages/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
[[ -x $(command -v "$nvcc") ]] || fail "$nvcc, from CUDACXX, is no program"
cuobjdump=$(command -v cuobjdump || true)
if [[ -z $cuobjdump ]]; then
  toolkit_from_pypi 'nvidia-cuda-cuobjdump==13.*'
  cuobjdump=$packages/bin/cuobjdump
fi
"$nvcc" --version | tail -n 2 | head -n 1

# Headers that a .cu of a user may include: nvcc takes them as they are.
public_headers | grep -E '/(core|layers|gemma4|decode)/|/backend/(concepts|cuda|cuda/.*|ops|reference|traits)\.hpp' | sed 's/.*/#include "&"/' >"$work/headers.cu"
"$nvcc" -std=c++20 -arch=sm_80 -Werror all-warnings -I"$root/include" -c "$work/headers.cu" -o "$work/headers.o" || fail "nvcc refuses a header"

# The kernels of the documents.
awk '/^```cuda/ { inside = 1; next } /^```/ { inside = 0 } inside' "$root/docs/using.md" >"$work/documents.cu"
[[ -s $work/documents.cu ]] || fail "docs/using.md has no kernel"
"$nvcc" -std=c++20 -arch=sm_80 -Werror all-warnings -I"$root/include" -c "$work/documents.cu" -o "$work/documents.o" || fail "nvcc refuses the kernel of docs/using.md"

# Host code is not optimised: nothing of it runs for long here.
build=$work/build log=$work/build.log
cmake --preset cuda -S "$root" -B "$build" -DCMAKE_CUDA_COMPILER="$nvcc" -DCMAKE_CUDA_FLAGS=-Xptxas=-v \
  -DCMAKE_COMPILE_WARNING_AS_ERROR=ON -DCMAKE_CXX_FLAGS_RELEASE=-O0 >"$work/configure.log" 2>&1 || { cat "$work/configure.log"; fail "cmake"; }
rm -f "$build/liboutrider_cuda_backend.a" "$build"/CMakeFiles/outrider_cuda_backend.dir/src/*.o  # ptxas reports what it compiles
cmake --build "$build" --target outrider_cuda_backend speculate device >"$log" 2>&1 || { grep -vE 'ptxas info|bytes stack frame' "$log" | tail -n 60; fail "the build failed"; }

# Two lines a kernel: its mangled name, then registers, stack and static shared memory.
"$cuobjdump" --dump-resource-usage "$build/liboutrider_cuda_backend.a" >"$work/resources.txt"
awk '
  $1 == "arch" { arch = $3 }
  $1 == "Function" { name = $2; sub(/^_ZN8outrider6device/, "", name); length_of = name + 0; sub(/^[0-9]+/, "", name); name = substr(name, 1, length_of) }
  $1 ~ /^REG:/ { for (i = 1; i <= NF; ++i) { split($i, part, ":"); value[part[1]] = part[2] }; print arch, value["REG"], value["SHARED"], name }
' "$work/resources.txt" >"$work/kernels.txt"
kernels=$(wc -l <"$work/kernels.txt")
[[ $kernels -gt 0 ]] || fail "cuobjdump lists no kernel"
[[ $(grep -c 'bytes spill' "$log") -ge $kernels ]] || fail "ptxas did not report on every kernel"
! grep -E 'bytes spill' "$log" | grep -v ' 0 bytes spill stores, 0 bytes spill loads' || fail "a kernel spills registers, see above"

# Kernels of one name and all their types count together: the most registers and shared memory of any.
awk '
  FILENAME == ARGV[1] { if ($0 !~ /^#/ && NF == 3) { registers[$1] = $2; shared[$1] = $3 }; next }
  { name = $4; ++count[name]; if ($2 > most[name]) most[name] = $2; if ($3 > memory[name]) memory[name] = $3 }
  END {
    for (name in count) {
      printf "%-24s %4d compiled, at most %3d registers, %6d bytes of shared memory\n", name, count[name], most[name], memory[name] | "sort"
      if (!(name in registers)) wrong = wrong name ": has no line in scripts/cuda_ceilings.txt\n"
      else if (most[name] > registers[name] + 0 || memory[name] > shared[name] + 0)
        wrong = wrong name ": above its ceiling of " registers[name] " registers and " shared[name] " bytes\n"
    }
    close("sort")
    for (name in registers) if (!(name in count)) wrong = wrong "scripts/cuda_ceilings.txt: there is no kernel " name "\n"
    if (wrong) { printf "%s", wrong; exit 1 }
  }' "$root/scripts/cuda_ceilings.txt" "$work/kernels.txt" || fail "see above"

# Programs of other projects: installed, by hand, embedded.
quietly() {
  "$@" >"$work/log" 2>&1 && return
  tail -n 30 "$work/log"
  fail "failed: $*"
}
consumer=$root/tests/consumer/cuda prefix=$work/prefix
rm -rf "$prefix" "$work"/{find_package,by_hand,add_subdirectory}
quietly cmake -S "$root" -B "$work/package" -G Ninja -DCMAKE_INSTALL_PREFIX="$prefix" \
  -DOUTRIDER_BUILD_EXAMPLES=OFF -DOUTRIDER_BUILD_TESTS=OFF -DOUTRIDER_BUILD_BENCH=OFF
quietly cmake --install "$work/package"
quietly cmake -S "$consumer" -B "$work/find_package" -G Ninja -DCMAKE_CUDA_COMPILER="$nvcc" -DCMAKE_CUDA_ARCHITECTURES=80 -DCMAKE_PREFIX_PATH="$prefix"
quietly cmake --build "$work/find_package"

mkdir "$work/by_hand"
flags=$(PKG_CONFIG_PATH=$prefix/share/pkgconfig pkg-config --cflags outrider)
echo '#include <outrider/cuda_impl.cuh>' >"$work/by_hand/kernels.cu"
quietly "$nvcc" -std=c++20 -arch=sm_80 -I"$prefix/include" -c "$work/by_hand/kernels.cu" -o "$work/by_hand/kernels.o"
quietly $gxx -std=c++20 $flags -c "$consumer/main.cpp" -o "$work/by_hand/main.o"
quietly "$nvcc" "$work/by_hand/main.o" "$work/by_hand/kernels.o" -lcublasLt -Xcompiler -fopenmp -o "$work/by_hand/on_device"

quietly cmake -S "$consumer" -B "$work/add_subdirectory" -G Ninja -DCMAKE_CUDA_COMPILER="$nvcc" -DOUTRIDER="$root"

# On a machine without a device programs say so and leave with 1; those of other projects leave as they wish, with 3.
says_no_device() { # STATUS PROGRAM ARGUMENT…
  local status=0
  "${@:2}" >"$work/out" 2>&1 || status=$?
  [[ $status == "$1" ]] && grep -q 'outrider: no CUDA device' "$work/out" || { cat "$work/out"; fail "${*:2}: exit status $status"; }
}
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi >/dev/null 2>&1; then
  says_no_device 1 "$build/examples/speculate" --devices
  says_no_device 1 "$build/examples/speculate" --backend cuda --prompt-ids 2
  says_no_device 3 "$work/find_package/on_device"
  says_no_device 3 "$work/by_hand/on_device"
fi
passed "$kernels kernels for $(cut -d' ' -f1 "$work/kernels.txt" | sort -u | tr '\n' ' ')"
