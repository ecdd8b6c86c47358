// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// THE CONTRACT. What a backend must be able to do, in prose, one paragraph per op; `reference.hpp` says the same in arithmetic.
//
// Rules for every op
//   * static, void, noexcept, one signature per name; no allocation, no lock held across calls, no output. Views are passed by value.
//   * Activations are float. m, the number of rows, is a run-time value: decoding (m = 1), verifying (m = drafts + 1) and prompts are one op.
//   * The bits of a row of `out` depend on that row's inputs alone, never on m, on the row's place, on what the other rows hold, or on the
//     number of threads. Speculation is exact because of this line. (matmul_prompt alone may depend on m.)
//   * Empty extents (m = 0, n = 0, no keys) are legal and do nothing beyond what the formula gives.
//   * Rows are `stride` apart; what lies between cols and stride is never read into a result and never written.
//   * `out` does not overlap an input unless the paragraph says it may equal one ("in place").
//   * Sizes are preconditions, decided in layers/: an op may check them with OUTRIDER_ASSERT, nothing more.
//   * Index arrays (ids, positions, experts) hold valid indexes; the API boundary has checked them.
//   * Views say where their memory lies. Of what comes as a pointer, positions and banned lie in host memory, and an op has read them when it
//     returns; everything else, ids and argmax's out included, lies in the backend's space.
//   * An op may return before its work is done, if ops that follow see it done and whoever reads the result on the host waits: space_copy does,
//     and so does most_likely() in layers/head.hpp.
#pragma once

