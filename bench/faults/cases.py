"""The problems that `run.py` creates, and what the doctor must say about each."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

HERE = Path(__file__).parent


class Skip(Exception):
    """The problem cannot be created on this machine."""


@dataclass
class Case:
    """One kind of problem: overrides, what happens before and during the run, and what the doctor must say."""

    expect: Callable
    sets: tuple = ()
    args: tuple = ()
    steps: int = 30
    # Called before the run; returns functions that clean up.
    prepare: Optional[Callable] = None
    # Called in a thread during the run; returns the rank that it is about.
    during: Optional[Callable] = None
    # Called after the run, which is then resumed.
    again: Optional[Callable] = None
    # The command that starts the run, if it is not `lockstep train`.
    command: Optional[Callable] = None
    limit_kib: Optional[int] = None
    environment: dict = field(default_factory=dict)


@dataclass
class Job:
    """A run: where it is, its random numbers, the programs, and what has been started."""

    folder: Path
    rng: object
    lockstep: str
    proxy: str
    environment: dict
    launcher: int = 0
    stop: object = None
    link: object = None

    def call(self, *args):
        subprocess.run([self.lockstep, *args], cwd=self.folder, check=True, capture_output=True)


def ranks(launcher):
    """Process ids of the ranks, by rank."""
    found = {}
    for pid in children(launcher):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environment:
            if entry.startswith(b"RANK="):
                found[int(entry.split(b"=")[1])] = pid
    return found


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            pass
    return found


def after_reports(job, reports=4, timeout=120):
    """Waits until the run has reported a few times."""
    path, end = job.folder / "runs/run/metrics.jsonl", time.time() + timeout
    while time.time() < end and not job.stop.is_set():
        if path.exists() and path.read_text().count("\n") >= reports:
            return True
        time.sleep(0.05)
    return False


def pulses(job):
    """Stops a rank two thirds of the time."""
    rank = job.rng.randrange(2)
    after_reports(job, 1)
    pid = ranks(job.launcher).get(rank)
    while pid and not job.stop.is_set():
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.06)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.03)
        except ProcessLookupError:
            break
    return rank


def send(number):
    def act(job):
        rank = job.rng.randrange(2)
        after_reports(job)
        pid = ranks(job.launcher).get(rank)
        if pid:
            os.kill(pid, number)
        return rank
    return act


def burn(job):
    """Keeps every core of the run busy with two other processes."""
    after_reports(job, 1)
    count = 2 * len(os.sched_getaffinity(0))
    workers = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    job.stop.wait()
    for worker in workers:
        worker.kill()
        worker.wait()


def write_tokens(job, sentences):
    words = "the quick brown fox jumps over a lazy dog while seven old cats sleep near warm stones".split()
    lines = (" ".join(job.rng.choices(words, k=12)) + ".\n" for _ in range(sentences))
    (job.folder / "text.txt").write_text("".join(lines))
    job.call("data", "prepare", "text.txt", "--out", "text.tokens")
    return job.folder / "text.tokens"


def corrupt_tokens(job):
    path = write_tokens(job, 15_000)
    data = bytearray(path.read_bytes())
    for at in range(8192, len(data) - 8192, 3000):
        data[at] ^= 0xFF
    path.write_bytes(data)
    return []


def corrupt_checkpoint(job):
    for path in (job.folder / "runs/run/checkpoints").glob("*/rank-*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 + job.rng.randrange(1000)] ^= 0xFF
        path.write_bytes(data)


def unmount(path):
    return lambda: subprocess.run(["umount", "-l", str(path)], capture_output=True)


def full_disk(job):
    runs = job.folder / "runs"
    runs.mkdir()
    options = f"size={8 + job.rng.randrange(3)}m"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(runs)], capture_output=True)
    if mounted.returncode != 0:
        raise Skip("mounting is not allowed")
    return [unmount(runs)]


def kill_later(job):
    """Ends a run that would wait for space forever."""
    after_reports(job, 8)
    job.stop.wait(3)
    for pid in [job.launcher, *ranks(job.launcher).values()]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def slow_reader(job):
    """Puts the token file on storage that needs milliseconds for every page."""
    path, mountpoint = write_tokens(job, 200_000), job.folder / "slow"
    mountpoint.mkdir()
    delay = str(2 + job.rng.randrange(3))
    server = subprocess.Popen([sys.executable, HERE / "slow_files.py", path, mountpoint, delay], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
    cleanup = [server.kill, server.wait, unmount(mountpoint)]
    if server.stdout.readline() != "mounted\n":
        raise Skip("mounting is not allowed")
    return cleanup


def through_proxy(job):
    """Connects the ranks through a link whose bandwidth can be limited."""
    if not Path(job.proxy).exists():
        raise Skip(f"{job.proxy} does not exist")
    link = subprocess.Popen([job.proxy, "listen=127.0.0.1:0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    job.link = link
    job.environment["LOCKSTEP_SOCKS5"] = link.stdout.readline().split()[-1]
    return [link.kill, link.wait]


def throttle(job):
    after_reports(job, 3)
    job.link.stdin.write(f"rate={(8 + job.rng.randrange(8)) * 1e6:.0f}\n")
    job.link.stdin.flush()


def launch(job, ranks, command, *args):
    return [job.lockstep, "launch", "--nproc-per-node", str(ranks), "--log-dir", "runs/run/logs", *args, "--", *command]


def wrong_world_size(job, train):
    return launch(job, job.rng.choice([1, 3, 4]), train)


def other_options(job, train):
    change = job.rng.choice(["train.lr=1e-$((3+RANK))", "train.clip=0.$((5+RANK))", "train.seed=$RANK"])
    words = " ".join(f"'{word}'" for word in train)
    return launch(job, 2, ["sh", "-c", f"{words} --set {change}"])


def blocked_port(job, train):
    """Node 1 of 2, whose master is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    return launch(job, 1, train, *options)


