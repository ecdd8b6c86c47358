// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A drafter on the CPU reads the keys of a target on a device, without a mirror between the two.
// expect: no propose\(target, request, out\)
#include "outrider/backend/cuda.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/mirrored_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/session.hpp"

using target_type = outrider::gemma4::session<outrider::cuda>;
using on_cpu = outrider::assistant_drafter<outrider::reference>;
#if defined(OUTRIDER_TWIN)
using drafter_type = outrider::mirrored_drafter<outrider::reference, on_cpu, target_type>;
#else
using drafter_type = on_cpu;
#endif

void write(target_type& t, drafter_type& d) { outrider::speculative_decoder decoder(t, d); }
