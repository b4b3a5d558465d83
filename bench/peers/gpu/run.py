#!/usr/bin/env python3
"""Training steps of Lockstep on one GPU compared with torch.compile, interleaved in one run.

Each round starts every program once on one configuration, each in a process of its own; the table holds medians
over rounds. README.md tells what is measured and how to read it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from configs import CONFIGS
from programs import run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LOCKSTEP, PEERS = "lockstep", ["torch-compile", "torch-eager"]
# H100 and H200: dense bf16, by the vendor's data sheet.
PEAK_TFLOPS = 989.0


def main():
    args = parse()
    records = []
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(args, Path(folder))
        for config in args.configs:
            for turn in range(args.rounds):
                programs = args.programs[turn % len(args.programs):] + args.programs[: turn % len(args.programs)]
                for program in programs:
                    print(f"{config}: round {turn + 1} of {args.rounds}, {program}", file=sys.stderr, flush=True)
                    record = start(args, program, config, data)
                    if record:
                        records.append(record | {"program": program, "config": config, "round": turn})
            print(table(config, args.programs, records), flush=True)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


def prepare(args, folder):
    """The text that all programs train on, one byte a token: the sources of Python's own library. Also as Lockstep's file."""
    text, tokens = folder / "text.txt", folder / "text.tokens"
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text.write_bytes(b"\n\n".join(source.read_bytes() for source in sources))
    if LOCKSTEP in args.programs:
        subprocess.run([args.lockstep, "data", "prepare", "--out", tokens, text], check=True, stdout=subprocess.DEVNULL)
    return text, tokens


def start(args, program, config, data):
    """Runs one program to its end: the object that it printed."""
    text, tokens = data
    if program == LOCKSTEP:
        file = tokens.with_name("bench.toml")
        file.write_text(CONFIGS[config].run_file(tokens))
        words = [args.lockstep, "bench", "step", "--config", file, "--dtype", args.dtype, "--json"]
        words += ["--seconds", args.seconds, *(f"--set={word}" for word in args.set)]
    else:
        words = [args.python, HERE / "torch_step.py", "--config", config, "--dtype", args.dtype, "--text", text]
        words += ["--how", program.removeprefix("torch-"), "--seconds", args.seconds]
    record = run(words)
    if record is None:
        print(f"{program} cannot do {config}", file=sys.stderr)
    return record


def table(config, programs, records):
    """Medians of each program, and Lockstep's share of each."""
    c = CONFIGS[config]
    head = f"{config}: {c.family}, dim {c.dim}, {c.layers} layers, seq {c.seq}, batch {c.batch}, vocab {c.vocab}"
    columns = ["tokens/s", "lockstep is", "MFU", "GiB", "lockstep is", "J / 1000"]
    lines = [head, f"{'':<16}" + "".join(f"{column:>13}" for column in columns)]
    rows = {program: medians(program, config, records) for program in programs}
    ours = rows.get(LOCKSTEP)
    for program, row in rows.items():
        if row is None:
            lines.append(f"{program:<16}{'-':>13}")
            continue
        speed, used, joules = row
        faster = f"{ours[0] / speed:.2f}x" if ours and program != LOCKSTEP else ""
        smaller = f"{ours[1] / used:.2f}x" if ours and program != LOCKSTEP else ""
        mfu = 100 * speed * flops_per_token(c) / (PEAK_TFLOPS * 1e12)
        lines.append(
            f"{program:<16}{speed:>13,.0f}{faster:>13}{mfu:>12.1f}%{used / 2**30:>13.2f}{smaller:>13}{joules:>13.3f}"
        )
    return "\n".join(lines) + "\n"


def medians(program, config, records):
    mine = [r for r in records if (r["program"], r["config"]) == (program, config)]
    if not mine:
        return None
    keys = ["sustained_tokens_per_s", "peak_bytes", "joules_per_1000_tokens"]
    return [statistics.median(record[key] or 0 for record in mine) for key in keys]


def flops_per_token(c):
    """6 per weight of a matrix, and 6 * seq * dim per layer for causal attention."""
    width = c.dim // c.heads
    attention = c.dim * (c.heads + 2 * c.key_heads) * width + c.dim * c.dim
    mlp = (2 if c.family == "gpt2" else 3) * c.dim * c.hidden * (c.top_k or 1)
    return 6 * (c.layers * (attention + mlp) + c.vocab * c.dim) + 6 * c.layers * c.seq * c.dim


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=lambda text: text.split(","), default=list(CONFIGS))
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="each process measures; its second half counts")
    parser.add_argument("--programs", type=lambda text: text.split(","), default=[LOCKSTEP, PEERS[0]])
    parser.add_argument("--lockstep", type=Path, default=ROOT / "target" / "release" / "lockstep")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="one that has torch")
    parser.add_argument("--set", action="append", default=[], help="a key of Lockstep's run file, as for train")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
