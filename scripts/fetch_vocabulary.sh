#!/usr/bin/env bash
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
# Fetches Gemma 4's released vocabulary with llama.cpp's own test vectors (three files, 16 MB) into a folder, for
# tests/text/released_vocabulary_test.cpp:
#   scripts/fetch_vocabulary.sh FOLDER && export OUTRIDER_GEMMA4_VOCAB=FOLDER/ggml-vocab-gemma-4.gguf
# They come out of the source archive of the Python package llama-cpp-python (70 MB), which pip downloads and nobody builds or installs.
set -euo pipefail
[[ $# == 1 ]] || { echo "usage: $0 FOLDER" >&2; exit 2; }
folder=$1 name=ggml-vocab-gemma-4.gguf
mkdir -p "$folder"
[[ ! -f $folder/$name || ! -f $folder/$name.inp || ! -f $folder/$name.out ]] || exit 0

archive=$(mktemp -d)
trap 'rm -rf "$archive"' EXIT
python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$archive" llama-cpp-python==0.3.36
tar -xzf "$archive"/llama_cpp_python-*.tar.gz -C "$folder" --strip-components=4 --wildcards "*/vendor/llama.cpp/models/$name*"
ls -l "$folder/$name" "$folder/$name.inp" "$folder/$name.out"
