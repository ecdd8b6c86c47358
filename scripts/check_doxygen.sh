#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# The API reference builds without a warning: comments name what there is, and links lead somewhere.
. "$(dirname "$0")/common.sh"

rm -rf "$work"
mkdir -p "$work"
cd "$root"
{ cat docs/Doxyfile && echo "OUTPUT_DIRECTORY = $work"; } | doxygen - || fail "the reference has warnings, see above"
[[ -e $work/html/index.html ]] || fail "there is no $work/html/index.html"
passed "the reference is $work/html/index.html"
