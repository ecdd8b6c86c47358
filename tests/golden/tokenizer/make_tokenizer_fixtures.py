#!/usr/bin/env python3
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
"""Writes ids.jsonl: what the tokenizers library (pip install tokenizers) makes of 2400 texts with a tokenizer.json, without <bos>.

    make_tokenizer_fixtures.py [TOKENIZER_JSON [OUTPUT]]        the tiny pair's, into the folder of this script, unless said otherwise

A line is [text, ids] or, where parsing markers makes a difference, [text, ids without, ids with].
"""
import json
import pathlib
import random
import sys

import tokenizers

here = pathlib.Path(__file__).resolve().parent
tiny = here.parents[2] / "examples/data/tiny-kjv/target/tokenizer.json"

words = """In the beginning God created heaven and earth the LORD spake unto Moses saying Speak children of Israel house David begat sons daughters
years four hundred thirty-five lived after he Selah; Behold, thou art fair, my love; naïve café über Ägypten façade Ærø straße""".split()
code = [
    "def f(x):\n    if x > 0:\n        return x ** 2\n    return -x\n", "for (int i = 0; i < n; ++i) {\n\ta[i] += b[i] * c[i];  // sum\n}\n", "#include <vector>\n\nint main() { return 0; }\n",
    "SELECT name, COUNT(*) FROM t WHERE a <> 'b' GROUP BY 1;\n", '{"key": [1, 2.5e-3, null, true], "λ": "\\u00e9"}\n', "<html>\n  <body class=\"x\">\n    <p>text &amp; more</p>\n  </body>\n</html>\n",
    "let v: Vec<&'a str> = s.split(',').collect();\n", "#!/bin/sh\nset -eu\nfor f in *.txt; do echo \"$f\"; done\n", "\\frac{\\alpha}{2^{n+1}} \\leq \\sum_{i=0}^{\\infty} x_i\n", "a_b_c __init__ --flag=1 ~/.config/x\n",
    "https://example.org/a?b=c&d=%20e#f", "C:\\path\\to\\file.txt", "| a | b |\n|---|---|\n| 1 | 2 |\n", "- [x] **bold** _it_ `code`\n\n```cpp\nx;\n```\n", "if(x){y=1;}else{z=2;}", "λ x. x ↦ ∀ε>0 ∃δ>0\n",
]  # fmt: skip
scripts = [  # first and last code point of what people write
    (0x20, 0x7E), (0xA1, 0xFF), (0x100, 0x17F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x530, 0x58F), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1000, 0x109F),
    (0x1200, 0x137F), (0x1780, 0x17FF), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x20A0, 0x20BF), (0x2190, 0x21FF), (0x2200, 0x22FF), (0x2500, 0x257F), (0x2580, 0x259F), (0x2600, 0x26FF),
    (0x3000, 0x303F), (0x3040, 0x309F), (0x30A0, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xFB50, 0xFDFF), (0xFE00, 0xFE0F), (0xFF01, 0xFFEF), (0xFFF9, 0xFFFD),
    (0x10330, 0x1034F), (0x12000, 0x1200F), (0x1D400, 0x1D4FF), (0x1F1E6, 0x1F1FF), (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F), (0x1F900, 0x1F9FF), (0x20000, 0x2A6DF), (0xE0000, 0xE007F), (0xF0000, 0xF00FF),
    (0x10FFF0, 0x10FFFF),
]  # fmt: skip
phrases = [
    "日本語のテスト、東京都庁へ行きました。", "中文测试：你好，世界！我想在apple工作1314151天～", "한국어 문장입니다.", "العربية من اليمين إلى اليسار، ١٢٣", "עִבְרִית מימין לשמאל", "فارسی می‌نویسم", "हिन्दी में लिखा", "ภาษาไทยไม่มีช่องว่าง",
    "нещо на Български", "Ελληνικά κείμενα", "Cửa Việt", "ied 4 ½ months", "\u202eRTL\u202c \u200fmark\u200e", "کاملاً", "მხედრული", "Ünïcödé",
]  # fmt: skip
emoji = ["👩‍👩‍👧‍👦", "👨🏽‍💻", "🏳️‍🌈", "🇳🇴🇩🇪", "👍🏽", "❤️", "🦙.cpp", "🧑‍🚀", "1️⃣", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "😁", "🫠", "♀️", "‍", "️"]
controls = [chr(c) for c in (*range(0x20), 0x7F, *range(0x80, 0xA0), 0xA0, 0xAD, 0x200B, 0x200C, 0x200D, 0x2028, 0x2029, 0x2060, 0xFEFF)]
byte_names = ["<0x00>", "<0x0A>", "<0x0a>", "<0xFF>", "<0xG0>", "<0x41", "0x41>"]


