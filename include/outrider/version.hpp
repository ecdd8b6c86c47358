// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once

#define OUTRIDER_VERSION_MAJOR 0
#define OUTRIDER_VERSION_MINOR 1
#define OUTRIDER_VERSION_PATCH 0
#define OUTRIDER_VERSION "0.1.0"
