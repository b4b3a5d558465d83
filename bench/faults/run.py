#!/usr/bin/env python3
"""Creates problems for real, one run each, and checks that `lockstep doctor` names them.

    bench/faults/run.py [--seeds 5] [--only straggler,nan] [--lockstep target/release/lockstep]

Prints a line per run and the fraction that was named. A verdict counts if the doctor's problem is the expected one, or
if the expected limit is among those with at least 5% of the step.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

RUN = """
name = "run"
[model]
preset = "grammar"
[data]
source = "{source}"
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


class Case:
    """One kind of problem: overrides, what happens during the run, and what the doctor must say."""

    def __init__(self, sets=(), args=(), steps=30, during=None, prepare=None, again=None, expect=None, limit_kib=None):
        self.sets, self.args, self.steps = sets, args, steps
        self.during, self.prepare, self.again, self.expect = during, prepare, again, expect
        self.limit_kib = limit_kib


def ranks(launcher):
    """Process ids of the ranks, by rank."""
    out = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True).stdout.split()
    found = {}
    for pid in out:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environment:
            if entry.startswith(b"RANK="):
                found[int(entry.split(b"=")[1])] = int(pid)
    return found


def after_steps(folder, steps=4, timeout=120):
    """Waits until the run has reported a few steps."""
    path, end = folder / "runs/run/metrics.jsonl", time.time() + timeout
    while time.time() < end:
        if path.exists() and path.read_text().count("\n") >= steps:
            return True
        time.sleep(0.05)
    return False


def pulses(folder, launcher, rng, stop):
    rank = rng.randrange(2)
    after_steps(folder, 1)
    pid = ranks(launcher).get(rank)
    while pid and not stop.is_set():
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.06)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.03)
        except ProcessLookupError:
            break
    return rank


def send(number):
    def act(folder, launcher, rng, stop):
        rank = rng.randrange(2)
        after_steps(folder)
        pid = ranks(launcher).get(rank)
        if pid:
            os.kill(pid, number)
        return rank
    return act


def burn(folder, launcher, rng, stop):
    after_steps(folder, 1)
    workers = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    stop.wait()
    for worker in workers:
        worker.kill()
        worker.wait()


def corrupt_tokens(folder, rng, lockstep):
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20000)
    subprocess.run([lockstep, "data", "prepare", str(text), "--out", str(folder / "text.tokens")], check=True, capture_output=True)
    path = folder / "text.tokens"
    data = bytearray(path.read_bytes())
    for at in range(8192, len(data) - 8192, 3000):
        data[at] ^= 0xFF
    path.write_bytes(data)


