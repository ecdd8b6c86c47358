#!/usr/bin/env python3
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
"""Writes a true-shape Gemma 4 GGUF file (target or assistant) with random weights, for speed measurements.

    pip install gguf numpy
    random_gguf.py SIZE OUT.gguf [--type q4_0|q8_0|bf16|f16] [--assistant] [--no-centroids] [--layers N] [--vocab N] [--seed N]

SIZE is e2b, e4b, 12b, 26b or 31b. --layers keeps only the first N layers (rounded up to whole attention patterns), to fit a small machine.
The file loads in llama.cpp and in any reader of the `gemma4` / `gemma4-assistant` architectures; its text is noise, its cost is the real one.
Weights have a standard deviation of about 1/sqrt(columns), so activations neither vanish nor explode.
"""
import argparse
import numpy as np
import gguf
from gguf import GGMLQuantizationType as Q

SIZES = {
    #       H     L   period N   Ks Kf  I      shared P    W     kv_eq experts
    "e2b": (1536, 35, 5, 8, 1, 1, 6144, 20, 256, 512, False, None),
    "e4b": (2560, 42, 6, 8, 2, 2, 10240, 18, 256, 512, False, None),
    "12b": (3840, 48, 6, 16, 8, 1, 15360, 0, 0, 1024, True, None),
    "26b": (2816, 30, 6, 16, 8, 2, 2112, 0, 0, 1024, True, (128, 8, 704)),
    "31b": (5376, 60, 6, 32, 16, 4, 21504, 0, 0, 1024, True, None),
}
#                 H     N   I     sparse head
ASSISTANTS = {"e2b": (256, 4, 2048, True), "e4b": (256, 4, 2048, True), "12b": (1024, 16, 8192, False),
              "26b": (1024, 16, 8192, False), "31b": (1024, 32, 8192, False)}

