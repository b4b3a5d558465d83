#!/usr/bin/env python3
"""Data parallel training: Lockstep compared with PyTorch DDP and FSDP2, and with independent runs.

Each round starts every program once on one configuration; the table holds medians over rounds. README.md tells what
is measured and how to read it.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PYTHON = HERE.parent / ".venv" / "bin" / "python"
RANKS = 2
LIMIT_S = 1800

sys.path.insert(0, str(HERE.parent / "step"))
from configs import CONFIGS

DATA, ZERO1, ZERO3 = "lockstep data", "lockstep zero=1", "lockstep zero=3"
DDP, FSDP2, ALONE, PAIR = "torch ddp", "torch fsdp2", "lockstep alone", "two alone"
PROGRAMS = [DATA, DDP, ZERO3, FSDP2, ZERO1, ALONE, PAIR]

# Our program, the peer, the quantity, and the target ratio: at least (speed) or at most (memory).
BARS = [
    (DATA, DDP, "speed", {"f32": 1.3, "bf16": 2.0}),
    (DATA, DDP, "memory", {"f32": 0.4, "bf16": 0.4}),
    (ZERO3, FSDP2, "speed", {"f32": 1.6}),
    (ZERO3, FSDP2, "memory", {"f32": 0.4, "bf16": 0.4}),
    (DATA, PAIR, "speed", {"f32": 0.95, "bf16": 0.95}),
    (ZERO1, PAIR, "speed", {"f32": 0.95, "bf16": 0.95}),
]


class Failed(Exception):
    pass


def main():
    args = parse()
    programs = prepare(args)
    records = []
    for config in args.configs:
        for dtype in args.dtypes:
            records += measure(args, config, dtype, programs)
            print(table(config, dtype, args.threads, programs, records) + "\n", flush=True)
            if args.json:
                save(args, records)


def prepare(args):
    """The programs that can run; the others are reported."""
    if args.lockstep is None:
        subprocess.run(["cargo", "build", "--release"], cwd=ROOT)
        args.lockstep = ROOT / "target" / "release" / "lockstep"
    if not os.access(args.lockstep, os.X_OK):
        sys.exit(f"no program at {args.lockstep}; run cargo build --release")
    if args.python.exists():
        return args.programs
    say(f"PyTorch is left out: no {args.python}; run scripts/install-peers.sh")
    return [program for program in args.programs if not program.startswith("torch")]


def measure(args, config, dtype, programs):
    """All rounds of one configuration. Each round begins with another program, so that none always follows the
    same neighbour. A program that fails is reported and skipped in later rounds."""
    records, failed = [], set()
    for turn in range(args.rounds):
        first = turn % max(1, len(programs))
        for program in programs[first:] + programs[:first]:
            if program in failed:
                continue
            say(f"{config} {dtype}: round {turn + 1} of {args.rounds}, {program}")
            try:
                record = start(commands(args, program, config, dtype), args.threads)
            except Failed as why:
                say(f"{program} cannot do {config} in {dtype}: {why}")
                failed.add(program)
                continue
            records.append(record | {"program": program, "config": config, "dtype": dtype, "round": turn})
    return records


def commands(args, program, config, dtype):
    """What is started at the same time: words and variables of each process."""
    common = ["--config", config, "--dtype", dtype, "--threads", args.threads, "--seconds", args.seconds]
    ours = [args.lockstep, "bench", "step", *common, "--json"]
    match program:
        case "lockstep data":
            return [([*ours, "--ranks", RANKS], {})]
        case "lockstep zero=1" | "lockstep zero=3":
            return [([*ours, "--ranks", RANKS, "--set", f"layout.{program.removeprefix('lockstep ')}"], {})]
        case "lockstep alone":
            return [([*ours, "--ranks", 1], {})]
        case "two alone":
            return [([*ours, "--ranks", 1], {})] * RANKS
    words = [args.python, HERE / "torch_parallel.py", *common, "--how", program.removeprefix("torch ")]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    return [(words, meeting | {"RANK": str(rank)}) for rank in range(RANKS)]


def start(processes, threads):
    """Runs processes at the same time and merges their output. Independent runs are added up."""
    many = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        running = []
        try:
            for number, (words, variables) in enumerate(processes):
                output, complaint = (Path(folder, f"{number}.{what}") for what in ("out", "err"))
                # A session of its own, so that a process that hangs can be ended with all it started.
                process = subprocess.Popen(
                    [str(word) for word in words], env=os.environ | many | variables, start_new_session=True,
                    cwd=folder, stdout=output.open("w"), stderr=complaint.open("w"),
                )
                running.append((process, output, complaint))
            wait([process for process, _, _ in running])
            return joined([record(*each) for each in running])
        finally:
            for process, _, _ in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def wait(processes):
    """Until all have ended, or one has failed."""
    end = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, 0) for process in processes):
            return
        if time.monotonic() > end:
            raise Failed(f"no end after {LIMIT_S} s")
        time.sleep(0.05)


def record(process, output, complaint):
    """What one process printed; only one of ranks that belong together does."""
    if process.poll() != 0:
        said = complaint.read_text().strip().splitlines()
        raise Failed(f"exit {process.poll()}: {(said or ['it said nothing'])[-1]}")
    found = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    return found[-1] if found else None


def joined(records):
    found = [record for record in records if record]
    if not found:
        raise Failed("nobody printed a measurement")
    speed, peak = sum(r["tokens_per_s"] for r in found), max(r["peak_bytes"] for r in found)
    return found[0] | {"tokens_per_s": speed, "peak_bytes": peak}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def table(config, dtype, threads, programs, records):
    """Median tokens/s and peak memory per rank of each program, then the ratios and their targets."""
    c = CONFIGS[config]
    model = f"vocab {c.vocab}, dim {c.dim}, {c.layers} layers, {c.heads} heads, seq {c.seq}, batch {c.batch} per rank"
    lines = [f"{config}, {dtype}, {RANKS} ranks of {threads} thread{'s' * (threads > 1)}: {model}"]
    lines.append(f"{'':<18}{'tokens/s':>12}{'least':>12}{'most':>12}{'MiB per rank':>14}")
    medians = {program: row(program, config, dtype, records) for program in programs}
    for program, found in medians.items():
        if found is None:
            lines.append(f"{program:<18}{'-':>12}")
            continue
        speed, least, most, peak = found
        lines.append(f"{program:<18}{speed:>12,.0f}{least:>12,.0f}{most:>12,.0f}{peak / 2**20:>14,.0f}")
    for ours, other, what, bars in BARS:
        if medians.get(ours) and medians.get(other):
            lines.append(verdict(ours, other, what, bars.get(dtype), medians))
    return "\n".join(lines)


def verdict(ours, other, what, bar, medians):
    at = 0 if what == "speed" else 3
    ratio = medians[ours][at] / medians[other][at]
    text = f"{ours} is {ratio:.2f}x the {what} of {other}"
    if bar is None:
        return text
    if what == "speed":
        return f"{text}: {'met' if ratio >= bar else 'NOT MET'}, at least {bar:.2f}"
    return f"{text}: {'met' if ratio <= bar else 'NOT MET'}, at most {bar:.2f}"


def row(program, config, dtype, records):
    mine = [r for r in records if (r["program"], r["config"], r["dtype"]) == (program, config, dtype)]
    if not mine:
        return None
    speeds = [record["tokens_per_s"] for record in mine]
    peak = statistics.median(record["peak_bytes"] for record in mine)
    return statistics.median(speeds), min(speeds), max(speeds), peak


def save(args, records):
    """Every single measurement, so that other statistics can be drawn from it."""
    settings = {"configs": args.configs, "dtypes": args.dtypes, "threads": args.threads, "rounds": args.rounds}
    whole = {"machine": platform.platform(), "settings": settings, "records": records}
    args.json.write_text(json.dumps(whole, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=some_of(list(CONFIGS)), default=list(CONFIGS))
    parser.add_argument("--dtypes", type=some_of(["f32", "bf16"]), default=["f32", "bf16"])
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="each process measures, after warming up")
    parser.add_argument("--programs", type=some_of(PROGRAMS), default=PROGRAMS, help=", ".join(PROGRAMS))
    parser.add_argument("--lockstep", type=lambda path: Path(path).resolve(), help="default: target/release/lockstep, built first")
    parser.add_argument("--python", type=Path, default=PYTHON, help="one that has torch")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    return parser.parse_args()


def some_of(known):
    """A parser of comma-separated names."""
    def names(text):
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return text.split(",")
    return names


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
