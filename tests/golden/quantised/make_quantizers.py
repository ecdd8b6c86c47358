# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
"""Writes quantizers.safetensors: floats, and the blocks that the gguf package makes of them.

    pip install gguf==0.19.0 numpy && python make_quantizers.py

Tensors: "x" F32 [rows, 256]; "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4" U8 [rows, bytes of 256 elements]. The package has no quantisers for
the K types. Rows: normal, heavy-tailed, of few distinct values (many ties), with one outlier, tiny, nearly constant, zero, of powers of two.
"""
import json
import pathlib

import gguf
import numpy as np

rng = np.random.default_rng(4)
rows = [rng.standard_normal(256) * 0.02 for _ in range(6)]
rows += [rng.standard_t(2, 256) * 0.1 for _ in range(6)]
rows += [rng.integers(-9, 10, 256) / 8 for _ in range(4)]
rows += [np.where(np.arange(256) % 32 == 5, 3.0, rng.standard_normal(256) * 1e-3) for _ in range(2)]
rows += [rng.standard_normal(256) * 1e-6, 1 + rng.standard_normal(256) * 1e-4, np.zeros(256), 2.0 ** rng.integers(-6, 4, 256)]
# What weights look like: bfloat16 values.
rows += [((rng.standard_normal(256) * 0.05).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32) for _ in range(6)]
x = np.stack(rows).astype(np.float32)

tensors = {"x": ("F32", x)}
for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]:
    tensors[name.lower()] = ("U8", gguf.quants.quantize(x, gguf.GGMLQuantizationType[name]))

header, data = {}, b""
for name, (dtype, array) in tensors.items():
    raw = array.tobytes()
    header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
    data += raw
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
(pathlib.Path(__file__).parent / "quantizers.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
