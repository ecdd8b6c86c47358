#!/usr/bin/env python3
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
"""Draws what measure.py wrote: two SVG files for each model.

    plot.py FILE.json FOLDER

NAME-TYPE-passes.svg       time of a pass against its rows; bars from the least to the greatest of the rounds
NAME-TYPE-acceptance.svg   tokens per second against the acceptance of a draft, each engine at its best fixed number of drafts (none included):
                           tokens of a round / its measured time. Dots: whole texts that outrider wrote at an imposed acceptance
Standard library only.
"""
import json
import pathlib
import statistics
import sys

from goals import ACCEPTANCE, Model, bandwidth, best_schedule, round_ms, tokens_per_round

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 60, 20, 44, 52
STYLE = """svg { color: #24292f; font: 13px sans-serif; }
@media (prefers-color-scheme: dark) { svg { color: #d0d7de; } }
text { fill: currentColor; } .axis { stroke: currentColor; } .grid { stroke: currentColor; opacity: 0.15; }
.outrider { stroke: #2f81f7; fill: #2f81f7; } .llama { stroke: #e0823d; fill: #e0823d; } .floor { stroke: #808890; fill: #808890; }
.line { fill: none; stroke-width: 2; } .dashed { stroke-dasharray: 5 4; }"""


def step_for(top):
    """A round distance of grid lines: about six of them up to `top`."""
    unit = 1.0
    while unit * 10 <= top:
        unit *= 10
    while unit > top:
        unit /= 10
    return next(unit * f for f in (0.2, 0.5, 1, 2) if top / (unit * f) <= 7)


class Chart:
    def __init__(self, title, x_title, y_title, x_range, x_marks, y_top):
        self.x_range, self.y_top = x_range, y_top * 1.08
        self.parts, self.legend_at = [], LEFT + 150
        self.text(LEFT, 18, title, "start", "font-weight='bold'")
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_title)
        self.text(LEFT, TOP - 8, y_title, "start")
        step = step_for(self.y_top)
        for i in range(int(self.y_top / step) + 1):
            y = self.y(i * step)
            self.parts.append(f"<line class='grid' x1='{LEFT}' y1='{y:.1f}' x2='{WIDTH - RIGHT}' y2='{y:.1f}'/>")
            self.text(LEFT - 8, y + 4, f"{i * step:g}", "end")
        for x in x_marks:
            self.text(self.x(x), HEIGHT - BOTTOM + 18, f"{x:g}")
        self.parts.append(f"<path class='axis' fill='none' d='M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}'/>")

    def x(self, value):
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        return HEIGHT - BOTTOM - value / self.y_top * (HEIGHT - TOP - BOTTOM)

    def text(self, x, y, text, anchor="middle", more=""):
        self.parts.append(f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {more}>{text}</text>")

    def line(self, points, kind, label, dashed=False):
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        style = f"line {kind}{' dashed' if dashed else ''}"
        self.parts.append(f"<polyline class='{style}' style='fill: none' points='{path}'/>")
        self.parts.append(f"<line class='{style}' x1='{self.legend_at}' y1='{TOP - 12}' x2='{self.legend_at + 22}' y2='{TOP - 12}'/>")
        self.text(self.legend_at + 28, TOP - 8, label, "start")
        self.legend_at += 44 + 7 * len(label)

    def dot(self, x, y, kind):
        self.parts.append(f"<circle class='{kind}' cx='{self.x(x):.1f}' cy='{self.y(y):.1f}' r='4'/>")

    def bar(self, x, low, high, kind):
        self.parts.append(f"<line class='{kind}' x1='{self.x(x):.1f}' y1='{self.y(low):.1f}' x2='{self.x(x):.1f}' y2='{self.y(high):.1f}'/>")

    def write(self, path):
        head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>"
        path.write_text("\n".join([head, f"<style>{STYLE}</style>", *self.parts, "</svg>"]) + "\n")


def plot_passes(m, path):
    ours = {v["rows"]: [next(w["ms"]["median"] for w in a["verify"] if w["rows"] == v["rows"]) for a in m.ours] for v in m.ours[0]["verify"]}
    theirs = {int(rows): [b["pass_ms"][rows] for b in m.theirs] for rows in m.theirs[0]["pass_ms"]}
    ours = {rows: ms for rows, ms in ours.items() if rows <= 16}
    floor = m.weights["read_bytes"] / statistics.median(bandwidth(a) for a in m.ours) / 1e6
    top = max(statistics.median(ms) for ms in [*ours.values(), *theirs.values()])
    chart = Chart(f"A pass of {m.name}, {m.kind}", "rows in the pass", "ms", (0, 16.5), [1, 2, 4, 6, 8, 12, 16], top)
    for engine, passes, label in (("outrider", ours, "outrider"), ("llama", theirs, "llama.cpp")):
        chart.line([(rows, statistics.median(ms)) for rows, ms in passes.items()], engine, label)
        for rows, ms in passes.items():
            chart.dot(rows, statistics.median(ms), engine)
            chart.bar(rows, min(ms), min(max(ms), chart.y_top), engine)
    chart.line([(0.5, floor), (16.5, floor)], "floor", "reading the weights once", dashed=True)
    chart.write(path)


def plot_acceptance(m, path):
    def best(plain_ms, rounds, acceptance):
        return max([1000 / plain_ms] + [1000 * tokens_per_round(acceptance, k) / ms for k, ms in rounds.items()])

    def middle(values):
        return statistics.median(values)

    our_rounds = {v["drafts"]: middle(round_ms(a, v["drafts"]) for a in m.ours) for v in m.ours[0]["round"]}
    their_rounds = {int(k): middle(b["round_ms"][k] for b in m.theirs) for k in m.theirs[0]["round_ms"]}
    our_plain = middle(a["plain"]["ms_per_token"]["median"] for a in m.ours)
    their_plain = middle(b["plain_ms"] for b in m.theirs)
    steps = [i / 50 for i in range(51)]
    ours, theirs = [(a, best(our_plain, our_rounds, a)) for a in steps], [(a, best(their_plain, their_rounds, a)) for a in steps]
    dots = [(a, middle(best_schedule(o, a)["tokens_per_second"]["median"] for o in m.ours)) for a in ACCEPTANCE]
    top = max(y for _, y in [*ours, *theirs, *dots])
    chart = Chart(f"Tokens of {m.name}, {m.kind}", "acceptance of a draft", "tokens per second", (0, 1.02), [0, 0.2, 0.4, 0.6, 0.8, 1], top)
    chart.line(ours, "outrider", "outrider")
    chart.line(theirs, "llama", "llama.cpp")
    chart.line([(0, 1000 / our_plain), (1, 1000 / our_plain)], "outrider", "plain", dashed=True)
    chart.line([(0, 1000 / their_plain), (1, 1000 / their_plain)], "llama", "plain", dashed=True)
    for acceptance, rate in dots:
        chart.dot(acceptance, rate, "outrider")
    chart.write(path)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for entry in json.loads(pathlib.Path(sys.argv[1]).read_text())["models"]:
        model = Model(entry, {})
        name = f"{model.name}-{model.kind}"
        plot_passes(model, folder / f"{name}-passes.svg")
        plot_acceptance(model, folder / f"{name}-acceptance.svg")


if __name__ == "__main__":
    main()
