#!/usr/bin/env python3
"""Measures recovery time: kills random ranks of a run at random times and prints the distribution of the time until the
next step is reported.

    bench/recovery/run.py [--kills 40] [--run examples/grammar.toml] [--binary target/release/lockstep] [--json]

The first step after a restart is always reported.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--run", default=str(ROOT / "examples/grammar.toml"))
    parser.add_argument("--binary", default=str(ROOT / "target/release/lockstep"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="override a value of the run file")
    args = parser.parse_args()
    args.binary = str(pathlib.Path(args.binary).resolve())
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="lockstep-recovery-") as folder:
        times = measure(args, folder, chance)
    times.sort()
    at = lambda share: times[min(len(times) - 1, int(share * len(times)))]
    summary = {"kills": len(times), "p50_s": at(0.5), "p95_s": at(0.95), "max_s": times[-1]}
    if args.json:
        print(json.dumps({**summary, "times_s": times}))
        return
    print(f"{len(times)} kills: median {at(0.5):.2f} s, 95th percentile {at(0.95):.2f} s, longest {times[-1]:.2f} s")
    for start in range(0, int(times[-1] * 4) + 1):
        low, high = start / 4, (start + 1) / 4
        count = sum(low <= t < high for t in times)
        print(f"{low:5.2f} to {high:.2f} s  {'#' * count}")


def measure(args, folder, chance):
    # Enough steps that the run does not end by itself, with occasional checkpoints.
    words = [args.binary, "train", str(pathlib.Path(args.run).resolve())]
    words += ["--set", "train.steps=1000000", "--set", "checkpoint.every=20", "--set", "train.eval_every=0"]
    for value in args.set:
        words += ["--set", value]
    log = open(os.path.join(folder, "log"), "wb")
    launcher = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
    metrics = next_metrics(folder, launcher)
    times = []
    try:
        while len(times) < args.kills:
            wait(lambda: steps(metrics), launcher)
            # Wait for a new checkpoint, so that every failure starts with a fresh restart budget.
            newest = checkpoint(metrics)
            wait(lambda: checkpoint(metrics) > newest, launcher)
            time.sleep(chance.uniform(0.0, 1.5))
            ranks = children(launcher.pid)
            killed = time.monotonic()
            os.kill(chance.choice(ranks), signal.SIGKILL)
            wait(lambda: set(children(launcher.pid)).isdisjoint(ranks) and children(launcher.pid), launcher)
            # The new rank 0 removes reports after the checkpoint, then reports its first step.
            wait(lambda: last_step(metrics) == checkpoint(metrics) + 1 and os.stat(metrics).st_mtime > 0, launcher)
            times.append(time.monotonic() - killed)
            if not args.json:
                print(f"{len(times)}: {times[-1]:.2f} s", flush=True)
    finally:
        launcher.terminate()
        launcher.wait()
    return times


def next_metrics(folder, launcher):
    runs = pathlib.Path(folder) / "runs"
    found = lambda: next(runs.glob("*/metrics.jsonl"), None)
    wait(found, launcher)
    return found()


def wait(condition, launcher):
    limit = time.monotonic() + 120
    while not condition():
        if launcher.poll() is not None or time.monotonic() > limit:
            sys.exit("the training ended or hangs")
        time.sleep(0.002)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def checkpoint(metrics):
    folder = metrics.parent / "checkpoints"
    try:
        names = [name for name in os.listdir(folder) if name.startswith("step-") and name[5:].isdigit()]
    except FileNotFoundError:
        return 0
    return max((int(name[5:]) for name in names), default=0)


def steps(metrics):
    return last_step(metrics) > 0


def last_step(metrics):
    try:
        with open(metrics, "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError):
            continue
    return 0


if __name__ == "__main__":
    main()
