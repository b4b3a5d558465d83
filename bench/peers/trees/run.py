#!/usr/bin/env python3
"""Boosted trees of Lockstep compared with XGBoost, LightGBM and hessboost, interleaved in one run.

Each round trains every program once on one data set, each in a process of its own; the table has medians over rounds.
README.md tells what is measured and how to read it.
"""

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PYTHON = HERE.parent / ".venv" / "bin" / "python"
LAYOUTS = {"1 thread": (1, 1), "2 threads": (1, 2), "2 workers": (2, 1)}
TITLES = {
    "a": "1M x 28 dense",
    "b": "1M x 28, 30% missing",
    "c": "400k x 50, 5 classes",
    "d": "160k x 1000, 99% sparse",
    "breast_cancer": "scikit-learn breast_cancer",
    "digits": "scikit-learn digits",
}
# Bytes that a rank of Lockstep sends over TCP, by data set.
SENT = {}
PROGRAMS = ["lockstep", "xgboost", "lightgbm", "hessboost"]


def main():
    args = parse()
    if "hessboost" in args.programs:
        subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=HERE / "hessboost", check=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pathlib, data;"
        "data.prepare(pathlib.Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))"
    )
    for name in args.data:
        subprocess.run([args.python, "-c", code, HERE, args.folder, name, str(args.scale)], check=True)
    records = []
    for name in args.data:
        for layout in args.layouts:
            programs = [program for program in args.programs if runs_on(program, layout)]
            for round_number in range(args.rounds):
                order = programs[round_number % len(programs):] + programs[: round_number % len(programs)]
                for program in order:
                    record = measure(args, program, name, layout)
                    records.append({"program": program, "data": name, "layout": layout, **record})
                    print(f"  {name} {layout} {program}: {record['seconds']:.2f} s", file=sys.stderr, flush=True)
            print(table(args, name, layout, records) + "\n", flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(records, indent=1))


def classes_of(name):
    return {"c": 5, "digits": 10}.get(name, 2)


def runs_on(program, layout):
    return program != "hessboost" or LAYOUTS[layout][0] == 1


def measure(args, program, name, layout):
    workers, threads = LAYOUTS[layout]
    if program == "lockstep":
        return lockstep(args, name, workers, threads)
    job = {
        "peer": program, "name": name, "folder": str(args.folder), "workers": workers, "threads": threads,
        "classes": classes_of(name), "rounds": args.boosting_rounds,
    }
    command = [args.python, HERE / "peer.py", json.dumps(job)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{program}: {done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def lockstep(args, name, workers, threads):
    folder = Path(tempfile.mkdtemp(prefix="lockstep-trees-"))
    try:
        train, test = (args.folder / f"{name}-{part}" for part in ("train", "test"))
        is_sparse = Path(f"{train}-x.libsvm").exists()
        suffix = "libsvm" if is_sparse else "npy"
        label = "" if is_sparse else f'label = "{train.name}-y.npy"\n'
        classes = classes_of(name)
        objective = f'"softmax"\nclasses = {classes}' if classes > 2 else '"logistic"'
        run = folder / "bench.toml"
        run.write_text(
            f'[data]\ntrain = "{train}-x.{suffix}"\n{label}'
            f"[trees]\nobjective = {objective}\nrounds = {args.boosting_rounds}\neta = 0.1\nmax_depth = 6\nmax_bin = 256\n"
            f"[run]\nthreads = {threads}\nreport_every = 1000\neval_every = 1000\n"
        )
        command = [args.lockstep, "trees", "train", run, "--ranks", str(workers), "--runs", folder / "runs"]
        before = cpu_of_children()
        out = output_of([*command, "--engine", args.engine])
        cpu = cpu_of_children() - before
        seconds = float(re.search(r"trees in ([\d.]+) s", out).group(1))
        sent = sent_bytes(out)
        if workers > 1 and args.engine != "tcp":
            # Ranks of one host access each other's buffers in place, which does not count as sent. The bytes are those of TCP.
            if name not in SENT:
                SENT[name] = sent_bytes(output_of([*command, "--engine", "tcp", "--set", "name=tcp"]))
            sent = SENT[name]
        memory = max(
            json.loads(line).get("mem_bytes", 0) for line in open(folder / "runs" / "bench" / "metrics.jsonl")
        )
        # The peers have the values in memory before the measurement starts; here they are a mapped file.
        memory = memory * workers - (0 if is_sparse else Path(f"{train}-x.npy").stat().st_size)
        metric = "merror" if classes > 2 else "auc"
        label = [] if is_sparse else ["--label", f"{test.name}-y.npy"]
        command = [args.lockstep, "trees", "eval", folder / "runs" / "bench", f"{test}-x.{suffix}", *label, "--metrics", metric]
        value = float(output_of(command).split()[1])
        return {"seconds": seconds, "cpu": cpu, "memory": memory, "quality": value, "sent": sent}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def output_of(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"lockstep: {done.stderr}")
    return done.stdout


def sent_bytes(out):
    return float(re.search(r"sent ([\d.]+) MiB", out).group(1)) * 2**20


def cpu_of_children():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(args, name, layout, records):
    metric = "error" if classes_of(name) > 2 else "AUC"
    lines = [f"({name}) {TITLES.get(name, name)}, {layout}, {args.boosting_rounds} rounds, medians of {args.rounds}:"]
    lines.append(f"{'':10} {'seconds':>9} {'ratio':>6} {'CPU s':>8} {'ratio':>6} {'memory MB':>10} {metric:>8} {'sent MB':>9}")
    mine = {
        program: [r for r in records if (r["program"], r["data"], r["layout"]) == (program, name, layout)]
        for program in args.programs
        if runs_on(program, layout)
    }
    median = lambda program, key: statistics.median(record[key] for record in mine[program])

    def ratio(program, key):
        """The median over rounds of the ratio to XGBoost in the same round."""
        pairs = zip(mine[program], mine.get("xgboost", []))
        return statistics.median([one[key] / other[key] for one, other in pairs] or [float("nan")])

    for program in mine:
        lines.append(
            f"{program:10} {median(program, 'seconds'):9.2f} {ratio(program, 'seconds'):6.2f}"
            f" {median(program, 'cpu'):8.2f} {ratio(program, 'cpu'):6.2f} {median(program, 'memory') / 1e6:10.1f}"
            f" {median(program, 'quality'):8.4f} {median(program, 'sent') / 1e6:9.1f}"
        )
    return "\n".join(lines)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", default=["a", "b", "c", "d", "breast_cancer", "digits"])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions [default: 3]")
    parser.add_argument("--boosting-rounds", type=int, default=100)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the rows of a to d")
    parser.add_argument("--engine", default="shm", choices=["shm", "tcp", "threads"])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/lockstep-bench-trees"), help="folder of the data")
    parser.add_argument("--lockstep", type=Path, default=ROOT / "target" / "release" / "lockstep")
    parser.add_argument("--python", type=Path, default=PYTHON)
    parser.add_argument("--json", help="file for all records")
    return parser.parse_args()


if __name__ == "__main__":
    main()
