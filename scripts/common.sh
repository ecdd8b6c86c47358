# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Sourced by the check scripts. Each is run by itself or as the CMake target of the same name.
#   OUTRIDER_CHECK_DIR   where a check works              default: build/checks
#   GXX, CLANGXX         the compilers                    default: g++, clang++
set -euo pipefail
export LC_ALL=C.UTF-8

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
check=$(basename "$0" .sh)
work=${OUTRIDER_CHECK_DIR:-$root/build/checks}/$check
gxx=${GXX:-g++}
clangxx=${CLANGXX:-clang++}
jobs=$(nproc)
mkdir -p "$work"

warnings=(-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Werror)

# Flags for a compiler that is called by hand: C++20, our headers, the dependencies as system headers.
compile_flags() {
  echo "-std=c++20 -fopenmp -I$root/include"
  pkg-config --cflags libhwy eigen3 nlohmann_json | sed 's/-I/-isystem /g'
}

# The flags a statically compiled SIMD backend needs on this machine.
native_flags() {
  case $(uname -m) in
    x86_64 | i?86) echo -march=native ;;
    *) echo -mcpu=native ;;
  esac
}

# Headers a user may include: everything but what only Highway's or nvcc's own machinery includes.
public_headers() {
  (cd "$root/include" && find outrider -name '*.hpp' | sort)
}

fail() {
  echo "$check: $*" >&2
  exit 1
}

passed() {
  echo "$check: passed, $*"
}
