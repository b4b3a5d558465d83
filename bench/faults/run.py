#!/usr/bin/env python3
"""Creates problems for real, one run each, and checks that `lockstep doctor` names them.

    cargo build --release && cargo build --release -p lockstep-comm --example proxy
    bench/faults/run.py [--seeds 5] [--only straggler,nan] [--jobs 4] [--lockstep target/release/lockstep]

Prints a line per run and the fraction that was named. A verdict counts if the doctor's problem is the expected one, or
if the expected limit is among those with at least 5% of the step. Each of the jobs has its own cores. A problem that
this machine does not allow to create, such as a full disk without the right to mount, is skipped and listed.
"""

import argparse
import json
import os
import queue
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from cases import CASES, Job, Skip

RUN = """
name = "run"
[model]
preset = "grammar"
[data]
source = "builtin:grammar"
[train]
steps = {steps}
global_batch = 8
micro_batch = 4
warmup = 2
log_every = 2
eval_every = 0
seed = {seed}
[layout]
data = 2
"""

# Longest run in seconds.
TIMEOUT = 300


def run(name, seed, args):
    """Whether the doctor named the problem, None if it cannot be created, and its verdict."""
    case, folder = CASES[name], Path(tempfile.mkdtemp(prefix=f"fault-{name}-"))
    environment = {"LOCKSTEP_DEVICE": "cpu", **os.environ, **case.environment}
    job = Job(folder, random.Random(f"{name} {seed}"), args.lockstep, args.proxy, environment, stop=threading.Event())
    (folder / "run.toml").write_text(RUN.format(steps=case.steps, seed=seed))
    cleanup = []
    try:
        cleanup = case.prepare(job) if case.prepare else []
        named, verdict, errors = diagnose(case, job)
    except Skip as skip:
        named, verdict, errors = None, f"skipped: {skip}", ""
    finally:
        job.stop.set()
        for act in cleanup:
            act()
    if named is False:
        print(f"  kept {folder}: {errors[-400:]}", flush=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return named, verdict


def diagnose(case, job):
    """Runs the case and asks the doctor."""
    sets = [part for set in case.sets for part in ("--set", set)]
    train = [job.lockstep, "train", "run.toml", *sets, *case.args]
    command = case.command(job, train) if case.command else train
    limit = case.limit_kib and case.limit_kib << 10
    limits = (lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))) if limit else None
    options = {"cwd": job.folder, "env": job.environment, "text": True}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=limits, **options)
    job.launcher, about = process.pid, [None]
    thread = threading.Thread(target=lambda: about.__setitem__(0, case.during(job)) if case.during else None)
    thread.start()
    try:
        errors = process.communicate(timeout=TIMEOUT)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        errors = process.communicate()[1] + "\nthe run took too long"
    job.stop.set()
    thread.join()
    if case.again:
        case.again(job)
        resumed = [*train, "--resume", "--set", f"train.steps={2 * case.steps}", "--max-restarts", "0"]
        errors += subprocess.run(resumed, capture_output=True, timeout=TIMEOUT, **options).stderr
    doctor = subprocess.run([job.lockstep, "doctor", "runs/run", "--json"], capture_output=True, **options)
    try:
        diagnosis = json.loads(doctor.stdout)
    except json.JSONDecodeError:
        return False, "no diagnosis", errors + doctor.stderr
    (job.folder / "diagnosis.json").write_text(doctor.stdout)
    return case.expect(diagnosis, about[0]), diagnosis["verdict"], errors


def work(tasks, outcomes, cores, args):
    """Runs tasks on some cores until there are none left."""
    if cores:
        os.sched_setaffinity(0, cores)
    while True:
        try:
            name, seed = tasks.get_nowait()
        except queue.Empty:
            return
        try:
            named, verdict = run(name, seed, args)
        except Exception as error:  # the other runs go on
            named, verdict = False, f"the harness failed: {error!r}"
        outcomes.append((name, named))
        word = {True: "named", False: "MISSED", None: "-"}[named]
        print(f"{name:22} seed {seed}: {word:6}  {verdict}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each on its own cores")
    parser.add_argument("--lockstep", default="target/release/lockstep")
    parser.add_argument("--proxy", default="target/release/examples/proxy")
    args = parser.parse_args()
    args.lockstep, args.proxy = str(Path(args.lockstep).resolve()), str(Path(args.proxy).resolve())
    tasks, outcomes = queue.Queue(), []
    for seed in range(args.seeds):
        for name in args.only.split(","):
            tasks.put((name, seed))
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // args.jobs
    own = [set(cores[job * each : (job + 1) * each]) if args.jobs > 1 else None for job in range(args.jobs)]
    workers = [threading.Thread(target=work, args=(tasks, outcomes, part, args)) for part in own]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    counted = [named for _, named in outcomes if named is not None]
    kinds = {name for name, named in outcomes if named is not None}
    skipped = sorted({name for name, named in outcomes if named is None})
    print(f"{sum(counted)} of {len(counted)} named, {len(kinds)} kinds" + (f"; skipped: {', '.join(skipped)}" if skipped else ""))
    return 0 if sum(counted) >= 0.95 * len(counted) else 1


if __name__ == "__main__":
    sys.exit(main())
