#!/usr/bin/env python3
"""Makes quantised.safetensors: random blocks of every quantised weight type, and what the gguf package says they mean.

    pip install gguf==0.19 numpy
    python make_quantised.py

For every type NAME two tensors: NAME.blocks, U8 [blocks, bytes of a block], and NAME.weights, F32 [blocks, weights of a block].
All bytes are random but for the half-precision scales, which are finite numbers of every size, sign and subnormals included.
"""

import json
import pathlib
import struct

import gguf
import numpy as np

# type: byte offsets of its half-precision scales
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
}


def finite_halves(random, count):
    bits = random.integers(0, 1 << 16, count, dtype=np.uint16)
    bits[(bits & 0x7C00) == 0x7C00] ^= 0x4000  # infinities and NaN become ordinary numbers
    return bits.view(np.uint8).reshape(count, 2)


def main():
    random = np.random.default_rng(4)
    tensors = {}
    for name, offsets in HALVES.items():
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        count = 6 if elements == 256 else 24
        blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
        for offset in offsets:
            blocks[:, offset : offset + 2] = finite_halves(random, count)
        if name == "MXFP4":
            blocks[:4, 0] = [0, 1, 2, 252]  # two subnormal powers, the smallest normal one, the largest that cannot overflow
            blocks[4:, 0] %= 253
        tensors[f"{name}.blocks"] = ("U8", blocks)
        tensors[f"{name}.weights"] = ("F32", gguf.quants.dequantize(blocks, kind))

    header, data = {}, b""
    for name, (dtype, array) in sorted(tensors.items(), key=lambda item: item[1][0]):  # F32 first, so that all are aligned
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target = pathlib.Path(__file__).with_name("quantised.safetensors")
    target.write_bytes(struct.pack("<Q", len(text)) + text + data)


main()
