#!/usr/bin/env python3
# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
"""Runs outrider and llama.cpp in turn on the same files and writes what each measured; llama.sh calls it.

    measure.py --decode PROGRAM --llama DIR --threads N --rounds N --json FILE --model NAME TYPE TARGET ASSISTANT LLAMA_ASSISTANT [--model …]

Standard library only. The JSON holds every round as measured: goals.py and plot.py condense it.
  outrider   bench/decode --json: one round of passes and of texts at an imposed acceptance
  llama      llama-bench: -n for plain tokens, -p M for passes (it computes the logits of the last row alone, outrider those of all M);
             llama-speculative-simple: a round with k drafts = decoding time / rounds, of a text of which hardly a draft is accepted
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROWS = [1, 2, 3, 4, 6, 8, 12, 16]
DRAFTS = [1, 2, 3, 4, 6, 8]
PROMPT = 256
ROUND_TOKENS = 24  # of llama.cpp's speculative texts
TEXT_TOKENS = 48  # of outrider's


def busy_seconds():
    """Processor seconds of all programs so far, and those the machine's host took away; 0 where the system does not tell."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


disturbance = []  # of each program run: processors that others used meanwhile, and for how long


def run(command):
    """Output of a program, its wall-clock seconds and the most memory it held, in bytes."""
    start, busy = time.monotonic(), busy_seconds()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - start
        disturbance.append((max(0.0, busy_seconds() - busy - usage.ru_utime - usage.ru_stime) / seconds, seconds))
        out.seek(0), err.seek(0)
        stdout, stderr = out.read(), err.read()
    if process.returncode != 0:
        tail = "\n".join((stdout + stderr).splitlines()[-15:])
        sys.exit(f"{pathlib.Path(command[0]).name} failed with exit code {process.returncode}:\n{tail}")
    return stdout + stderr, seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def warm(model):
    """Reads the target's file, so that both engines load it from the page cache."""
    with open(model["target"], "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


class Outrider:
    def __init__(self, args):
        self.program, self.threads = args.decode, args.threads

    def decode(self, model, *options):
        out, _, _ = run([self.program, "--target", model["target"], "--assistant", model["assistant"], "--threads", self.threads, "--repeat", 1, "--context", PROMPT, *options, "--json"])
        return json.loads(next(line for line in out.splitlines() if line.startswith("{")))

    def round(self, model):
        return self.decode(model, "--measure", "passes,schedules", "--new-tokens", TEXT_TOKENS)

    def long(self, model, positions):
        # llama.cpp keeps keys and values in 16 bits.
        return self.decode(model, "--measure", "long", "--long-context", positions, "--kv", "bf16")["long_context"]


class Llama:
    """Flash attention on and repacking on are its fastest settings on a CPU; the weights stay mapped."""

    def __init__(self, args):
        self.bin, self.threads = pathlib.Path(args.llama), args.threads

    def bench(self, model, *options):
        out, seconds, memory = run([self.bin / "llama-bench", "-m", model["target"], "-t", self.threads, "-fa", 1, "-o", "jsonl", *options])
        tests = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return [(t["n_prompt"], t["n_gen"], [ns / 1e6 for ns in t["samples_ns"]]) for t in tests], seconds, memory

    def round(self, model):
        tests, seconds, memory = self.bench(model, "-p", PROMPT, "-n", 1, "-r", 1, "--no-warmup")
        result = {"load_seconds": seconds - sum(sum(ms) for _, _, ms in tests) / 1000, "peak_memory_bytes": memory}
        tests, _, _ = self.bench(model, "-p", ",".join(map(str, [PROMPT, *ROWS])), "-n", 16, "-r", 3)
        passes = {rows: statistics.median(ms) for rows, _, ms in tests if rows}
        result["prefill_tokens_per_second"] = 1000 * PROMPT / passes.pop(PROMPT)
        result["plain_ms"] = next(statistics.median(ms) / n for _, n, ms in tests if n)
        result["pass_ms"] = {str(rows): ms for rows, ms in passes.items()}
        result["round_ms"] = {str(drafts): self.speculative_round(model, drafts) for drafts in DRAFTS}
        return result

    def speculative_round(self, model, drafts):
        out, _, _ = run([
            self.bin / "llama-speculative-simple", "-m", model["target"], "-md", model["llama_assistant"], "--spec-type", "draft-mtp", "--spec-draft-n-max", drafts, "--spec-draft-p-min", 0,
            "-t", self.threads, "-td", self.threads, "-c", 1024, "-n", ROUND_TOKENS, "--temp", 0, "--samplers", "top_k", "--top-k", 1, "-fa", "on", "-fit", "off", "--ignore-eos", "-p", "a b c d",
        ])  # fmt: skip
        tokens, seconds = re.search(r"decoded +(\d+) tokens in +([\d.]+) seconds", out).groups()
        accepted = re.search(r"n_accept += (\d+)", out).group(1)
        return 1000 * float(seconds) / (int(tokens) - int(accepted))

    def long(self, model, positions):
        tests, _, _ = self.bench(model, "-p", 0, "-n", 8, "-d", f"0,{positions}", "-r", 1)
        return [{"positions": at, "ms": statistics.median(ms) / n} for at, (_, n, ms) in zip([0, positions], tests)]


def machine(args):
    flags, name = set(), "unknown"
    try:
        for line in open("/proc/cpuinfo"):
            key, _, value = line.partition(":")
            if key.strip() == "flags":
                flags = set(value.split())
            elif key.strip() == "model name":
                name = value.strip()
    except OSError:
        pass
    wanted = ["avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8"]
    return {"cpu": name, "isa": [flag for flag in wanted if flag in flags], "threads": args.threads}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--llama", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-context", type=int, default=8192, help="positions; 0 leaves it out")
    parser.add_argument("--json", required=True)
    parser.add_argument("--model", nargs=5, action="append", required=True)
    args = parser.parse_args()

    engines = {"outrider": Outrider(args), "llama": Llama(args)}
    result = machine(args)
    result["llama"] = run([engines["llama"].bin / "llama-bench", "--version"])[0].splitlines()[0].removeprefix("version: ")
    result["models"] = []
    for name, kind, *files in args.model:
        model = dict(zip(["target", "assistant", "llama_assistant"], files))
        rounds, long = [], {}
        result["models"].append({"name": name, "type": kind, "rounds": rounds, "long_context": long})
        for number in range(1, args.rounds + 1):
            entry = {}
            disturbance.clear()
            for engine, program in engines.items():
                say(f"{name} {kind}: round {number} of {args.rounds}, {engine}")
                warm(model)
                entry[engine] = program.round(model)
            entry["processors_of_others"] = sum(used * seconds for used, seconds in disturbance) / sum(seconds for _, seconds in disturbance)
            rounds.append(entry)
            pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
        if args.long_context:
            for engine, program in engines.items():
                say(f"{name} {kind}: {args.long_context} positions, {engine}")
                long[engine] = program.long(model, args.long_context)
            pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
