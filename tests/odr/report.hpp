// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <string>

/// Each unit linked into the program adds one line.
void report(const std::string& line);
