// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Device code in a file that nvcc does not compile.
// expect: outrider: device code is for nvcc: include this file from a \.cu
#if defined(OUTRIDER_TWIN)
#include "outrider/backend/cuda.hpp"
#else
#include "outrider/cuda_impl.cuh"
#endif
