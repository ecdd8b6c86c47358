#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Every C++ file looks as clang-format leaves it.
. "$(dirname "$0")/common.sh"

cd "$root"
mapfile -t files < <(find include src tests examples bench -name '*.[hci]pp' -o -name '*.inl' -o -name '*.cuh' -o -name '*.cu' | sort)
clang-format --dry-run -Werror --style=file "${files[@]}"
passed "${#files[@]} files"
