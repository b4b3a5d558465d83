"""Prints what run.sh measured: medians over its rounds, and by how much overlapping shortens the wait."""

import json
import statistics
import sys
from pathlib import Path

BAR = 0.60


def main(folder):
    runs = {name: medians(Path(folder, f"{name}.jsonl")) for name in ("overlap", "end", "none")}
    alone = runs["none"]["step"]
    print(f"{'':<22}{'step ms':>10}{'exchange ms':>13}{'beyond alone ms':>17}")
    told = {"overlap": "buckets, overlapped", "end": "one sum at the end", "none": "no communication"}
    for name, run in runs.items():
        print(f"{told[name]:<22}{run['step']:>10,.0f}{run['exchange']:>13,.0f}{run['step'] - alone:>17,.0f}")
    waited = 1 - runs["overlap"]["exchange"] / runs["end"]["exchange"]
    longer = 1 - (runs["overlap"]["step"] - alone) / (runs["end"]["step"] - alone)
    print(f"exposed communication is less by {waited:.0%} (waiting) and {longer:.0%} (step time): "
          f"{'met' if min(waited, longer) >= BAR else 'NOT MET'}, at least {BAR:.0%}")


def medians(path):
    """Milliseconds of a step, and of what it waits for exchanges."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    step = statistics.median(record["step_ms"] for record in records)
    return {"step": step, "exchange": statistics.median(dict(record["time_ms"])["exchange"] for record in records)}


if __name__ == "__main__":
    main(sys.argv[1])
