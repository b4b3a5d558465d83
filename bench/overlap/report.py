"""Prints the results of run.sh: medians over its rounds, and the reduction of exposed communication."""

import json
import statistics
import sys
from pathlib import Path

BAR = 0.60


def main(folder):
    runs = {name: medians(Path(folder, f"{name}.jsonl")) for name in ("overlap", "end", "none")}
    labels = {"overlap": "buckets, overlapped", "end": "one reduction at the end", "none": "no communication"}
    print(f"{'':<22}{'step ms':>10}{'exposed ms':>13}{'minimum ms':>13}{'overhead ms':>17}")
    for name, run in runs.items():
        run["overhead"] = run["step"] - runs["none"]["step"]
        print(f"{labels[name]:<22}{run['step']:>10,.0f}{run['exposed']:>13,.0f}{run['least']:>13,.0f}{run['overhead']:>17,.0f}")
    for what, words in [("exposed", "exposed communication"), ("least", "exposed communication without waiting for the slower rank"), ("overhead", "step time compared with no communication")]:
        less = 1 - runs["overlap"][what] / runs["end"][what]
        print(f"{words}: {less:.0%} less: {'met' if less >= BAR else 'NOT MET'}, at least {BAR:.0%}")


def medians(path):
    """Median milliseconds of a step, of its exposed communication, and of the minimum of the latter over the ranks."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    times = {"step": [], "exposed": [], "least": []}
    for record in records:
        exposed = dict(record["time_ms"])["exposed_comm"]
        times["step"].append(record["step_ms"])
        times["exposed"].append(exposed)
        times["least"].append(exposed * record["comm_exposed_least"] / max(record["comm_exposed"], 1e-12))
    return {what: statistics.median(each) for what, each in times.items()}


if __name__ == "__main__":
    main(sys.argv[1])
