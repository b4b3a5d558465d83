#!/usr/bin/env python3
"""A training step of Lockstep compared with PyTorch, eager and compiled, interleaved in one run.

Each round starts every program once on one configuration, each in a process of its own; the table holds medians
over rounds. README.md tells what is measured and how to read it.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs import CONFIGS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PYTHON = HERE.parent / ".venv" / "bin" / "python"
LIMIT_S = 1800

LOCKSTEP, TORCH = "lockstep", ["torch-eager", "torch-compile"]
PROGRAMS = [LOCKSTEP, *TORCH]


class Failed(Exception):
    pass


def main():
    args = parse()
    ready, reasons = prepare(args)
    for program, reason in reasons.items():
        say(f"{program} is left out: {reason}")
    records = []
    for config in args.configs:
        for dtype in args.dtypes:
            records += measure(args, config, dtype, ready)
            print(table(config, dtype, args.threads, ready, records) + "\n", flush=True)
            if args.json:
                save(args, records)


def prepare(args):
    """The programs that can run, and why the others cannot."""
    reasons = {}
    if LOCKSTEP in args.programs and args.lockstep is None:
        subprocess.run(["cargo", "build", "--release"], cwd=ROOT)
        args.lockstep = ROOT / "target" / "release" / "lockstep"
    if LOCKSTEP in args.programs and not os.access(args.lockstep, os.X_OK):
        reasons[LOCKSTEP] = f"no program at {args.lockstep}; run cargo build --release"
    for program in set(TORCH) & set(args.programs):
        if not args.python.exists():
            reasons[program] = f"no {args.python}; run scripts/install-peers.sh"
    return [program for program in args.programs if program not in reasons], reasons


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
                record = start(command(args, program, config, dtype), args.threads)
            except Failed as why:
                say(f"{program} cannot do {config} in {dtype}: {why}")
                failed.add(program)
                continue
            records.append(record | {"program": program, "config": config, "dtype": dtype, "round": turn})
    return records


def command(args, program, config, dtype):
    common = ["--config", config, "--dtype", dtype, "--threads", args.threads]
    if program == LOCKSTEP:
        return [args.lockstep, "bench", "step", *common, "--json"]
    how = program.removeprefix("torch-")
    return [args.python, HERE / "torch_step.py", *common, "--how", how, "--seconds", args.seconds]


def start(words, threads):
    """Runs one program to its end: the object that it printed, with the peak memory that the system saw."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as complaint:
        # A session of its own, so that a process that hangs can be ended with all it started.
        process = subprocess.Popen(
            [str(word) for word in words], env=environment, stdout=output, stderr=complaint, start_new_session=True,
        )
        code, usage = wait(process)
        output.seek(0), complaint.seek(0)
        lines, said = output.read().splitlines(), complaint.read().strip().splitlines()
    if code != 0:
        raise Failed(f"exit {code}: {(said or ['it said nothing'])[-1]}")
    found = [json.loads(line) for line in lines if line.startswith("{")]
    if not found:
        raise Failed("it printed no measurement")
    # The same measurement for all; the program's own figure is kept as well.
    return found[-1] | {"peak_bytes": usage.ru_maxrss * 1024, "peak_bytes_reported": found[-1].get("peak_bytes")}


def wait(process):
    """The exit code and the resources of this one child."""
    end = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < end:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode, usage
            time.sleep(0.05)
        raise Failed(f"no end after {LIMIT_S} s")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


def table(config, dtype, threads, programs, records):
    """Median tokens/s and peak memory of each program, and Lockstep's share of each."""
    c = CONFIGS[config]
    model = f"vocab {c.vocab}, dim {c.dim}, {c.layers} layers, {c.heads} heads, seq {c.seq}, batch {c.batch}"
    lines = [f"{config}, {dtype}, {threads} thread{'s' * (threads > 1)}: {model}"]
    lines.append(f"{'':<16}{'tokens/s':>12}{'least':>12}{'most':>12}{'lockstep is':>14}{'peak MiB':>12}{'lockstep is':>14}")
    medians = {program: row(program, config, dtype, records) for program in programs}
    ours = medians.get(LOCKSTEP)
    for program, found in medians.items():
        if found is None:
            lines.append(f"{program:<16}{'-':>12}")
            continue
        speed, least, most, peak = found
        faster = f"{ours[0] / speed:.2f}x" if ours and program != LOCKSTEP else ""
        smaller = f"{ours[3] / peak:.2f}x" if ours and program != LOCKSTEP else ""
        lines.append(
            f"{program:<16}{speed:>12,.0f}{least:>12,.0f}{most:>12,.0f}{faster:>14}{peak / 2**20:>12,.0f}{smaller:>14}"
        )
    libraries = [record["library_bytes"] for record in records if "library_bytes" in record]
    if libraries:
        mib = statistics.median(libraries) / 2**20
        lines.append(f"importing torch takes {mib:,.0f} MiB of its peak")
    return "\n".join(lines)


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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="each PyTorch process measures, after warming up")
    parser.add_argument("--programs", type=some_of(PROGRAMS), default=PROGRAMS)
    parser.add_argument("--lockstep", type=Path, help="default: target/release/lockstep, built first")
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
