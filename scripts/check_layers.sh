#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Headers include only what scripts/layers.txt lets them, and every kind of line is in its room.
. "$(dirname "$0")/common.sh"

cd "$root/include/outrider"
status=0
find . -type f | sed 's|^\./||' | sort >"$work/files"

# Prints one line per include that the table does not allow, per header without a place, and per place without a header.
xargs grep -nE '^ *# *include [<"]outrider/' /dev/null <"$work/files" |
  sed -E 's|^([^:]+):([0-9]+):.*outrider/([^">]+)[">].*|\1 \2 \3|' >"$work/includes"
awk -v includes="$work/includes" -v files="$work/files" '
  /^#/ || NF == 0 { next }
  {
    for (i = 3; i <= NF; ++i) {
      if ($i ~ /^\+/) { sees[$2, substr($i, 2)] = 1; continue }
      file = ($2 == "." ? "" : $2 "/") $i (($i ~ /\.(h|inl|cuh)$/) ? "" : ".hpp")
      level[file] = $1; folder[file] = $2; place[file] = ++count
    }
  }
  END {
    while ((getline file < files) > 0) {
      there[file] = 1
      if (!(file in level)) print file ": has no place in scripts/layers.txt"
    }
    for (file in level) if (!(file in there)) print "scripts/layers.txt: there is no " file
    while ((getline line < includes) > 0) {
      split(line, part, " ")
      from = part[1]; to = part[3]
      if (!(to in there)) { print from ":" part[2] ": includes " to ", which does not exist"; continue }
      allowed = level[to] < level[from] || (level[to] == level[from] && sees[folder[from], folder[to]]) ||
                (folder[to] == folder[from] && place[to] < place[from])
      # foreach_target.h takes the table in several times, by way of HWY_TARGET_INCLUDE.
      if (!allowed) print from ":" part[2] ": may not include " to
    }
  }' "$root/scripts/layers.txt" >"$work/findings"
[[ ! -s $work/findings ]] || { sort "$work/findings"; status=1; }

# room PATTERN ALLOWED WHAT: the pattern appears, outside comments, only in files that match ALLOWED.
room() {
  local file
  while read -r file; do
    [[ $file =~ $2 ]] && continue
    if sed -E 's|//.*||' "$file" | grep -nE "$1" | sed "s|^|$file:|; s|$|    <- $3|"; then status=1; fi
  done <"$work/files"
}
never='^$'
room '# *pragma +omp' '^backend/parallel\.hpp$' 'OpenMP belongs in backend/parallel.hpp'
room '\b(_mm[0-9]*_|v(ld|st)[0-9]q?_|vdotq?_|vmmlaq_)|<(immintrin|arm_neon)\.h>' '^backend/highway/[a-z0-9_]+-inl\.h$' 'intrinsics belong in backend/highway/*-inl.h'
room '<hwy/' '^backend/(highway|cpu|eigen)' 'Highway belongs in backend/'
room '<(cuda|cublas)[A-Za-z0-9_]*\.h>' '^backend/cuda/(device|gemm)\.cuh$' 'headers of CUDA are included by backend/cuda/device.cuh'
room '\basm\b|<<<[^<]*>>>' '^backend/(cuda/device\.cuh|highway/[a-z0-9_]+-inl\.h|parallel\.hpp)$' 'assembly, and launches that only nvcc understands, belong in backend/cuda/device.cuh'
room '\b(cuda|cublas)[A-Z][A-Za-z0-9]*\(' '^backend/cuda/(check|memory|launch_graph|queue|gemm)\.cuh$' 'the CUDA library is called by memory, launch_graph, queue and gemm'
room '<Eigen/' '^backend/' 'Eigen belongs in backend/'
room '\b(std::)?([io]?fstream|fopen|mmap|::open)\b *[({<]?' '^io/' 'a file is opened in io/'
room '\b(std::(cout|cerr|clog|exit|abort|terminate)\b|(std::)?(printf|fprintf|puts|fputs|perror|exit|abort)\()' "$never" 'a library neither prints nor exits'
room '\b(std::)?(rand|random_device|mt19937)\b' '^core/rng\.hpp$' 'random numbers are drawn in core/rng.hpp'

[[ $status == 0 ]] || fail "see above"
passed "$(wc -l <"$work/files") files"
