#!/usr/bin/env python3
"""What `lockstep plan` foretells of this machine against what `lockstep bench step` measures on it.

    cargo build --release && python3 bench/predict/report.py [--rounds 3] [--binary target/release/lockstep] [--parts]

Each round calibrates with `lockstep bench machine`, then foretells and measures the README's model and `small` on 1, 2
and 4 ranks. Prints the medians of the foretold and the measured step, the error, the range of the measured ones, and
whether states take the bytes that were foretold. What was measured while other programs took the cores is measured
again; where that does not help, the row says so. --parts: where the time goes, foretold and measured.
"""

import argparse
import json
import os
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

# Of the cores, what others may take.
TOLERATED = 0.04


def ticks():
    """Seconds in which the cores were busy, those that passed on all of them, and those of our own children."""
    with open("/proc/stat") as file:
        cores = [int(word) for word in file.readline().split()[1:9]]
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    hertz = os.sysconf("SC_CLK_TCK")
    idle = cores[3] + cores[4]
    return (sum(cores) - idle) / hertz, sum(cores) / hertz, own.ru_utime + own.ru_stime


def run(binary, *words):
    """Its output, and the share of the cores that others took meanwhile."""
    before = ticks()
    done = subprocess.run([binary, *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    busy, passed, own = (now - then for now, then in zip(ticks(), before))
    return done.stdout, max(0.0, busy - own) / passed


def quietly(tries, binary, *words):
    """The same when others took nothing; otherwise the least disturbed of some tries."""
    tried = []
    while len(tried) < tries and (not tried or tried[-1][1] > TOLERATED):
        tried.append(run(binary, *words))
    return min(tried, key=lambda told: told[1])


def cases(folder, all_ranks):
    for ranks in all_ranks:
        sets = [f"layout.data={ranks}", f"train.micro_batch={min(8, 16 // ranks)}"]
        yield "grammar", ranks, "examples/grammar.toml", sets
    for ranks in all_ranks:
        path = os.path.join(folder, f"small-{ranks}.toml")
        with open(path, "w") as file:
            file.write(SMALL.format(batch=4 * ranks))
        yield "small", ranks, path, [f"layout.data={ranks}"]


class Case:
    """What was foretold and measured of one model on so many ranks."""

    def __init__(self):
        self.foretold, self.measured, self.told, self.came, self.others = [], [], [], [], []
        self.states = True

    def take(self, plan, step, others):
        self.foretold.append(plan["step_s"] * 1e3)
        self.measured.append(step["step_ms"])
        self.others.append(others)
        time = plan["time"]
        waits = sum(time[key] for key in ("tensor", "context", "expert", "data", "straggling"))
        parts = {kind: seconds * 1e3 for kind, seconds in plan["computing"]}
        self.told.append({**parts, "exchange": 1e3 * waits, "rest": 1e3 * time["host"]})
        self.came.append(dict(step["time_ms"]))
        held = {row["tag"]: row["peak"] for row in step["memory"]}
        states = ("parameters", "gradients", "optimizer")
        self.states &= all(plan["memory"][0][tag] == held[tag] for tag in states)

    def row(self, name, ranks):
        told, came = statistics.median(self.foretold), statistics.median(self.measured)
        busy = max(self.others)
        return (
            f"{name:<10} {ranks:>5} {told:>9.1f}ms {came:>9.1f}ms {100 * (told / came - 1):>+7.1f}%"
            f"  {min(self.measured):>8.1f}–{max(self.measured):<8.1f} {'to the byte' if self.states else 'differ'}"
            + (f"  (others took {100 * busy:.0f}% of the cores)" if busy > TOLERATED else "")
        )

    def parts(self):
        kinds = sorted({kind for parts in self.told + self.came for kind in parts})
        for kind in kinds:
            told, came = (
                statistics.median(parts.get(kind, 0.0) for parts in all_parts)
                for all_parts in (self.told, self.came)
            )
            if max(told, came) > 0:
                print(f"    {kind:<12} {told:>9.2f}ms {came:>9.2f}ms")


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--steps", type=int, default=5)
    asked.add_argument("--binary", default="target/release/lockstep")
    asked.add_argument("--parts", action="store_true")
    asked.add_argument("--ranks", default="1,2,4")
    asked.add_argument("--tries", type=int, default=4, help="of a measurement that others disturb")
    asked.add_argument("--machine-rounds", type=int, default=5, help="of each calibration")
    asked = asked.parse_args()
    cores = os.cpu_count() or 1
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        machine = os.path.join(folder, "machine.toml")
        all_cases = list(cases(folder, [int(ranks) for ranks in asked.ranks.split(",")]))
        for number in range(asked.rounds):
            # Each round has a calibration of its own beside what it is to foretell.
            how = ("--ranks", asked.ranks, "--rounds", str(asked.machine_rounds))
            print(run(asked.binary, "bench", "machine", "--out", machine, *how)[0], end="", flush=True)
            for name, ranks, path, sets in all_cases:
                typed = [word for value in sets for word in ("--set", value)]
                words = ("plan", path, "--cluster", machine, "--ranks", str(ranks), "--json", *typed)
                plan = json.loads(run(asked.binary, *words)[0])
                steps = asked.steps * (8 if name == "grammar" else 1)
                words = ("bench", "step", "--config", path, "--ranks", str(ranks), "--json", *typed)
                threads = ("--threads", str(max(1, cores // ranks)), "--steps", str(steps))
                step, others = quietly(asked.tries, asked.binary, *words, *threads)
                result = results.setdefault((name, ranks), Case())
                result.take(plan, json.loads(step.splitlines()[-1]), others)
            print(f"round {number + 1} of {asked.rounds} is over", flush=True)
    print(f"\n{'model':<10} {'ranks':>5} {'foretold':>11} {'measured':>11} {'error':>8}  {'from–to':^17} states")
    for (name, ranks), result in results.items():
        print(result.row(name, ranks))
        if asked.parts:
            result.parts()


if __name__ == "__main__":
    main()
