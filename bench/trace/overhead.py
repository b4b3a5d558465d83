#!/usr/bin/env python3
"""Measures how much slower a step is while its timeline is recorded.

    bench/trace/overhead.py [--rounds 5] [--lockstep target/release/lockstep]

A run that records no step and one that records all but the first ones alternate, so that a busy machine slows both down.
Prints the median step time of both, and the median and range of their ratio by round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
name = "run"
[model]
preset = "{preset}"
[data]
source = "text.tokens"
[train]
steps = {steps}
global_batch = 8
micro_batch = 4
warmup = 2
log_every = 1
eval_every = 0
[layout]
data = 2
"""

# Preset, steps of a run, and keys that it needs.
MODELS = {"tiny": (120, ["model.vocab=257"]), "small": (16, [])}
# Steps before the recorded ones.
WARM_UP = 4


def step_time(lockstep, folder, steps, sets, trace):
    """Median time of the steps after the warm-up, in seconds."""
    options = [part for set in sets for part in ("--set", set)]
    if trace:
        options += ["--trace", f"{WARM_UP + 1}..{steps}"]
    subprocess.run([lockstep, "train", "run.toml", *options], cwd=folder, check=True, capture_output=True,
                   env={"LOCKSTEP_DEVICE": "cpu", **os.environ})
    lines = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    return statistics.median(1 / line["tokens_per_s"] for line in lines if line.get("tokens_per_s") and line["step"] > WARM_UP)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lockstep", default="target/release/lockstep")
    parser.add_argument("--only", default=",".join(MODELS))
    args = parser.parse_args()
    lockstep = str(Path(args.lockstep).resolve())
    for preset in args.only.split(","):
        steps, sets = MODELS[preset]
        with tempfile.TemporaryDirectory(prefix="overhead-") as name:
            folder = Path(name)
            (folder / "run.toml").write_text(RUN.format(preset=preset, steps=steps))
            (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20000)
            prepare = [lockstep, "data", "prepare", "text.txt", "--out", "text.tokens"]
            subprocess.run(prepare, cwd=folder, check=True, capture_output=True)
            off, on = [], []
            for _ in range(args.rounds):
                off.append(step_time(lockstep, folder, steps, sets, False))
                on.append(step_time(lockstep, folder, steps, sets, True))
            ratios = [100 * (traced / plain - 1) for plain, traced in zip(off, on)]
            print(f"{preset}: {statistics.median(ratios):+.2f}% ({min(ratios):+.2f}% to {max(ratios):+.2f}% in {args.rounds} rounds); "
                  f"best of both: {100 * (min(on) / min(off) - 1):+.2f}%", flush=True)


if __name__ == "__main__":
    sys.exit(main())
