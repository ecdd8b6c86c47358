#!/usr/bin/env python3
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
"""Prints what measure.py wrote as Markdown: the project's goals, what was measured, and the spread over the rounds.

    goals.py FILE.json [--mac-rate TYPE=GMAC/s …]

Ratios are formed within a round, of neighbours in time; given is their median and, behind it, the least and the greatest. --mac-rate is the
machine's practical rate for a type with all threads, as the kernel bench (bench/ops) says: with it the roofline of passes is shown too.
"""
import argparse
import json
import statistics

# No ground for a verdict:
STEADY = 1.5  # a figure whose greatest value passes the least by more
QUIET = 0.1  # a run in which other programs used more processors
ACCEPTANCE = {0.79: "chat", 0.74: "code", 0.56: "prose"}  # as published


def tokens_per_round(acceptance, drafts):
    """Of a round whose drafts are each right with this probability behind right ones: 1 + a + a² + … + a^drafts."""
    return sum(acceptance**i for i in range(drafts + 1))


class Model:
    def __init__(self, entry, mac_rates):
        self.name, self.kind, self.long = entry["name"], entry["type"], entry["long_context"]
        self.ours, self.theirs = [r["outrider"] for r in entry["rounds"]], [r["llama"] for r in entry["rounds"]]
        self.others = [r["processors_of_others"] for r in entry["rounds"]]
        self.weights, self.mac_rate = self.ours[0]["weights"], mac_rates.get(self.kind)

    def rounds(self, value):
        return [value(a, b) for a, b in zip(self.ours, self.theirs)]


def bandwidth(ours):
    """B in GB/s: the best of a round, as the memory of a shared machine has good and bad minutes."""
    return max(v["best"] for v in ours["read_gb_per_second"].values())


def pass_ms(ours, rows):
    return next(v["ms"]["median"] for v in ours["verify"] if v["rows"] == rows)


def round_ms(ours, drafts):
    return next(v["ms"]["median"] for v in ours["round"] if v["drafts"] == drafts)


def best_schedule(ours, acceptance):
    mine = [s for s in ours["imposed"]["schedules"] if s["acceptance"] == acceptance]
    return max(mine, key=lambda s: s["tokens_per_second"]["median"])


def best_of_theirs(theirs, acceptance):
    """Tokens per second of llama.cpp at its best number of drafts, none included: tokens of a round / its measured time."""
    rates = [1000 / theirs["plain_ms"]] + [1000 * tokens_per_round(acceptance, int(k)) / ms for k, ms in theirs["round_ms"].items()]
    return max(rates)


def figure(values, unit=""):
    def text(v):
        return f"{v:.0f}" if abs(v) >= 100 else f"{v:.3g}"

    middle = statistics.median(values)
    spread = f" ({text(min(values))} – {text(max(values))})" if len(values) > 1 else ""
    return f"{text(middle)}{unit}{spread}"


class Table:
    def __init__(self):
        self.met = self.missed = self.unsteady = 0
        self.quiet = True

    def head(self):
        print("| | measured | goal | |\n|---|---|---|---|")

    def row(self, what, values, unit="", at_least=None, at_most=None):
        values, goal, verdict = list(values), "", ""
        if at_least is not None or at_most is not None:
            middle = statistics.median(values)
            good = middle >= at_least if at_least is not None else middle <= at_most
            goal = f"≥ {at_least:g}{unit}" if at_least is not None else f"≤ {at_most:g}{unit}"
            verdict = "unsteady" if not self.quiet or max(values) > STEADY * min(values) else "met" if good else "missed"
            setattr(self, verdict, getattr(self, verdict) + 1)
        print(f"| {what} | {figure(values, unit)} | {goal} | {verdict} |")


