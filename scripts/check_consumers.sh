#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Programs of other projects use outrider in every supported way: installed (find_package, pkg-config with a bare compiler, Meson) and
# embedded (add_subdirectory, Meson subproject). Each is built twice, header-only and with the dispatch unit, and run.
. "$(dirname "$0")/common.sh"

rm -rf "$work"
mkdir -p "$work"
prefix=$work/prefix
model=$root/examples/data/tiny-kjv/target
consumer=$root/tests/consumer

run() { # run WAY DIRECTORY: both programs
  echo "-- $1"
  "$2/plain" "$model"
  "$2/dispatch" "$model"
}
quietly() {
  "$@" >"$work/log" 2>&1 && return
  tail -n 30 "$work/log"
  fail "failed: $*"
}

quietly cmake -S "$root" -B "$work/outrider" -G Ninja -DCMAKE_INSTALL_PREFIX="$prefix" \
  -DOUTRIDER_BUILD_EXAMPLES=OFF -DOUTRIDER_BUILD_TESTS=OFF -DOUTRIDER_BUILD_BENCH=OFF
quietly cmake --install "$work/outrider"
export PKG_CONFIG_PATH=$prefix/share/pkgconfig

# Neither package remembers where it was installed to.
mv "$prefix" "$work/moved"
flags=$(PKG_CONFIG_PATH=$work/moved/share/pkgconfig pkg-config --cflags outrider)
[[ $flags == *"-I"*"/moved/"* ]] || fail "outrider.pc remembers where it was installed to: $flags"
quietly cmake -S "$consumer/find_package" -B "$work/find_package" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_PREFIX_PATH="$work/moved"
quietly cmake --build "$work/find_package"
run find_package "$work/find_package"
mv "$work/moved" "$prefix"

quietly cmake -S "$consumer/add_subdirectory" -B "$work/add_subdirectory" -G Ninja -DOUTRIDER="$root"
quietly cmake --build "$work/add_subdirectory"
run add_subdirectory "$work/add_subdirectory"

mkdir "$work/pkg-config"
flags=$(pkg-config --cflags --libs outrider)
dispatch_source=$(pkg-config --variable=dispatch_source outrider)
quietly $gxx -std=c++20 "$consumer/main.cpp" -o "$work/pkg-config/plain" $flags
quietly $gxx -std=c++20 -DOUTRIDER_HIGHWAY_DISPATCH "$consumer/main.cpp" "$dispatch_source" -o "$work/pkg-config/dispatch" $flags
run pkg-config "$work/pkg-config"

for way in dependency subproject; do
  mkdir "$work/meson-$way"
  cp "$consumer/meson/meson.build" "$consumer/main.cpp" "$work/meson-$way"
  fallback=nofallback
  if [[ $way == subproject ]]; then
    mkdir "$work/meson-$way/subprojects"
    ln -s "$root" "$work/meson-$way/subprojects/outrider"
    fallback=forcefallback
  fi
  quietly meson setup "$work/meson-$way" "$work/meson-$way/build" --wrap-mode="$fallback"
  quietly meson compile -C "$work/meson-$way/build"
  run "meson $way" "$work/meson-$way/build"
done
passed "five ways"