def corrupt_checkpoint(folder, rng, lockstep):
    for path in (folder / "runs/run/checkpoints").glob("*/rank-*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 + rng.randrange(1000)] ^= 0xFF
        path.write_bytes(data)


def full_disk(folder, rng, lockstep):
    (folder / "runs").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={8 + rng.randrange(3)}m", "tmpfs", str(folder / "runs")], check=True)


def stop_later(folder, launcher, rng, stop):
    """Ends a run that would wait for space forever."""
    after_steps(folder, 8)
    time.sleep(3)
    for pid in [launcher, *ranks(launcher).values()]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def problem(kind, with_rank=False):
    def check(diagnosis, about):
        found = diagnosis.get("problem") or {}
        return found.get("kind") == kind and (not with_rank or found.get("rank") == about)
    return check


def limit(kind, with_rank=False, least=0.05):
    def check(diagnosis, about):
        for entry in diagnosis["limits"]:
            cause = entry["cause"]
            if cause["kind"] == kind and entry["share"] >= least and (not with_rank or cause["rank"] == about):
                return True
        return False
    return check


def advice(word):
    def check(diagnosis, about):
        return any(set.startswith(word) for entry in diagnosis["advice"] for set in entry["sets"])
    return check


CASES = {
    "straggler": Case(steps=60, during=pulses, expect=limit("straggler", with_rank=True)),
    "busy-host": Case(steps=40, during=burn, expect=limit("busy_host")),
    "killed-rank": Case(args=["--max-restarts", "0"], steps=400, during=send(signal.SIGKILL), expect=problem("killed", True)),
    "hung-rank": Case(sets=["comm.timeout_s=5"], args=["--max-restarts", "0"], steps=400, during=send(signal.SIGSTOP), expect=problem("silent_rank", True)),
    "segfault": Case(args=["--max-restarts", "0"], steps=400, during=send(signal.SIGSEGV), expect=problem("killed", True)),
    "nan": Case(sets=["train.lr=1e30", "train.warmup=0"], steps=20, expect=problem("not_finite")),
    "corrupt-data": Case(sets=["data.source=text.tokens", "data.max_corrupt=0"], args=["--max-restarts", "0"], prepare=corrupt_tokens, expect=problem("corrupt_data")),
    "corrupt-checkpoint": Case(sets=["checkpoint.keep=1"], steps=6, again=corrupt_checkpoint, expect=problem("checkpoint_corruption")),
    "memory-limit": Case(sets=["train.micro_batch=4", "train.global_batch=8", "model.dim=1024", "model.layers=8", "model.heads=8"], args=["--max-restarts", "0"], limit_kib=1_300_000, expect=problem("out_of_memory")),
    "checkpoints": Case(sets=["checkpoint.every=1"], steps=40, expect=limit("checkpoint", least=0.02)),
    "recompute": Case(sets=["layout.recompute=full"], steps=30, expect=advice("layout.recompute=")),
    "bubble": Case(sets=["layout.data=1", "layout.pipe=2", "train.micro_batch=8"], steps=30, expect=limit("bubble")),
    "uneven-stages": Case(sets=["layout.data=1", "layout.pipe=2", "train.micro_batch=2", "model.layers=3"], steps=30, expect=limit("bubble")),
    "tensor-communication": Case(sets=["layout.data=1", "layout.tensor=2"], args=["--engine", "tcp"], steps=30, expect=limit("communication")),
    "full-disk": Case(sets=["checkpoint.every=4"], steps=20, prepare=full_disk, during=stop_later, expect=problem("full_disk")),
    "skewed-router": Case(sets=["model.preset=moe-test", "layout.expert=2", "model.experts=8", "model.top_k=1", "model.aux_loss=0", "model.z_loss=0", "train.lr=0.2"], steps=60, expect=limit("expert_imbalance", least=0.02)),
    "tiny-buckets": Case(sets=["comm.bucket_mb=0.001"], args=["--engine", "tcp"], steps=30, expect=limit("communication", least=0.02)),
}


def run(name, case, seed, lockstep):
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix=f"fault-{name}-"))
    source = "builtin:grammar"
    (folder / "run.toml").write_text(RUN.format(source=source, steps=case.steps, seed=seed))
    if case.prepare:
        case.prepare(folder, rng, lockstep)
    sets = [part for set in case.sets for part in ("--set", set)]
    command = [lockstep, "train", "run.toml", *sets, *case.args]
    limits = (lambda: resource.setrlimit(resource.RLIMIT_AS, (case.limit_kib << 10,) * 2)) if case.limit_kib else None
    stop, about = threading.Event(), [None]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=limits)
    if case.during:
        thread = threading.Thread(target=lambda: about.__setitem__(0, case.during(folder, process.pid, rng, stop)))
        thread.start()
    errors = process.communicate(timeout=300)[1]
    stop.set()
    if case.during:
        thread.join()
    if case.again:
        case.again(folder, rng, lockstep)
        resumed = [lockstep, "train", "run.toml", "--resume", "--set", f"train.steps={2 * case.steps}", "--max-restarts", "0", *sets]
        errors += subprocess.run(resumed, cwd=folder, capture_output=True, text=True, timeout=300).stderr
    doctor = subprocess.run([lockstep, "doctor", "runs/run", "--json"], cwd=folder, capture_output=True, text=True)
    try:
        diagnosis = json.loads(doctor.stdout)
    except json.JSONDecodeError:
        print(doctor.stderr, errors[-500:])
        return False, "no diagnosis"
    named = case.expect(diagnosis, about[0])
    if case.prepare is full_disk:
        subprocess.run(["umount", "-l", str(folder / "runs")])
    shutil.rmtree(folder) if named else print(f"  kept {folder}; {errors[-300:]}")
    return named, diagnosis["verdict"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--lockstep", default="target/release/lockstep")
    args = parser.parse_args()
    lockstep = str(Path(args.lockstep).resolve())
    outcomes = []
    for name in args.only.split(","):
        for seed in range(args.seeds):
            named, verdict = run(name, CASES[name], seed, lockstep)
            outcomes.append(named)
            print(f"{name:22} seed {seed}: {'named' if named else 'MISSED':6}  {verdict}", flush=True)
    print(f"{sum(outcomes)} of {len(outcomes)} named")
    return 0 if sum(outcomes) >= 0.95 * len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
