#!/usr/bin/env python3
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
"""Writes the seeds of the fuzz targets, corpus/<target>/, as small as their formats allow. Needs nothing but Python.

    python3 tests/fuzz/make_corpus.py
"""
import json
import struct
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
PACK = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def write(target, name, contents):
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def one(kind, value):
    return text(value) if kind == STRING else struct.pack("<" + PACK[kind], value)


def gguf(pairs, tensors=(), version=3, alignment=32):
    """pairs: (key, type, value), a list being an array of that type; tensors: (name, type number, extents innermost first, bytes)."""
    pad = lambda n: -n % alignment
    out = b"GGUF" + struct.pack("<Iqq", version, len(tensors), len(pairs))
    for key, kind, value in pairs:
        out += text(key)
        if isinstance(value, list):
            out += struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(one(kind, v) for v in value)
        else:
            out += struct.pack("<I", kind) + one(kind, value)
    offset = 0
    for name, number, extents, data in tensors:
        out += text(name) + struct.pack("<I", len(extents)) + struct.pack(f"<{len(extents)}q", *extents)
        out += struct.pack("<IQ", number, offset)
        offset += len(data) + pad(len(data))
    if tensors:
        out += bytes(pad(len(out)))
    return out + b"".join(data + bytes(pad(len(data))) for *_, data in tensors)


def f32(name, *extents, value=0.5):
    count = 1
    for extent in extents:
        count *= extent
    return (name, 0, extents, struct.pack("<f", value) * count)


# ------------------------------------------------------------------------------------------------ containers

SCALARS = [("u8", U8, 200), ("i8", I8, -1), ("u16", U16, 1), ("i16", I16, -1), ("u32", U32, 1), ("i32", I32, -1), ("f32", F32, 0.5),
           ("bool", BOOL, True), ("string", STRING, "text"), ("u64", U64, 1), ("i64", I64, -1), ("f64", F64, 0.5)]
write("gguf", "empty", gguf([]))
write("gguf", "scalars", gguf(SCALARS))
write("gguf", "arrays", gguf([(key, kind, [value, value]) for key, kind, value in SCALARS], version=2))
write("gguf", "tensors", gguf([("general.alignment", U32, 8)], [f32("a", 2, 1), ("b", 8, (32, 2), bytes(68)), ("none", 1, (0, 3), b""),
                                                              ("scalar", 24, (), b"1")], alignment=8))
write("gguf", "split", gguf([("split.no", U16, 0), ("split.count", U16, 2), ("split.tensors.count", I32, 1)], [f32("t", 1)]))


def safetensors(header, data=b""):
    raw = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(raw)) + raw + data


write("safetensors", "empty", safetensors({}))
write("safetensors", "tensors", safetensors({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
                                             "b": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]},
                                             "none": {"dtype": "I64", "shape": [0, 4], "data_offsets": [14, 14]},
                                             "scalar": {"dtype": "U8", "shape": [], "data_offsets": [14, 15]}}, bytes(15)))

# ------------------------------------------------------------------------------------------------ config.json
# More seeds are tests/golden/bad_configs and the golden models, see scripts/check_fuzz.sh.

ROPE = {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
TEXT = {"model_type": "gemma4_text", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "global_head_dim": 8, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0, "rope_parameters": ROPE}
write("config", "text", json.dumps(TEXT))
write("config", "wrapped", json.dumps({"model_type": "gemma4", "text_config": TEXT, "tie_word_embeddings": True}))
write("config", "experts", json.dumps({**TEXT, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8,
                                       "attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}))
write("config", "per_layer", json.dumps({**TEXT, "per_layer_config": {"01": {"head_dim": 8, "num_key_value_heads": 2}},
                                         "hidden_size_per_layer_input": 2, "num_kv_shared_layers": 0, "eos_token_id": [1, 2]}))
write("config", "assistant", json.dumps({"model_type": "gemma4_assistant", "backbone_hidden_size": 8, "use_ordered_embeddings": True,
                                         "num_centroids": 8, "centroid_intermediate_top_k": 2,
                                         "text_config": {**TEXT, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 0}}))

# ------------------------------------------------------------------------------------------------ tokenizers

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]
PIECES = ["\u2581", "a", "b", "\n", "ab", "\u2581a", "\u2581ab", "\n\n", "é"]
MERGES = [("a", "b"), ("\u2581", "a"), ("\u2581", "ab"), ("\n", "\n")]
TOKENS = SPECIAL + BYTES + PIECES


def tokenizer_json(merges, added):
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": TOKENS.index(t), "content": t, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": normalized, "special": special} for t, special, normalized in added],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                                                     {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": {t: i for i, t in enumerate(TOKENS)},
                  "merges": merges}}, ensure_ascii=False, separators=(",", ":"))


