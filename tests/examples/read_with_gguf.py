# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
"""Compares GGUF files by what the gguf package reads from them.

    read_with_gguf.py FILE EXPECTED [KEY-OR-TENSOR-PREFIX…]

Keys, their types and values, names, shapes, element types and bytes of tensors must be equal, and what begins with one of the prefixes may be
in FILE alone. Without the package: exit code 77.

    read_with_gguf.py FILE CHECKPOINT.safetensors --values

The values of FILE, F32 or BF16 matrices and F32 vectors, must be those of the checkpoint, compared as sorted lists of tensors' bytes.
"""
import json
import sys

try:
    import gguf
    import numpy as np
except ImportError as missing:
    print(missing)
    sys.exit(77)


def facts(path):
    reader = gguf.GGUFReader(path)
    keys = {f.name: ([t.name for t in f.types], f.contents()) for f in reader.fields.values() if not f.name.startswith("GGUF.")}
    tensors = {t.name: ([int(n) for n in t.shape], t.tensor_type.name, t.data.tobytes()) for t in reader.tensors}
    return keys, tensors


def as_f32(dtype, raw):
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def checkpoint(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in ("F32", "BF16", "F16"):
                continue
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            yield list(reversed(entry["shape"])), as_f32(entry["dtype"], file.read(end - begin)).tobytes()


if sys.argv[3:] == ["--values"]:
    ours = [(shape, as_f32(kind, raw).tobytes()) for name, (shape, kind, raw) in facts(sys.argv[1])[1].items()
            if name != "rope_freqs.weight" and kind != "I32"]
    assert sorted(ours) == sorted(checkpoint(sys.argv[2])), "tensors differ"
else:
    for what, ours, theirs in zip(("key", "tensor"), facts(sys.argv[1]), facts(sys.argv[2])):
        ours = {name: fact for name, fact in ours.items() if not any(p in name for p in sys.argv[3:])}
        assert list(ours) == list(theirs), f"{what}s: {sorted(set(ours) ^ set(theirs))} or their order"
        for name, fact in theirs.items():
            assert ours[name] == fact, f"{what} {name}"
print("equal")