def print_model(m, vnni, table):
    e2b = m.name.startswith("e2b")
    kind = m.kind
    size = m.weights["read_bytes"]
    print(f"\n### {m.name}, {kind}\n")
    print(f"{len(m.ours)} rounds; processors that other programs used meanwhile: {', '.join(f'{x:.1f}' for x in m.others)}; text checked against {m.ours[0]['checked_against']}\n")
    table.head()
    table.quiet = max(m.others) <= QUIET
    row = table.row
    row("reading memory, B: the best of a round", m.rounds(lambda a, b: bandwidth(a)), " GB/s")
    row("plain tokens, outrider", m.rounds(lambda a, b: 1000 / pass_ms(a, 1)), " /s")
    row("plain tokens, llama.cpp", m.rounds(lambda a, b: 1000 / b["plain_ms"]), " /s")
    row("plain tokens, against llama.cpp", m.rounds(lambda a, b: b["plain_ms"] / pass_ms(a, 1)), "×", at_least={"q4_0": 2.0, "q8_0": 1.8, "bf16": 1.5}.get(kind))
    row("plain pass, share of B", m.rounds(lambda a, b: 100 * size / pass_ms(a, 1) / 1e6 / bandwidth(a)), " %", at_least={"q4_0": 75, "q8_0": 85, "bf16": 85}.get(kind))
    row("as many plain tokens as B allows, against llama.cpp", m.rounds(lambda a, b: b["plain_ms"] * bandwidth(a) * 1e6 / size), "×")
    for rows in (2, 4, 8, 16):
        goal = {4: 1.15, 8: 1.35}.get(rows) if vnni and kind != "bf16" else None
        row(f"V({rows}), outrider", m.rounds(lambda a, b: pass_ms(a, rows) / pass_ms(a, 1)), at_most=goal)
        row(f"V({rows}), llama.cpp", m.rounds(lambda a, b: b["pass_ms"][str(rows)] / b["pass_ms"]["1"]))
        row(f"pass of {rows} rows, against llama.cpp", m.rounds(lambda a, b: b["pass_ms"][str(rows)] / pass_ms(a, rows)), "×")
        if m.mac_rate:
            row(f"pass of {rows} rows / max(bytes / B, {rows} · MACs / R)",
                m.rounds(lambda a, b: pass_ms(a, rows) / max(size / bandwidth(a) / 1e6, rows * m.weights["macs"] / m.mac_rate / 1e6)), at_most=1.2)  # fmt: skip
        moe = [next(v for v in a["verify"] if v["rows"] == rows) for a in m.ours]
        if "bytes" in moe[0]:
            row(f"V({rows}) / the bytes of its {moe[0]['chosen_experts']} distinct experts and the rest, in plain passes", [v["cost_per_byte"]["median"] for v in moe], at_most=1.15)
    row("pass of 16 rows", m.rounds(lambda a, b: 16 * m.weights["macs"] / pass_ms(a, 16) / 1e6), " GMAC/s")
    prefill = {"q4_0": 5, "q8_0": 4} if e2b else {"q4_0": 2.0, "q8_0": 1.6, "bf16": 1.0}
    row("prompt of 256 tokens, outrider", m.rounds(lambda a, b: a["prefill_tokens_per_second"]["median"]), " /s")
    row("prompt of 256 tokens, llama.cpp", m.rounds(lambda a, b: b["prefill_tokens_per_second"]), " /s")
    row("prompt of 256 tokens, against llama.cpp", m.rounds(lambda a, b: a["prefill_tokens_per_second"]["median"] / b["prefill_tokens_per_second"]), "×", at_least=prefill.get(kind))
    row("draft step / plain token", m.rounds(lambda a, b: a["draft_step"]["ms"]["median"] / pass_ms(a, 1)), at_most=0.06 if e2b and kind == "q4_0" else None)
    # The targets of other sizes are cut to a few layers, their assistants are whole: what drafts cost beside them says nothing.
    whole = 1 if e2b else None
    row("round with 3 drafts / llama.cpp's plain token", m.rounds(lambda a, b: round_ms(a, 3) / b["plain_ms"]), at_most=whole and 0.8)
    row("round with 3 drafts / own plain token", m.rounds(lambda a, b: round_ms(a, 3) / pass_ms(a, 1)), at_most=whole and (1.35 if vnni else 2.0))
    row("llama.cpp's round with 3 drafts / its plain token", m.rounds(lambda a, b: b["round_ms"]["3"] / b["plain_ms"]))
    own = dict(zip(ACCEPTANCE, (2.1, 1.9, 1.5) if vnni else (1.45, 1.35, 1.15)))
    other = dict(zip(ACCEPTANCE, (3, 2.8, 2.4)))
    for acceptance, text in ACCEPTANCE.items():
        lengths = sorted({str(best_schedule(a, acceptance)["drafts"]) for a in m.ours})
        what = f"acceptance {acceptance} ({text}), best length {'/'.join(lengths)}"
        row(f"{what}: tokens", m.rounds(lambda a, b: best_schedule(a, acceptance)["tokens_per_second"]["median"]), " /s")
        row(f"{what}: against own plain", m.rounds(lambda a, b: best_schedule(a, acceptance)["speedup"]["median"]), "×", at_least=whole and own[acceptance])
        row(f"{what}: against llama.cpp plain", m.rounds(lambda a, b: best_schedule(a, acceptance)["tokens_per_second"]["median"] * b["plain_ms"] / 1000), "×", at_least=whole and other[acceptance])
        row(f"{what}: against llama.cpp's best length", m.rounds(lambda a, b: best_schedule(a, acceptance)["tokens_per_second"]["median"] / best_of_theirs(b, acceptance)), "×")
    if len(m.long) == 2:
        print_long(m, row, e2b)
    used = m.weights["used_bytes"]
    row("load, outrider, seconds per GB of weights in use", m.rounds(lambda a, b: a["load_seconds"] / used * 1e9), at_most=1.5)
    row("load, llama.cpp, seconds per GB of weights in use", m.rounds(lambda a, b: b["load_seconds"] / used * 1e9))
    pair = used + m.weights["assistant_bytes"]
    row("most memory without keys and values / weights of both models in use, outrider", m.rounds(lambda a, b: (a["peak_memory_bytes"] - a["kv_bytes"]) / pair), at_most=1.1)
    row("most memory / the target's weights in use, llama.cpp", m.rounds(lambda a, b: b["peak_memory_bytes"] / used))
    row("choosing a token / plain token", m.rounds(lambda a, b: 100 * a["choose_ms"]["median"] / pass_ms(a, 1)), " %", at_most=3)