p = argparse.ArgumentParser()
p.add_argument("size", choices=SIZES)
p.add_argument("out")
p.add_argument("--type", default="q4_0", choices=["q4_0", "q8_0", "bf16", "f16"])
p.add_argument("--assistant", action="store_true")
p.add_argument("--no-centroids", action="store_true", help="assistant without its sparse head (llama.cpp rejects files that have one)")
p.add_argument("--layers", type=int)
p.add_argument("--vocab", type=int, default=262144)
p.add_argument("--seed", type=int, default=1)
a = p.parse_args()
rng = np.random.default_rng(a.seed)
H, L, period, N, Ks, Kf, I, shared, P, W, k_eq_v, moe = SIZES[a.size]
T = H
sparse = False
if a.layers:
    # keep the donor layers in front of the shared tail in the same proportion
    new = -(-a.layers // period) * period
    shared = 0 if not shared else min(shared, new - period)
    L = new
if a.assistant:
    H, N, I, sparse = ASSISTANTS[a.size]
    L, period, shared, P, moe = 4, 4, 4, 0, None
arch = "gemma4-assistant" if a.assistant else "gemma4"
w = gguf.GGUFWriter(a.out, arch, use_temp_file=False)
qtype = {"q4_0": Q.Q4_0, "q8_0": Q.Q8_0, "bf16": Q.BF16, "f16": Q.F16}[a.type]
sliding = [(i + 1) % period != 0 for i in range(L)]


def matrix(name, rows, cols, kind=None, scale=1.0, lead=()):
    kind = qtype if kind is None else kind
    n = int(np.prod(lead, dtype=np.int64)) * rows if lead else rows
    std = np.float32(scale / np.sqrt(cols))
    if kind == Q.F32:
        data = rng.standard_normal((n, cols), dtype=np.float32) * std
        w.add_tensor(name, data.reshape(*lead, rows, cols))
        return
    if kind in (Q.BF16, Q.F16):
        out = np.empty((n, cols), np.uint16)
        for r in range(0, n, 4096):
            x = rng.standard_normal((min(4096, n - r), cols), dtype=np.float32) * std
            out[r:r + 4096] = (x.view(np.uint32) >> 16).astype(np.uint16) if kind == Q.BF16 else x.astype(np.float16).view(np.uint16)
        w.add_tensor(name, out.view(np.uint8).reshape(*lead, rows, cols * 2), raw_shape=(*lead, rows, cols * 2), raw_dtype=kind)
        return
    block = 18 if kind == Q.Q4_0 else 34
    # uniform integers: variance 21.25 for the 16 nibbles around 8, 127^2/3 for int8
    d = std / (np.sqrt(21.25) if kind == Q.Q4_0 else 127 / np.sqrt(3.0))
    out = rng.integers(0, 256, (n, cols // 32, block), dtype=np.uint8)
    out[:, :, :2] = np.frombuffer(np.float16(d).tobytes(), np.uint8)
    w.add_tensor(name, out.reshape(*lead, rows, cols // 32 * block), raw_shape=(*lead, rows, cols // 32 * block), raw_dtype=kind)


def vector(name, n, mean=1.0):
    w.add_tensor(name, (mean + 0.05 * rng.standard_normal(n)).astype(np.float32))


w.add_name(f"random {a.size}{' assistant' if a.assistant else ''}")
w.add_context_length(131072)
w.add_block_count(L)
w.add_embedding_length(H)
w.add_feed_forward_length([I * 2 if (a.size == "e2b" and not a.assistant and i >= L - shared) else I for i in range(L)])
w.add_head_count(N)
w.add_head_count_kv([Ks if s else Kf for s in sliding])
w.add_key_length(512); w.add_value_length(512)
w.add_uint32(f"{arch}.attention.key_length_swa", 256); w.add_uint32(f"{arch}.attention.value_length_swa", 256)
w.add_uint32(f"{arch}.attention.sliding_window", W)
w.add_array(f"{arch}.attention.sliding_window_pattern", sliding)
w.add_uint32(f"{arch}.attention.shared_kv_layers", shared)
w.add_layer_norm_rms_eps(1e-6)
w.add_rope_freq_base(1e6); w.add_float32(f"{arch}.rope.freq_base_swa", 1e4)
w.add_rope_dimension_count(512); w.add_uint32(f"{arch}.rope.dimension_count_swa", 256)
w.add_uint32(f"{arch}.embedding_length_per_layer_input", P)
if a.assistant:
    w.add_uint32(f"{arch}.embedding_length_out", T)
    w.add_uint32(f"{arch}.nextn_predict_layers", L)
else:
    w.add_float32(f"{arch}.final_logit_softcapping", 30.0)
if moe:
    w.add_expert_count(moe[0]); w.add_expert_used_count(moe[1]); w.add_uint32(f"{arch}.expert_feed_forward_length", moe[2])
V = a.vocab
tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"] + [f"<0x{b:02X}>" for b in range(256)]
tokens += [chr(c) for c in range(33, 127)] + ["\u2581", "th"]
tokens += [f"w{i}" for i in range(V - len(tokens))]
w.add_tokenizer_model("gemma4")
w.add_token_list(tokens)
w.add_token_scores([-1000.0] * V)
w.add_token_types([3, 3, 3, 2, 3] + [6] * 256 + [1] * (V - 261))
w.add_token_merges(["t h"])
w.add_bos_token_id(2); w.add_eos_token_id(1); w.add_unk_token_id(3); w.add_pad_token_id(0)
w.add_add_bos_token(True); w.add_add_space_prefix(False)

matrix("token_embd.weight", V, H)
vector("output_norm.weight", H)
if any(not s for s in sliding):
    w.add_tensor("rope_freqs.weight", np.array([1.0] * 64 + [1e30] * 192, np.float32))
if P:
    matrix("per_layer_token_embd.weight", V, P * L)
    matrix("per_layer_model_proj.weight", P * L, H, Q.BF16)
    vector("per_layer_proj_norm.weight", P)
if a.assistant:
    matrix("nextn.pre_projection.weight", H, 2 * T)
    matrix("nextn.post_projection.weight", T, H)
    if sparse and not a.no_centroids:
        matrix("masked_embd_centroids.weight", 2048 if V == 262144 else V // 128, H)
        w.add_tensor("masked_embd_ordering", rng.permutation(V).astype(np.int32))
for i in range(L):
    hd, K = (256, Ks) if sliding[i] else (512, Kf)
    ff = I * 2 if (a.size == "e2b" and not a.assistant and i >= L - shared) else I
    b = f"blk.{i}."
    for n in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        vector(b + n + ".weight", H)
    matrix(b + "attn_q.weight", hd * N, H)
    vector(b + "attn_q_norm.weight", hd, 0.3)
    if i < L - shared:
        matrix(b + "attn_k.weight", hd * K, H)
        vector(b + "attn_k_norm.weight", hd, 0.3)
        if sliding[i] or not k_eq_v:
            matrix(b + "attn_v.weight", hd * K, H)
    matrix(b + "attn_output.weight", H, hd * N)
    matrix(b + "ffn_gate.weight", ff, H); matrix(b + "ffn_up.weight", ff, H); matrix(b + "ffn_down.weight", H, ff)
    w.add_tensor(b + "layer_output_scale.weight", np.array([0.9], np.float32))
    if P:
        matrix(b + "inp_gate.weight", P, H, Q.F32); matrix(b + "proj.weight", H, P, Q.F32)
        vector(b + "post_norm.weight", H)
    if moe:
        E, top, fe = moe
        matrix(b + "ffn_gate_inp.weight", E, H, Q.F32); vector(b + "ffn_gate_inp.scale", H)
        for n in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            vector(b + n + ".weight", H)
        matrix(b + "ffn_gate_up_exps.weight", 2 * fe, H, lead=(E,)); matrix(b + "ffn_down_exps.weight", H, fe, lead=(E,))
        vector(b + "ffn_down_exps.scale", E)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(progress=False); w.close()
print(a.out, L, "layers")
