"""Prints what run.sh trained: the last evaluation of each run compared with the first run, and bytes sent per step."""

import json
import sys
from pathlib import Path

BAR = 0.02


def main(runs, *names):
    plain, plain_sent = read(Path(runs, names[0]))
    print(f"{'':<12}{'eval loss':>11}{'from plain':>12}{'KiB a step':>12}{'saved':>8}")
    for name in names:
        loss, sent = read(Path(runs, name))
        off = loss / plain - 1
        met = "met" if abs(off) <= BAR else f"NOT MET, within {BAR:.0%}"
        print(f"{name:<12}{loss:>11.4f}{off:>+12.2%}{sent / 1024:>12,.0f}{1 - sent / plain_sent:>8.1%}  {met}")


def read(folder):
    """The last loss on held-out data, and the bytes that rank 0 sent in a step, on average over those reported."""
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None]
    sent = [line["comm_bytes"] for line in lines if "comm_bytes" in line]
    return losses[-1], sum(sent) / len(sent)


if __name__ == "__main__":
    main(*sys.argv[1:])