def print_long(m, row, e2b):
    """Attention's share is what a token takes longer than beside it at few positions: 256 for outrider, 0 for llama.cpp."""
    ours, (their_base, theirs) = m.long["outrider"], m.long["llama"]
    for at in ours:
        row(f"attention's share at {at['positions']} positions, outrider", [at["share"][key] for key in ("low", "median", "high")], " %", at_most=15 if at is ours[-1] and e2b else None)
    row(f"attention's share at {theirs['positions']} positions, llama.cpp", [100 * (1 - their_base["ms"] / theirs["ms"])], " %")
    row(f"plain tokens at {theirs['positions']} positions, against llama.cpp", [theirs["ms"] / ours[-1]["ms"]["median"]], "×", at_least=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--mac-rate", action="append", default=[], metavar="TYPE=GMAC/s")
    args = parser.parse_args()
    with open(args.file) as file:
        data = json.load(file)
    rates = {kind: float(rate) for kind, _, rate in (text.partition("=") for text in args.mac_rate)}
    vnni = any("vnni" in flag or "amx" in flag for flag in data["isa"])
    first = data["models"][0]["rounds"][0]["outrider"]
    print(f"{data['cpu']}, {data['threads']} threads, {' '.join(data['isa'])}; outrider {first['outrider']}, SIMD {first['simd']}, {first['compiler']}; llama.cpp {data['llama']}")
    print(f"Goals are those {'with' if vnni else 'without'} VNNI. Ratios “against” are outrider's advantage; median over the rounds, least and greatest behind it.")
    print(f"No verdict where these differ by more than a factor of {STEADY}, or where other programs used more than {QUIET} processors meanwhile.")
    table = Table()
    for entry in data["models"]:
        print_model(Model(entry, rates), vnni, table)
    print(f"\n{table.met} goals met, {table.missed} missed, {table.unsteady} unsteady: measure those again on a quiet machine.")


if __name__ == "__main__":
    main()
