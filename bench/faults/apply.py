#!/usr/bin/env python3
"""Applies every recommendation of `lockstep doctor` and compares the predicted with the measured gain.

    bench/faults/apply.py [--rounds 3] [--jobs 1] [--describe] [--trace] [--only zero] [--lockstep target/release/lockstep]

In each round the run is repeated and diagnosed, then the changed run follows: prediction and measurement see the same
machine. Medians of the rounds count; the range and the time that ranks wait for a core tell how quiet the machine was. If
that time is not close to zero, the ranks share cores with other programs, and the measured gain says little.
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
        self.trace = ["--trace", "20..23"] if args.trace else []
        (self.folder / "run.toml").write_text(RUN)
        if args.describe:
            self.call("bench", "machine", "--ranks", "1,2", "--rounds", "2")

    def call(self, *words):
        command = [self.lockstep, *words]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout

    def train(self, name, sets):
        """Median seconds of a step, and the fraction of it that ranks wait for a core. The first report does not count."""
        options = [part for set in [f"name={name}", *sets] for part in ("--set", set)]
        self.call("train", "run.toml", *options, *self.engine, *self.trace)
        lines = [json.loads(line) for line in (self.folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "tokens_per_s" in line][1:]
        step = statistics.median(16 * 128 / line["tokens_per_s"] for line in lines)
        return step, statistics.median(line["queue_s"] for line in lines) / step

    def advice(self):
        """Changes that the doctor recommends for the last run, with their predicted gain."""
        advice = json.loads(self.call("doctor", "runs/base", "--json"))["advice"]
        advice = [entry for entry in advice if entry["sets"] and entry["gain"]]
        return {tuple(entry["sets"]): entry["gain"] for entry in advice if not entry["sets"][0].startswith("checkpoint.")}

    def compare(self, rounds):
        """One row for each recommendation: its predicted and measured gain in each round."""
        self.train("base", self.sets)
        rows = {sets: Row(self.name, " ".join(sets)) for sets in self.advice()}
        for _ in range(rounds):
            base, queue = self.train("base", self.sets)
            advice = self.advice()
            for sets, row in rows.items():
                changed = {set.split("=")[0] for set in sets}
                kept = [set for set in self.sets if set.split("=")[0] not in changed]
                step, changed_queue = self.train("changed", kept + list(sets))
                row.measured.append(1 - step / base)
                row.queue.append(max(queue, changed_queue))
                # Not recommended after this run: the prediction was too low to be shown.
                row.predicted += [advice[sets]] if sets in advice else []
        return list(rows.values())


class Row:
    """Gains of one recommendation, by round. Rounds without a prediction are missing in `predicted`."""

    def __init__(self, name, sets):
        self.name, self.sets, self.predicted, self.measured, self.queue = name, sets, [], [], []

    def gains(self):
        return (statistics.median(self.predicted) if self.predicted else 0.0), statistics.median(self.measured)

    def __str__(self):
        (predicted, measured), low, high = self.gains(), min(self.measured), max(self.measured)
        return (f"{self.name:24} {self.sets:45} predicted {100 * predicted:5.1f}% in {len(self.predicted)} of {len(self.measured)} rounds  "
                f"measured {100 * measured:5.1f}% ({100 * low:.0f} to {100 * high:.0f}%)  "
                f"waiting for a core {100 * statistics.median(self.queue):.0f}%")


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
        for row in compared:
            print(row, flush=True)
        if not compared:
            print(f"{name:24} no recommendation that can be applied", flush=True)
        results += compared


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each on its own cores")
    parser.add_argument("--describe", action="store_true", help="measure the machine first")
    parser.add_argument("--trace", action="store_true", help="record a timeline in every run, for the doctor to use")
    parser.add_argument("--only", choices=STARTS, action="append", help="one of the runs; may be repeated [default: all]")
    parser.add_argument("--lockstep", default="target/release/lockstep")
    args = parser.parse_args()
    args.lockstep = str(Path(args.lockstep).resolve())
    tasks, results, cores = queue.Queue(), [], sorted(os.sched_getaffinity(0))
    for name in args.only or STARTS:
        tasks.put(name)
    each = len(cores) // args.jobs
    own = [set(cores[job * each : (job + 1) * each]) if args.jobs > 1 else None for job in range(args.jobs)]
    workers = [threading.Thread(target=work, args=(tasks, results, part, args)) for part in own]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    gains = [row.gains() for row in results]
    slower = sum(measured < -0.03 for _, measured in gains)
    far = sum(abs(measured - predicted) > 0.10 for predicted, measured in gains)
    print(f"{len(results)} recommendations: {slower} slower when applied, {far} more than 10 points off")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
