"""Starts each engine: one call, new processes, one op at every size.

Knows nothing of rounds, medians or bars. A call returns the engine's records, or raises Failed with
what it said.
"""

import json
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PYTHON = HERE.parent / ".venv" / "bin" / "python"
BUILD = HERE / ".build"
SECONDS = 900

LOCKSTEP = {
    "lockstep-shm": ["--engine", "shm", "--buffers", "ordinary"],
    "lockstep-sym": ["--engine", "shm", "--buffers", "symmetric"],
    "lockstep-priv": ["--engine", "shm", "--buffers", "private"],
    "lockstep-tcp": ["--engine", "tcp", "--buffers", "ordinary"],
}
PEERS = ["gloo", "openmpi", "bound"]
NAMES = [*LOCKSTEP, *PEERS]

C_TYPES = {"f32": "float", "f64": "double"}


class Failed(Exception):
    pass


@dataclass
class Job:
    op: str
    sizes: list  # bytes of the full buffer
    ranks: int
    dtype: str
    lockstep: Path

    @property
    def bytes(self):
        return ",".join(str(size) for size in self.sizes)


def runs(engine, op):
    """The bound exists for all_reduce only."""
    return engine != "bound" or op == "all_reduce"


def start(engine, job):
    """Runs one engine and returns its records, one per size."""
    if engine in LOCKSTEP:
        return finish([lockstep(engine, job)])
    return {"gloo": gloo, "openmpi": openmpi, "bound": bound}[engine](job)


def prepare(engines, dtype, lockstep_path):
    """Builds the engines. Returns those that can run, and the reasons why others cannot."""
    reasons = {}
    for engine in engines:
        if engine in LOCKSTEP and not os.access(lockstep_path, os.X_OK):
            reasons[engine] = f"no program at {lockstep_path}; run cargo build --release"
        if engine in ("gloo", "openmpi") and not PYTHON.exists():
            reasons[engine] = "no bench/peers/.venv; run scripts/install-peers.sh"
    if "bound" in engines:
        build_bound(dtype)
    return [engine for engine in engines if engine not in reasons], reasons


def build_lockstep():
    """Builds target/release/lockstep. If the build fails, cargo prints the errors and only the peers run."""
    subprocess.run(["cargo", "build", "--release"], cwd=ROOT)
    return ROOT / "target" / "release" / "lockstep"


def build_bound(dtype):
    BUILD.mkdir(exist_ok=True)
    kind = [f"-DELEM={C_TYPES[dtype]}", f'-DDTYPE="{dtype}"']
    flags = ["-O3", "-march=native", "-pthread", *kind]
    subprocess.run(["cc", *flags, HERE / "bound.c", "-o", BUILD / "bound", "-lm"], check=True)


def lockstep(engine, job):
    command = [job.lockstep, "bench", "comm", "--op", job.op, "--sizes", job.bytes]
    command += ["--ranks", str(job.ranks), *LOCKSTEP[engine], "--dtype", job.dtype, "--json"]
    return launch(command)


def gloo(job):
    """Processes that rendezvous at a free port of the loopback interface."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job.ranks)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [PYTHON, HERE / "gloo.py", job.op, job.bytes, job.dtype]
    return finish([launch(command, shared | {"RANK": str(rank)}) for rank in range(job.ranks)])


def openmpi(job):
    """Open MPI chooses transport and algorithm. With more ranks than cores, --oversubscribe makes idle
    ranks yield, which is the default; with a core per rank they spin."""
    mpirun = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-n", str(job.ranks)]
    return finish([launch([*mpirun, PYTHON, HERE / "openmpi.py", job.op, job.bytes, job.dtype], {"OMP_NUM_THREADS": "1"})])


def bound(job):
    return finish([launch([BUILD / "bound", str(job.ranks), job.bytes])])


def launch(command, extra_environment={}):
    # A new session, so that a process that hangs can be killed with its children.
    return subprocess.Popen(
        [str(word) for word in command], env=os.environ | extra_environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )


def finish(processes):
    """Waits for every rank. The records are the output of rank 0."""
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {SECONDS} s")
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    for process, (_, complaint) in zip(processes, outputs):
        if process.returncode != 0:
            raise Failed(f"exit {process.returncode}: {last_line(complaint)}")
    records = [json.loads(line) for line in outputs[0][0].splitlines() if line.startswith("{")]
    if not records:
        raise Failed("it printed no measurements")
    return records


def last_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