def problem(kind, with_rank=False, category=None):
    def check(diagnosis, about):
        found = diagnosis.get("problem") or {}
        return (found.get("kind") == kind and (not with_rank or found.get("rank") == about)
                and category in (None, found.get("class")))
    return check


def limit(kind, with_rank=False, least=0.05, **more):
    def check(diagnosis, about):
        for entry in diagnosis["limits"]:
            cause = entry["cause"]
            fits = cause["kind"] == kind and all(cause.get(key) == value for key, value in more.items())
            if fits and entry["share"] >= least and (not with_rank or cause["rank"] == about):
                return True
        return False
    return check


def advice(word):
    def check(diagnosis, about):
        return any(set.startswith(word) for entry in diagnosis["advice"] for set in entry["sets"])
    return check


def evidence(words):
    def check(diagnosis, about):
        return any(words in line for entry in diagnosis["limits"] for line in entry["evidence"])
    return check


def both(*checks):
    return lambda diagnosis, about: all(check(diagnosis, about) for check in checks)


ONCE = ("--max-restarts", "0")
PIPE = ("layout.data=1", "layout.pipe=2")
LARGE = ("train.micro_batch=4", "model.dim=1024", "model.layers=8", "model.heads=8")
SKEWED = ("model.preset=moe-test", "layout.expert=2", "model.experts=8", "model.top_k=1", "model.aux_loss=0",
          "model.z_loss=0", "train.lr=0.2")

CASES = {
    "straggler": Case(limit("straggler", with_rank=True), steps=60, during=pulses),
    "busy-host": Case(limit("busy_host"), steps=40, during=burn),
    "killed-rank": Case(problem("killed", True, "infrastructure"), args=ONCE, steps=4000, during=send(signal.SIGKILL)),
    "hung-rank": Case(problem("silent_rank", True, "infrastructure"), sets=("comm.timeout_s=5",), args=ONCE, steps=4000,
                      during=send(signal.SIGSTOP)),
    "segfault": Case(problem("killed", True), args=ONCE, steps=4000, during=send(signal.SIGSEGV)),
    "nan": Case(problem("not_finite", category="deterministic"), sets=("train.lr=1e30", "train.warmup=0"), steps=20),
    "corrupt-data": Case(problem("corrupt_data", category="data_dependent"), args=ONCE, prepare=corrupt_tokens,
                         sets=("data.source=text.tokens", "data.max_corrupt=0")),
    "corrupt-checkpoint": Case(problem("checkpoint_corruption"), sets=("checkpoint.keep=1",), steps=6,
                               again=corrupt_checkpoint),
    "memory-limit": Case(problem("out_of_memory"), sets=LARGE, args=ONCE, limit_kib=1_300_000),
    "full-disk": Case(problem("full_disk"), sets=("checkpoint.every=4",), steps=20, prepare=full_disk, during=kill_later),
    "wrong-world-size": Case(problem("launch_mismatch"), command=wrong_world_size),
    "other-options": Case(problem("launch_mismatch"), command=other_options),
    "blocked-port": Case(problem("blocked_port"), sets=("comm.timeout_s=4",), command=blocked_port,
                         environment={"LOCKSTEP_TOKEN": "5a" * 32}),
    "checkpoints": Case(limit("checkpoint", least=0.02), sets=("checkpoint.every=1",), steps=40),
    "slow-reader": Case(limit("data"), sets=("data.source=slow/text.tokens",), steps=40, prepare=slow_reader),
    "recompute": Case(advice("layout.recompute="), sets=("layout.recompute=full",)),
    "bubble": Case(limit("bubble"), sets=(*PIPE, "train.micro_batch=8")),
    "uneven-stages": Case(both(limit("bubble"), evidence("the stages are uneven")),
                          sets=(*PIPE, "train.micro_batch=2", "model.layers=3")),
    "tensor-communication": Case(limit("communication", axis="tensor"), sets=("layout.data=1", "layout.tensor=2"),
                                 args=("--engine", "tcp")),
    "throttled-link": Case(limit("slow_link"), steps=36, args=("--engine", "tcp"), prepare=through_proxy, during=throttle),
    "tiny-buckets": Case(both(limit("communication", least=0.02, axis="data"), evidence("buckets of")),
                         sets=("comm.bucket_mb=0.001",), args=("--engine", "tcp")),
    "skewed-router": Case(limit("expert_imbalance", least=0.02), sets=SKEWED, steps=60),
}
