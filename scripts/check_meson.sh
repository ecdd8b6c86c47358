#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Meson knows, builds and installs what CMake does: the same tests by name, the same files in the prefix (CMake adds its own package files).
. "$(dirname "$0")/common.sh"

rm -rf "$work"
mkdir -p "$work"
cmake -S "$root" -B "$work/cmake" -G Ninja -DCMAKE_INSTALL_PREFIX="$work/cmake-prefix" >"$work/cmake.log"
cmake --install "$work/cmake" >>"$work/cmake.log"
meson setup "$work/meson" "$root" --prefix="$work/meson-prefix" -Doptimization=0 >"$work/meson.log"
meson install -C "$work/meson" --no-rebuild >>"$work/meson.log"

ctest --test-dir "$work/cmake" -N | sed -n 's/^ *Test *#[0-9]*: //p' | sort >"$work/cmake.tests"
meson test -C "$work/meson" --list --no-rebuild 2>/dev/null | sed 's/.* \/ //' | sort >"$work/meson.tests"
diff "$work/cmake.tests" "$work/meson.tests" || fail "CMake (<) and Meson (>) know different tests"

(cd "$work/cmake-prefix" && find . -type f | grep -v '/cmake/' | sort) >"$work/cmake.files"
(cd "$work/meson-prefix" && find . -type f | sort) >"$work/meson.files"
diff "$work/cmake.files" "$work/meson.files" || fail "CMake (<) and Meson (>) install different files"
diff "$work/cmake-prefix/share/pkgconfig/outrider.pc" "$work/meson-prefix/share/pkgconfig/outrider.pc" || fail "the two outrider.pc differ"

if [[ ${1:-} == --lists-only ]]; then
  passed "$(wc -l <"$work/meson.tests") tests by the same names, the same installed files"
  exit
fi
# Which sources make a program, and with which flags, is decided per kind (plain, native, dispatch): some of each kind are built and run.
# The sources themselves are the same that CMake compiled.
programs=(core core_native io text layers decode_dispatch contract.highway_eigen_prompts examples.inspect examples.custom_backend)
meson test -C "$work/meson" --print-errorlogs "${programs[@]}"
passed "$(wc -l <"$work/meson.tests") tests by the same names, the same installed files, ${#programs[@]} programs"