namespace outrider {

/// Products with a weight stored as W: one specialisation per backend and storage type. A format of blocks stands for the floats that
/// core/dequantize.hpp makes of it, and k is a multiple of its block length.
///
/// matmul(ctx, out [m, n], x [m, k], w [n, k])                        out = x · wᵀ
///     The order of summation depends on k alone. Each weight is read once for all rows as far as m permits.
///
/// matmul_prompt(ctx, out [m, n], x [m, k], w [n, k])                 out = x · wᵀ
///     The same product for rows of a prompt. It may round differently from matmul, and depending on m, which is why it is a second
///     entry and never chosen by m; it may simply call matmul.
///
/// expert_matmul(ctx, out [m·s, n], x [m, k], w [e·n, k], experts [m·s])     out(r·s + j) = x(r) · w[experts[r·s + j]]ᵀ
///     Mixture of experts: w stacks e matrices [n, k]; every row of x goes through s of them.
///
/// gathered_matmul(ctx, out [m, c], x [m, k], w [n, k], ids [m, c])   out(r, j) = x(r) · w(ids(r, j))
///     Products with chosen rows of w only: the sparse head.
///
/// gather_rows(ctx, out [m, k], w [n, k], ids [m], factor)            out(r) = w(ids[r]) · factor
///     Embedding lookup. Only the rows named are touched: w may be larger than memory.
///
/// For weights in groups, Weight = grouped<W>, x comes as int8 blocks [m, k / 32] (pointwise_ops' quantize) and there are three ops: matmul,
/// expert_matmul, where n is a multiple of 16, and gather_rows, which gives the floats that W stands for. A product is, over the parts of 32 columns in ascending order,
///     acc ← fma(float(Σ q·x.q), scale · x.d, acc)         the sum is an exact integer; parts with two scales: the first 16 columns, then the others
///     acc ← fma(minimum, x.sum, acc)                      in formats with minimums
/// from acc = 0, with the integers q, the scales and the minimum that part_of() in core/grouped.hpp names: one product and one FMA, each
/// rounded to float. Every backend gives these bits, so outputs are the same on all machines.
template <class Backend, class Weight>
struct linear_ops;

/// Row-wise arithmetic on activations.
///
/// rms_norm(ctx, out [m, n], x [m, n], weight [n] or null, eps)       out = x / √(mean(x²) + eps) · weight            in place
///     The weight is used as stored (Gemma 4: no "1 + weight"); null means weightless.
///
/// rope_table(ctx, cos [m, h], sin [m, h], positions [m], frequencies [h])   cos(r, i) = cos(float(positions[r] · frequencies[i])), sin alike
///     The angle is rounded to float before the function is taken, as the reference implementation does.
///
/// rope(ctx, x [m·heads, 2h], cos [m, h], sin [m, h])                                                                 in place
///     Half-split pairs over the whole head: y(i) = x(i)·cos(i) − x(i+h)·sin(i), y(i+h) = x(i+h)·cos(i) + x(i)·sin(i).
///     heads = x.rows / cos.rows consecutive rows of x share a row of the table. A frequency of 0 passes coordinates through exactly.
///
/// gelu_mul(ctx, out [m, n], gate [m, n], up [m, n])                  out = gelu_tanh(gate) · up                      in place of either
///     gelu_tanh(z) = ½·z·(1 + tanh(√(2/π)·(z + 0.044715·z³)))
///
/// add(ctx, out [m, n], x [m, n], y [m, n])                           out = x + y                                     in place of either
/// scale(ctx, out [m, n], x [m, n], factor)                           out = x · factor                                in place
/// copy(ctx, out [m, n], x [m, n])                                    out = x
/// softcap(ctx, out [m, n], x [m, n], cap)                            out = cap · tanh(x / cap)                       in place
///
/// quantize(ctx, out [m, n / 32], x [m, n])                           rows as int8 blocks, the bits that core/int8.hpp defines; n a multiple of 32
///
/// top_k(ctx, ids [m, k], x [m, n])                                   columns of the k largest values, falling; ties: lowest column first
///     k <= n. A NaN counts as the least.
///
/// argmax(ctx, out [m], x [m, n], ids [m, n] or null data)            out[r] = id of the largest value
///     The id of column c is ids(r, c), or c itself if ids.data is null. Ties go to the lowest id. A NaN is never chosen while a number is
///     there; an all-NaN row gives the id of column 0.
///
/// mask(ctx, x [m, n], ids [m, n] or null data, banned [count], count)       x = −∞ where the column's id is banned       in place
///
/// gather_ids(ctx, out [m, s·w], table [c, w], rows [m, s])           out(r, j·w + i) = table(rows(r, j), i)
///
/// scatter_logits(ctx, out [m, n], x [m, c], ids [m, c])              out(r) = min(x(r)) − 1 everywhere, then out(r, ids(r, j)) = x(r, j)
///     The dense form of a sparse head's result. c >= 1.
///
/// route_experts(ctx, experts [m, s], weights [m, s], logits [m, e], scales [e])
///     p = softmax(logits) over all e experts; the s largest by falling p (ties: lowest expert first); weights = p / Σ p of the chosen,
///     then · scales[expert], so that the weights no longer sum to one. `logits` is overwritten.
///
/// weighted_sum(ctx, out [m, n], x [m·s, n], weights [m, s])          out(r) = Σ_j weights(r, j) · x(r·s + j), j ascending
///
/// Optional, for backends where an op costs something to begin: several ops in one, with the bits of these one after the other. Who inherits a
/// backend and changes one of them leaves out the ops that stand for it, or changes them as well. Blocks [m, n / 32] with null data are not
/// made.
///
/// norm_quantize(ctx, out [m, n], blocks, x [m, n], weight [n] or null, eps)       out = rms_norm(x), blocks = quantize(out)       in place
/// norm_add(ctx, h [m, n], blocks, x [m, n], weight [n] or null, eps, factor)      h = scale(h + rms_norm(x), factor), blocks = quantize(h)
/// norm_add_norm(ctx, h [m, n], out [m, n], blocks, x [m, n], weight [n] or null, eps, next_weight [n] or null, next_eps)
///     h = h + rms_norm(x), out = rms_norm(h) with the next weight and eps, blocks = quantize(out); out may be x
/// norm_rope(ctx, x [m·heads, 2h], weight [2h] or null, eps, cos [m, h], sin [m, h])       x = rope(rms_norm(x))      in place
/// gelu_mul_quantize(ctx, out [m, n / 32], gate [m, n], up [m, n])                         out = quantize(gelu_mul(gate, up))
///
/// Optional, for backends whose memory the host cannot read: tokens are drawn where the logits lie.
///
/// draw(ctx, out [m], x [m, n], ids [m, n] or null data, position, rule)     out[r] = the token that decode/sampler.hpp draws from row r for
///     position + r of the text: argmax of score + noise(rule.seed, rule.sequence).gumbel(position + r, id) over what top-k, top-p and min-p
///     leave. Ids as in argmax, each at most once a row. Noise and scores are exactly the host's; logarithms and exponentials in double may
///     differ in their last bit, and sums of top-p from 1e-13 on, so what ties within that may fall otherwise. A row without a number above −∞
///     gives the id of the column that argmax without ids names. `out` may also lie in memory that both sides reach.
template <class Backend>
struct pointwise_ops;

/// The cache of one layer, with keys and values stored as Kv: one specialisation per backend and storage type of kv_types.
///
/// append(ctx, cache, k [m, heads·d], v [m, heads·d], first)          row r becomes position first + r, rounded to Kv
///     A block format gets the blocks that quantize() of core/quantize.hpp makes of each head's d numbers, d a multiple of the block length;
///     a block that cannot stand for its numbers (one is not finite, or too large) has a scale of NaN, so that it is not mistaken for one.
///     attend reads what core/dequantize.hpp says.
///
/// attend(ctx, out [m, q_heads·d], q [m, q_heads·d], cache, window)   per row r and query head h:
///     out = Σ_j softmax_j(q · key(j)) · value(j) over the positions j that `window` lets row r see; no scaling (Gemma 4: 1.0), no cap.
///     Query head h reads KV head h · heads / q_heads. A row without keys gives zeros. How a row's sums are cut follows from the
///     positions it sees alone, so the result depends neither on where a pass began nor on the other rows.
///
/// Optional, as above:
///
/// norm_append(ctx, cache, k [m, heads·d], v [m, heads·d], weight [d] or null, eps, cos [m, d / 2], sin [m, d / 2], first)
///     append of rope(rms_norm(k)), head by head, and of rms_norm(v) without weight. k and v stay as they are, and v may be k.
template <class Backend, class Kv>
struct attention_ops;

}  // namespace outrider
