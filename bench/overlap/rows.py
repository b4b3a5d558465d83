"""Prints the results of rows.sh: medians over its rounds, and the reduction of exposed communication."""

import sys
from pathlib import Path

from report import medians


def main(folder):
    labels = {"overlapped": "rows overlapped", "waited": "rows blocking"}
    runs = {name: medians(Path(folder, f"{name}.jsonl")) for name in labels}
    print(f"{'':<24}{'step ms':>10}{'exposed ms':>13}")
    for name, run in runs.items():
        print(f"{labels[name]:<24}{run['step']:>10,.0f}{run['exposed']:>13,.0f}")
    less = {key: 1 - runs["overlapped"][key] / runs["waited"][key] for key in ("exposed", "step")}
    print(f"exposed communication is shorter by {less['exposed']:.0%}, a step by {less['step']:.0%}")


if __name__ == "__main__":
    main(sys.argv[1])
