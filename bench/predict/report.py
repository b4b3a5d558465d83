#!/usr/bin/env python3
"""Compares step times predicted by `lockstep plan` with those measured by `lockstep bench step` on this machine.

    cargo build --release && python3 bench/predict/report.py [--rounds 5] [--binary target/release/lockstep] [--parts]

Measures README's model and `small` on 1, 2 and 4 ranks. The speed of a shared machine changes within minutes, so short
calibrations and measurements alternate. The prediction of a round is the mean of the predictions from the calibrations
before and after it. Prints medians over the rounds of predicted time, measured time and error, the ranges of the last two,
and whether the memory of the states equals the prediction. A measurement is repeated if other programs used the cores; if
that does not help, the row says so. --parts prints the predicted and measured time of each part of the step.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import tempfile

SMALL = """name = "small"
[model]
preset = "small"
[data]
seq = 256
[train]
micro_batch = 4
global_batch = {batch}
steps = 1000000
"""

# The share of the cores that other programs may use during a measurement.
TOLERATED = 0.04


def ticks():
    """Seconds of all cores: busy, in total, and used by our child processes."""
    with open("/proc/stat") as file:
        cores = [int(word) for word in file.readline().split()[1:9]]
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    hertz = os.sysconf("SC_CLK_TCK")
    idle = cores[3] + cores[4]
    return (sum(cores) - idle) / hertz, sum(cores) / hertz, own.ru_utime + own.ru_stime


def run(binary, *words):
    """Runs a command. Returns its output and the share of the cores that other programs used."""
    before = ticks()
    done = subprocess.run([binary, *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    busy, passed, own = (now - then for now, then in zip(ticks(), before))
    return done.stdout, max(0.0, busy - own) / passed


def quietly(tries, binary, *words):
    """Like `run`, but repeats a disturbed run up to `tries` times and returns the least disturbed one."""
    tried = []
    while len(tried) < tries and (not tried or tried[-1][1] > TOLERATED):
        tried.append(run(binary, *words))
    return min(tried, key=lambda attempt: attempt[1])


def cases(folder, ranks):
    """Yields name, run file, overrides, and steps to measure."""
    sets = [f"layout.data={ranks}", f"train.micro_batch={min(8, 16 // ranks)}"]
    yield "grammar", "examples/grammar.toml", sets, 8
    path = os.path.join(folder, f"small-{ranks}.toml")
    with open(path, "w") as file:
        file.write(SMALL.format(batch=4 * ranks))
    yield "small", path, [f"layout.data={ranks}"], 1


class Case:
    """Predictions and measurements of one model on a number of ranks."""

    def __init__(self, name, ranks, path, sets):
        self.name, self.ranks, self.path = name, ranks, path
        self.typed = [word for value in sets for word in ("--set", value)]
        self.plans, self.steps, self.others = [], [], []

    def predict(self, binary, machine, others):
        """Adds the prediction of one calibration, during which other programs used the share `others` of the cores."""
        self.others.append(others)
        words = ("plan", self.path, "--cluster", machine, "--ranks", str(self.ranks), "--json", *self.typed)
        self.plans.append(json.loads(run(binary, *words)[0]))

    def measure(self, binary, threads, steps, tries):
        words = ("bench", "step", "--config", self.path, "--ranks", str(self.ranks), "--json", *self.typed)
        how = ("--threads", str(threads), "--steps", str(steps))
        printed, others = quietly(tries, binary, *words, *how)
        self.steps.append(json.loads(printed.splitlines()[-1]))
        self.others.append(others)

    def predicted(self):
        """Predicted milliseconds of each round."""
        each = [1e3 * plan["step_s"] for plan in self.plans]
        return [(before + after) / 2 for before, after in zip(each, each[1:])]

    def measured(self):
        return [step["mean_ms"] for step in self.steps]

    def errors(self):
        return [100 * (predicted / measured - 1) for predicted, measured in zip(self.predicted(), self.measured())]

    def states(self):
        """Whether the memory of the states equals the prediction."""
        plan, tags = self.plans[0]["memory"][0], ("parameters", "gradients", "optimizer")
        held = [{row["tag"]: row["peak"] for row in step["memory"]} for step in self.steps]
        return all(plan[tag] == each[tag] for each in held for tag in tags)

    def row(self):
        predicted, measured, errors, busy = self.predicted(), self.measured(), self.errors(), max(self.others)
        return (
            f"{self.name:<8} {self.ranks:>5} {statistics.median(predicted):>9.1f}ms {statistics.median(measured):>9.1f}ms"
            f" {min(measured):>8.1f}–{max(measured):<8.1f} {statistics.median(errors):>+6.1f}%"
            f" {min(errors):>+6.1f} to {max(errors):<+6.1f} {'to the byte' if self.states() else 'differ'}"
            + (f"  (other programs used {100 * busy:.0f}% of the cores)" if busy > TOLERATED else "")
        )

    def parts(self):
        predicted, measured = [predicted_parts(plan) for plan in self.plans], [measured_parts(step) for step in self.steps]
        for kind in sorted({kind for parts in predicted + measured for kind in parts}):
            both = [statistics.median(parts.get(kind, 0.0) for parts in each) for each in (predicted, measured)]
            if max(both) > 0:
                print(f"    {kind:<12} {both[0]:>9.2f}ms {both[1]:>9.2f}ms")


def predicted_parts(plan):
    time = plan["time"]
    parts = {kind: 1e3 * seconds for kind, seconds in plan["computing"]}
    exposed = sum(time[key] for key in ("tensor", "context", "expert", "data"))
    return {**parts, "exposed_comm": 1e3 * exposed, "waiting": 1e3 * time["straggling"], "rest": 1e3 * time["host"]}


def measured_parts(step):
    parts = dict(step["time_ms"])
    total, both = sum(parts.values()), parts.pop("exposed_comm")
    alone = total * step["comm_exposed_least"]
    return {**parts, "exposed_comm": alone, "waiting": both - alone}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of small per round; README's model runs eight times as many")
    parser.add_argument("--binary", default="target/release/lockstep")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--tries", type=int, default=4, help="maximum number of repetitions of a disturbed measurement")
    args = parser.parse_args()
    cores, done = os.cpu_count() or 1, []
    with tempfile.TemporaryDirectory() as folder:
        machine = os.path.join(folder, "machine.toml")
        for ranks in (int(word) for word in args.ranks.split(",")):
            given = list(cases(folder, ranks))
            here = [(Case(name, ranks, path, sets), times) for name, path, sets, times in given]
            done += [case for case, _ in here]
            for number in range(args.rounds + 1):
                words = ("bench", "machine", "--out", machine, "--ranks", str(ranks), "--rounds", "1")
                printed = run(args.binary, *words)[0]
                print(printed.rsplit("written", 1)[0], end="", flush=True)
                busy = re.search(r"other programs took (\d+)%", printed)
                for case, _ in here:
                    case.predict(args.binary, machine, int(busy[1]) / 100 if busy else 0.0)
                if number < args.rounds:
                    for case, times in here:
                        case.measure(args.binary, max(1, cores // ranks), times * args.steps, args.tries)
            for case, _ in here:
                print(f"{case.name} on {ranks}:", " ".join(f"{error:+.1f}%" for error in case.errors()), flush=True)
    print(f"\n{'model':<8} {'ranks':>5} {'predicted':>11} {'measured':>11} {'from–to':^17} {'error':>7} {'from–to':^16} states")
    for case in done:
        print(case.row())
        if args.parts:
            case.parts()


if __name__ == "__main__":
    main()
