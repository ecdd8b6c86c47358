// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// How fast the device reads its memory: the yardstick of bench/device.cpp. Carried out in device_read.cu.
#pragma once
#include <cstddef>

namespace bench {

/// Writes bits that look random to device memory, so that reading them moves what reading weights does. bytes: a multiple of 16.
/// Errors: std::runtime_error.
void fill_on_device(void* memory, std::size_t bytes);

/// Milliseconds of one read of device memory by all multiprocessors, `blocks` blocks of threads on each. bytes: a multiple of 16.
/// Errors: std::runtime_error.
double read_on_device(const void* memory, std::size_t bytes, int blocks);

}  // namespace bench