MARKERS = [(t, True, False) for t in SPECIAL]
write("tokenizer_json", "pairs", tokenizer_json(MERGES, MARKERS))
write("tokenizer_json", "strings", tokenizer_json([" ".join(m) for m in MERGES], MARKERS + [("ab", False, True), ("\n\n", False, False)]))

TYPES = [3] * len(SPECIAL) + [6] * 256 + [1] * len(PIECES)
TOKENIZER = [("tokenizer.ggml.model", STRING, "gemma4"), ("tokenizer.ggml.tokens", STRING, TOKENS),
             ("tokenizer.ggml.scores", F32, [-1000.0] * len(TOKENS)), ("tokenizer.ggml.token_type", I32, TYPES),
             ("tokenizer.ggml.merges", STRING, [" ".join(m) for m in MERGES]), ("tokenizer.ggml.bos_token_id", U32, 2),
             ("tokenizer.ggml.eos_token_id", U32, 1), ("tokenizer.ggml.unknown_token_id", U32, 3)]
write("tokenizer_gguf", "tokenizer", gguf(TOKENIZER))
write("tokenizer_gguf", "user_defined", gguf([(k, t, TYPES[:-2] + [4, 4] if k.endswith("token_type") else v) for k, t, v in TOKENIZER]))

write("encode", "kjv", "In the beginning God created the heaven and the earth.\n")
write("encode", "markers", "<bos><|turn>user\nHello<turn|>\n<0x0A><unk>")
write("encode", "bytes", b" \xe2\x96\x81 \xe2\x96 \xf0\x9f\x98\x80 \xff\x00\xc0\x80\t  \r\n\n\n")

# ------------------------------------------------------------------------------------------------ models in GGUF files


def bf16(name, *extents):
    return (name, 30, extents, f32(name, *extents)[3][2::4] * 2)  # any values do


