#!/usr/bin/env python3
"""Applies every recommendation of `lockstep doctor` and compares the predicted with the measured gain.

    bench/faults/apply.py [--rounds 3] [--lockstep target/release/lockstep]

The run and the changed run alternate, so that a busy machine slows both down. The median step time of all rounds counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
name = "run"
[model]
preset = "grammar"
[train]
steps = 40
global_batch = 16
micro_batch = 4
warmup = 2
log_every = 2
eval_every = 0
[layout]
data = 2
"""

STARTS = {
    "recompute": ["layout.recompute=full"],
    "small micro-batches": ["train.micro_batch=1"],
    "zero": ["layout.zero=3", "train.micro_batch=1"],
    "pipeline": ["layout.data=1", "layout.pipe=2", "train.micro_batch=8"],
    "plain": [],
}


def train(lockstep, folder, name, sets):
    """Step times in seconds, without the first report."""
    options = [part for set in [f"name={name}", *sets] for part in ("--set", set)]
    subprocess.run([lockstep, "train", "run.toml", *options], cwd=folder, check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line][1:]
    return [16 * 128 / rate for rate in rates]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lockstep", default="target/release/lockstep")
    args = parser.parse_args()
    lockstep = str(Path(args.lockstep).resolve())
    slower, far, total = 0, 0, 0
    for start, sets in STARTS.items():
        folder = Path(tempfile.mkdtemp(prefix="apply-"))
        (folder / "run.toml").write_text(RUN)
        train(lockstep, folder, "base", sets)
        answer = subprocess.run([lockstep, "doctor", "runs/base", "--json"], cwd=folder, capture_output=True, text=True, check=True)
        advice = [entry for entry in json.loads(answer.stdout)["advice"] if entry["sets"] and entry["gain"]]
        advice = [entry for entry in advice if not entry["sets"][0].startswith("checkpoint.")]
        before, after = [], [[] for _ in advice]
        for _ in range(args.rounds):
            before += train(lockstep, folder, "base", sets)
            for times, entry in zip(after, advice):
                changed = {set.split("=")[0] for set in entry["sets"]}
                kept = [set for set in sets if set.split("=")[0] not in changed]
                times += train(lockstep, folder, "changed", kept + entry["sets"])
        for times, entry in zip(after, advice):
            measured = 1 - statistics.median(times) / statistics.median(before)
            total += 1
            slower += measured < -0.03
            far += abs(measured - entry["gain"]) > 0.10
            print(f"{start:20} {' '.join(entry['sets']):45} predicted {100 * entry['gain']:5.1f}%  measured {100 * measured:5.1f}%", flush=True)
        if not advice:
            print(f"{start:20} no recommendation that can be applied", flush=True)
    print(f"{total} recommendations: {slower} slower when applied, {far} more than 10 points off")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
