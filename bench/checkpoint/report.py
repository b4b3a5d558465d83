"""Prints the cost of checkpoints: the stall of each save as a fraction of a step, and the slowdown of steps during a save."""

import json
import statistics
import sys
from pathlib import Path

BAR = 0.05


def main(path):
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    steps = {line["step"]: line["tokens_per_s"] for line in lines if "loss" in line}
    tokens = tokens_per_step(lines)
    saves = [line for line in lines if "saved_step" in line]
    # Step n + 1 runs during the save of step n. The first step is always slower.
    during = {line["saved_step"] + 1 for line in saves}
    seconds = {step: tokens / rate for step, rate in steps.items()}
    quiet = statistics.median(time for step, time in seconds.items() if step > 1 and step not in during)
    print(f"a step takes {quiet:.2f} s ({tokens:,} tokens)")
    for line in saves:
        share = line["save_stall_s"] / quiet
        print(f"save of step {line['saved_step']}: {line['save_bytes'] / 1e9:.2f} GB in {line['save_s']:.2f} s, stall "
              f"{1e3 * line['save_stall_s']:.0f} ms = {share:.1%} of a step: {'met' if share < BAR else 'NOT MET'}, "
              f"less than {BAR:.0%}")
    slower = [seconds[step] / quiet - 1 for step in during if step in seconds]
    if slower:
        print(f"a step during a save is {statistics.median(slower):.1%} longer, because writing uses some of the cores")


def tokens_per_step(lines):
    """The difference of the first two token counts."""
    counts = [line["tokens"] for line in lines if "tokens" in line]
    return counts[1] - counts[0]


if __name__ == "__main__":
    main(sys.argv[1])
