#!/usr/bin/env python3
"""Applies every recommendation of `lockstep doctor` and compares the predicted with the measured gain.

    bench/faults/apply.py [--rounds 3] [--jobs 1] [--describe] [--lockstep target/release/lockstep]

The run and the changed run alternate, so that a busy machine slows both down. The median step time of all rounds counts.
With --describe, `lockstep bench machine` measures the machine first, and the doctor uses its description. Each of the
jobs has its own cores.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
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
    "tensor over TCP": ["layout.data=1", "layout.tensor=2"],
    "small buckets over TCP": ["comm.bucket_mb=0.01"],
    "wide": ["model.dim=256", "model.layers=6", "layout.recompute=full", "train.micro_batch=2"],
    "plain": [],
}

ENVIRONMENT = {"LOCKSTEP_DEVICE": "cpu", **os.environ}


class Start:
    """A run and the changes that the doctor recommends for it."""

    def __init__(self, name, args):
        self.name, self.sets, self.lockstep = name, STARTS[name], args.lockstep
        self.folder = Path(tempfile.mkdtemp(prefix="apply-"))
        self.engine = ["--engine", "tcp"] if "TCP" in name else []
        (self.folder / "run.toml").write_text(RUN)
        if args.describe:
            self.call("bench", "machine", "--ranks", "1,2", "--rounds", "2")

    def call(self, *words):
        command = [self.lockstep, *words]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout

    def train(self, name, sets):
        """Step times in seconds, without the first report."""
        options = [part for set in [f"name={name}", *sets] for part in ("--set", set)]
        self.call("train", "run.toml", *options, *self.engine)
        lines = [json.loads(line) for line in (self.folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        rates = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line][1:]
        return [16 * 128 / rate for rate in rates]

    def compare(self, rounds):
        """Change, predicted and measured gain of each recommendation."""
        self.train("base", self.sets)
        advice = json.loads(self.call("doctor", "runs/base", "--json"))["advice"]
        advice = [entry for entry in advice if entry["sets"] and entry["gain"]]
        advice = [entry for entry in advice if not entry["sets"][0].startswith("checkpoint.")]
        before, after = [], [[] for _ in advice]
        for _ in range(rounds):
            before += self.train("base", self.sets)
            for times, entry in zip(after, advice):
                changed = {set.split("=")[0] for set in entry["sets"]}
                kept = [set for set in self.sets if set.split("=")[0] not in changed]
                times += self.train("changed", kept + entry["sets"])
        base = statistics.median(before)
        return [(" ".join(entry["sets"]), entry["gain"], 1 - statistics.median(times) / base)
                for times, entry in zip(after, advice)]


def work(tasks, results, cores, args):
    if cores:
        os.sched_setaffinity(0, cores)
    while True:
        try:
            name = tasks.get_nowait()
        except queue.Empty:
            return
        try:
            compared = Start(name, args).compare(args.rounds)
        except subprocess.CalledProcessError as error:  # the others go on
            print(f"{name:24} failed: {error.stderr[-300:]}", flush=True)
            continue
        for sets, predicted, measured in compared:
            print(f"{name:24} {sets:45} predicted {100 * predicted:5.1f}%  measured {100 * measured:5.1f}%", flush=True)
        if not compared:
            print(f"{name:24} no recommendation that can be applied", flush=True)
        results += compared


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each on its own cores")
    parser.add_argument("--describe", action="store_true", help="measure the machine first")
    parser.add_argument("--lockstep", default="target/release/lockstep")
    args = parser.parse_args()
    args.lockstep = str(Path(args.lockstep).resolve())
    tasks, results, cores = queue.Queue(), [], sorted(os.sched_getaffinity(0))
    for name in STARTS:
        tasks.put(name)
    each = len(cores) // args.jobs
    own = [set(cores[job * each : (job + 1) * each]) if args.jobs > 1 else None for job in range(args.jobs)]
    workers = [threading.Thread(target=work, args=(tasks, results, part, args)) for part in own]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    slower = sum(measured < -0.03 for _, _, measured in results)
    far = sum(abs(measured - predicted) > 0.10 for _, predicted, measured in results)
    print(f"{len(results)} recommendations: {slower} slower when applied, {far} more than 10 points off")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