def q8_0(name, *extents):
    if extents[0] % 32:
        return f32(name, *extents)
    return (name, 8, extents, (b"\x00\x3c" + bytes(range(32))) * (len(f32(name, *extents)[3]) // 128))


def model(architecture, pairs=(), tensors=(), assistant=False, matrix=f32, width=4, heads=(2, 4), ple=0, experts=False, alignment=32):
    """A model of one layer per entry of `heads`, which are head sizes; 2 heads of queries, 1 of keys; 4 tokens; the last layer is full."""
    at, layers = architecture + ".", len(heads)
    keys = [("general.architecture", STRING, architecture), ("general.alignment", U32, alignment), (at + "block_count", U32, layers),
            (at + "context_length", U32, 64), (at + "embedding_length", U32, width), (at + "feed_forward_length", U32, width),
            (at + "attention.head_count", U32, 2), (at + "attention.head_count_kv", U32, 1), (at + "rope.freq_base", F32, 1e6),
            (at + "rope.freq_base_swa", F32, 1e4), (at + "attention.layer_norm_rms_epsilon", F32, 1e-6),
            (at + "attention.key_length", U32, heads[-1]), (at + "attention.key_length_swa", U32, heads[0]),
            (at + "attention.sliding_window", U32, 4), (at + "attention.sliding_window_pattern", BOOL, [True] * (layers - 1) + [False]),
            (at + "embedding_length_per_layer_input", U32, ple), (at + "attention.shared_kv_layers", U32, layers if assistant else 0),
            ("tokenizer.ggml.tokens", STRING, ["a", "b", "c", "d"]), ("tokenizer.ggml.eos_token_id", U32, 1)]
    all_tensors = [f32("rope_freqs.weight", heads[-1] // 2, value=1.0), matrix("token_embd.weight", width, 4), f32("output_norm.weight", width)]
    if ple:
        all_tensors += [matrix("per_layer_token_embd.weight", layers * ple, 4), matrix("per_layer_model_proj.weight", width, layers * ple),
                        f32("per_layer_proj_norm.weight", ple)]
    if experts:
        keys += [(at + "expert_count", U32, 2), (at + "expert_used_count", U32, 1), (at + "expert_feed_forward_length", U32, 2)]
    for layer, head in enumerate(heads):
        blk = f"blk.{layer}."
        norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] + (["post_norm"] if ple else [])
        norms += ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] if experts else []
        all_tensors += [f32(f"{blk}{norm}.weight", width) for norm in norms]
        all_tensors += [matrix(blk + "attn_q.weight", width, 2 * head), matrix(blk + "attn_output.weight", 2 * head, width),
                        f32(blk + "attn_q_norm.weight", head), f32(blk + "layer_output_scale.weight", 1)]
        all_tensors += [matrix(f"{blk}ffn_{part}.weight", width, width) for part in ("gate", "up", "down")]
        if not assistant:
            all_tensors += [matrix(blk + "attn_k.weight", width, head), f32(blk + "attn_k_norm.weight", head)]
            all_tensors += [matrix(blk + "attn_v.weight", width, head)] if layer == 0 else []  # the others read keys as values
        if ple:
            all_tensors += [matrix(blk + "inp_gate.weight", width, ple), matrix(blk + "proj.weight", ple, width)]
        if experts:
            all_tensors += [f32(blk + "ffn_gate_inp.weight", width, 2), f32(blk + "ffn_gate_inp.scale", width),
                            f32(blk + "ffn_down_exps.scale", 2), matrix(blk + "ffn_gate_up_exps.weight", width, 4, 2),
                            matrix(blk + "ffn_down_exps.weight", 2, width, 2)]
    return gguf(keys + [(at + key, kind, value) for key, kind, value in pairs], all_tensors + list(tensors), alignment=alignment)


def projections(before, after, width=4):
    return [f32(before + ".weight", 2 * width, width), f32(after + ".weight", width, width)]


write("gguf_model", "target", model("gemma4", [("final_logit_softcapping", F32, 30.0)]))
write("gguf_model", "unaligned", model("gemma4", matrix=bf16, alignment=1))
write("gguf_model", "per_layer", model("gemma4", ple=2, alignment=8))
write("gguf_model", "experts", model("gemma4", experts=True, alignment=8))
write("gguf_model", "quantised", model("gemma4", matrix=q8_0, width=32, heads=(2,), alignment=8))
NEXTN = projections("nextn.pre_projection", "nextn.post_projection")
WIDTH = [("embedding_length_out", U32, 4)]
write("gguf_model", "assistant", model("gemma4-assistant", WIDTH, NEXTN, True))
write("gguf_model", "centroids", model("gemma4-assistant", WIDTH, NEXTN + [
    f32("masked_embd_centroids.weight", 4, 2), ("masked_embd_ordering", 26, (4,), struct.pack("<4i", 2, 0, 3, 1))], True))
write("gguf_model", "scheme_b", model("gemma4-assistant", [("backbone_hidden_size", U32, 4), ("assistant.num_centroids", U32, 2),
                                                           ("assistant.use_ordered_embeddings", BOOL, True)],
                                      projections("assist_pre_proj", "assist_post_proj") + [
    f32("assist_embed_centroids.weight", 4, 2), ("assist_token_ordering.weight", 0, (4,), struct.pack("<4f", 2, 0, 3, 1))], True))
write("gguf_model", "scheme_d", model("gemma4_mtp", [("backbone_embedding_length", U32, 4)], projections("mtp_pre_proj", "mtp_post_proj"), True))

# ------------------------------------------------------------------------------------------------ conversations

CALL = {"role": "assistant", "reasoning": "hm", "tool_calls": [{"id": "1", "type": "function", "function": {
    "name": "weather", "arguments": {"city": "Ulm", "days": [1, -2, 0.5, None, True]}}}]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "where", "enum": ["Ulm", "Rom"]},
        "days": {"type": "array", "nullable": True, "items": {"type": ["integer", "null"], "properties": {}, "required": []}},
        "more": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}},
    "response": {"description": "what it is", "type": "object"}}}
write("chat", "plain", json.dumps({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <turn|>"},
                                                {"role": "assistant", "content": "<|channel>x<channel|>Hello."},
                                                {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image"}]}]}))
write("chat", "tools", json.dumps({"tools": [TOOL], "messages": [
    {"role": "user", "content": "Weather?"}, CALL, {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "model", "content": "Rain.", "tool_responses": [{"name": "weather", "response": {"a": 1e-7, "b": 1e22}}]}]}))
write("chat", "template", "<|turn> <turn|> format_tool_response_block reasoning_content '<|channel>thought\\n<channel|>'")
