"""Prints what rows.sh measured: medians over its rounds, and by how much the wait is shorter."""

import sys
from pathlib import Path

from report import medians


def main(folder):
    labels = {"overlapped": "rows overlapped", "waited": "rows waited for"}
    runs = {name: medians(Path(folder, f"{name}.jsonl")) for name in labels}
    print(f"{'':<24}{'step ms':>10}{'exchange ms':>13}")
    for name, run in runs.items():
        print(f"{labels[name]:<24}{run['step']:>10,.0f}{run['exchange']:>13,.0f}")
    less = {key: 1 - runs["overlapped"][key] / runs["waited"][key] for key in ("exchange", "step")}
    print(f"waiting is less by {less['exchange']:.0%}, a step by {less['step']:.0%}")


if __name__ == "__main__":
    main(sys.argv[1])
