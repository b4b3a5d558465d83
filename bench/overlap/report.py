"""Prints what run.sh measured: medians over its rounds, and by how much overlapping shortens the wait."""

import json
import statistics
import sys
from pathlib import Path

BAR = 0.60


def main(folder):
    runs = {name: medians(Path(folder, f"{name}.jsonl")) for name in ("overlap", "end", "none")}
    labels = {"overlap": "buckets, overlapped", "end": "one sum at the end", "none": "no communication"}
    print(f"{'':<22}{'step ms':>10}{'exchange ms':>13}{'at least ms':>13}{'beyond alone ms':>17}")
    for name, run in runs.items():
        run["beyond"] = run["step"] - runs["none"]["step"]
        print(f"{labels[name]:<22}{run['step']:>10,.0f}{run['exchange']:>13,.0f}{run['least']:>13,.0f}{run['beyond']:>17,.0f}")
    for what, words in [("exchange", "exchange"), ("least", "exchange without waiting for the slower rank"), ("beyond", "step time beyond alone")]:
        less = 1 - runs["overlap"][what] / runs["end"][what]
        print(f"{words}: {less:.0%} less: {'met' if less >= BAR else 'NOT MET'}, at least {BAR:.0%}")


def medians(path):
    """Milliseconds of a step, of what ranks wait for exchanges, and of what the slower rank does."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    times = {"step": [], "exchange": [], "least": []}
    for record in records:
        exchange = dict(record["time_ms"])["exposed_comm"]
        times["step"].append(record["step_ms"])
        times["exchange"].append(exchange)
        times["least"].append(exchange * record["comm_exposed_least"] / max(record["comm_exposed"], 1e-12))
    return {what: statistics.median(each) for what, each in times.items()}


if __name__ == "__main__":
    main(sys.argv[1])
