#!/usr/bin/env python3
"""Matrix multiplies of Lockstep and PyTorch, interleaved in one run.

Each round times every multiply in both, one right after the other; the table holds medians over rounds.
README.md tells what is measured and how to read it.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PYTHON = HERE.parent / ".venv" / "bin" / "python"

# Layers as (tokens, outputs, inputs).
MODELS = {
    "square": [(1024, 1024, 1024), (2048, 2048, 2048)],
    "tiny": [(2048, 384, 128), (2048, 128, 128), (2048, 512, 128), (2048, 128, 512), (2048, 256, 128)],
    "small": [(1024, 1536, 512), (1024, 512, 512), (1024, 2048, 512), (1024, 512, 2048), (256, 8192, 512)],
    "gpt2": [(512, 2304, 768), (512, 768, 768), (512, 3072, 768), (512, 768, 3072), (128, 50257, 768)],
}
ORDERS = ["nt", "nn", "tn"]


def main():
    args = parse()
    lockstep = args.lockstep or build()
    peer = subprocess.Popen([args.python, HERE / "torch_mm.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(f"{args.threads} thread(s), {args.clock} time, best of each round, medians of {args.rounds} rounds, GFLOP/s")
    print(f"{'model':>6} {'dtype':>5} {'order':>5} {'m':>6} {'n':>6} {'k':>6} {'lockstep':>9} {'torch':>9} {'ratio':>6}")
    records = []
    for dtype in args.dtypes:
        for model in args.models:
            for layer in MODELS[model]:
                for order in args.orders:
                    records.append(compare(args, lockstep, peer, model, dtype, order, layer))
                    print(row(records[-1]), flush=True)
    peer.stdin.close()
    peer.wait()
    worst = min(records, key=lambda record: record["ratio"])
    behind = sum(record["ratio"] < 1 for record in records)
    print(f"{len(records)} multiplies, {behind} behind torch; the worst:\n{row(worst)}")
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in records))


def compare(args, lockstep, peer, model, dtype, order, layer):
    """One multiply in both, alternating, with the ratio of each round's neighbours."""
    m, n, k = sizes(order, layer)
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(ask_lockstep(args, lockstep, dtype, order, layer)["best_us"])
        request = {"order": order, "m": m, "n": n, "k": k, "dtype": dtype, "threads": args.threads,
                   "clock": args.clock, "seconds": args.seconds}
        theirs.append(ask_torch(peer, request)["best_us"])
    speed = lambda times: 2 * m * n * k / statistics.median(times) / 1e3
    ratio = statistics.median(their / our for our, their in zip(ours, theirs))
    return {"model": model, "dtype": dtype, "order": order, "m": m, "n": n, "k": k, "threads": args.threads,
            "lockstep_gflops": speed(ours), "torch_gflops": speed(theirs), "ratio": ratio}


def sizes(order, layer):
    """The rows, columns and summed length of a layer's output, input gradient or weight gradient."""
    tokens, outputs, inputs = layer
    return {"nt": (tokens, outputs, inputs), "nn": (tokens, inputs, outputs), "tn": (outputs, inputs, tokens)}[order]


def ask_lockstep(args, lockstep, dtype, order, layer):
    command = [lockstep, "bench", "gemm", "--json", "--dtype", dtype, "--orders", order, "--shapes", "x".join(map(str, layer)),
               "--threads", args.threads, "--clock", args.clock, "--seconds", args.seconds]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed")
    return json.loads(done.stdout)


def ask_torch(peer, request):
    peer.stdin.write(json.dumps(request) + "\n")
    peer.stdin.flush()
    answer = peer.stdout.readline()
    if not answer:
        sys.exit("torch_mm.py ended early; its message stands above")
    return json.loads(answer)


def row(record):
    return "{model:>6} {dtype:>5} {order:>5} {m:>6} {n:>6} {k:>6} {lockstep_gflops:>9.1f} {torch_gflops:>9.1f} {ratio:>6.2f}".format(**record)


def build():
    if subprocess.run(["cargo", "build", "--release"], cwd=ROOT).returncode != 0:
        sys.exit("cargo build --release failed")
    return ROOT / "target" / "release" / "lockstep"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=one_of(MODELS), default=list(MODELS))
    parser.add_argument("--dtypes", type=one_of(["f32", "bf16"]), default=["f32", "bf16"])
    parser.add_argument("--orders", type=one_of(ORDERS), default=ORDERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each multiply and round, in each of both")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], help="default: cpu for one thread, wall for more")
    parser.add_argument("--lockstep", type=Path, help="default: target/release/lockstep, built first")
    parser.add_argument("--python", type=Path, default=PYTHON, help="an interpreter that has torch")
    parser.add_argument("--json", type=Path, help="also write every row here, a JSON object per line")
    args = parser.parse_args()
    args.clock = args.clock or ("cpu" if args.threads == 1 else "wall")
    if not args.python.exists():
        parser.error(f"no {args.python}; run scripts/install-peers.sh, or name one with --python")
    return args


def one_of(known):
    """A parser of comma-separated names."""
    def names(text):
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return text.split(",")
    return names


if __name__ == "__main__":
    main()