def texts(markers, pieces, seed):
    """2400 texts around the given marker spellings and vocabulary pieces."""
    rng = random.Random(seed)

    def some(source, low, high, glue=""):
        return glue.join(rng.choice(source) for _ in range(rng.randint(low, high)))

    def letters(first, last, n):
        return "".join(chr(rng.randint(first, last)) for _ in range(n))

    def run(characters):
        return rng.choice(characters) * rng.choice([1, 2, 3, 4, 7, 8, 15, 16, 17, 30, 31, 32, 33, 62, 63, 64, 65, 100, 130])

    def broken(marker):
        at = rng.randrange(len(marker) + 1)
        return rng.choice([marker[:at], marker[at:], marker[:at] + " " + marker[at:], marker[:at] + marker[at + 1 :], marker + marker])

    makers = [  # how a text comes about, and how many of the kind
        (lambda: some(words, 1, 14, " "), 250),
        (lambda: some(words, 3, 8, " ") + rng.choice([".", "?\n", "!\n\n", ";  ", ":\n", "\r\n"]) + some(words, 1, 5, " "), 150),
        (lambda: some(pieces, 1, 10), 350),
        (lambda: some(pieces, 1, 8).replace("▁", " "), 150),
        (lambda: letters(*rng.choice(scripts), rng.randint(1, 14)), 300),
        (lambda: "".join(letters(*rng.choice(scripts), rng.randint(1, 3)) for _ in range(rng.randint(2, 8))), 150),
        (lambda: some(phrases, 1, 2, rng.choice(["", " ", "\n"])), 80),
        (lambda: some(emoji, 1, 6, rng.choice(["", " "])), 120),
        (lambda: some(controls, 1, 8, rng.choice(["", "a", " "])), 100),
        (lambda: run(" \n\t\r"), 80),
        (lambda: "".join(run(" \n\t") + rng.choice(["", "x", "the", "\r\n"]) for _ in range(rng.randint(2, 4))), 120),
        (lambda: run(["a", "e", "th", "LORD", "-", "=", "!", ".", "0", "é", "日", "🦙", "▁", "ab "]), 100),
        (lambda: (lambda t: t[rng.randrange(len(t)) :])(some(code, 1, 2)), 130),
        (lambda: some(markers + byte_names, 1, 3, rng.choice(["", " ", "\n", "x"])), 80),
        (lambda: "".join(broken(rng.choice(markers)) for _ in range(rng.randint(1, 2))), 80),
        (lambda: "".join(rng.choice(rng.choice([markers, words, controls, emoji, phrases, pieces, [" ", "\n", "▁"]])) for _ in range(6)), 20),
        (lambda: some(markers + words + emoji + ["  ", "\n\n", "\t", "<", "|>", "▁", "\0"], 2, 10), 139),
    ]
    result = [""] + [make() for make, count in makers for _ in range(count)]
    assert len(result) == 2400
    return result


def main(source=tiny, output=here / "ids.jsonl"):
    document = json.loads(pathlib.Path(source).read_text(encoding="utf-8"))
    parsed, plain = (tokenizers.Tokenizer.from_str(json.dumps(document)) for _ in range(2))
    plain.encode_special_tokens = True
    markers = [token["content"] for token in document["added_tokens"] if token["special"]]
    rows = []
    for text in texts(markers, sorted(document["model"]["vocab"]), 1611):
        row = [text] + [t.encode(text, add_special_tokens=False).ids for t in (plain, parsed)]
        assert plain.decode(row[1], skip_special_tokens=False) == text.replace("▁", " "), text
        rows.append(json.dumps(row if row[1] != row[2] else row[:2], ensure_ascii=False, separators=(",", ":")) + "\n")
    pathlib.Path(output).write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
