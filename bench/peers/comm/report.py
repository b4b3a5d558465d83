"""Medians, ratios and bars of a run, as text. Starts nothing and measures nothing."""

import statistics

from bars import ANY, BARS

RATIOS = [
    ("lockstep-shm", "openmpi"),
    ("lockstep-shm", "gloo"),
    ("lockstep-sym", "openmpi"),
    ("lockstep-sym", "bound"),
    ("lockstep-priv", "openmpi"),
    ("lockstep-tcp", "gloo"),
]


def medians(records):
    """{(op, bytes, engine): median microseconds over the rounds}"""
    times = {}
    for record in records:
        times.setdefault((record["op"], record["bytes"], record["engine"]), []).append(record["time_us"])
    return {key: statistics.median(values) for key, values in times.items()}


def ratio(times, op, size, ours, peer):
    """How many times as fast as the peer we are; None where either was not measured."""
    mine, theirs = times.get((op, size, ours)), times.get((op, size, peer))
    return theirs / mine if mine and theirs else None


def table(op, ranks, sizes, engines, records):
    """One op: the median algbw and time of each engine, then our ratios to the peers."""
    times = medians(records)
    engines = [engine for engine in engines if any((op, size, engine) in times for size in sizes)]
    pairs = [pair for pair in RATIOS if all(engine in engines for engine in pair)]
    lines = [f"{op}, {ranks} ranks: median GB/s (S / time) and us per call"]
    lines.append("    size" + "".join(f"{engine:>22}" for engine in engines))
    for size in sizes:
        cells = (speed_cell(times.get((op, size, engine)), size) for engine in engines)
        lines.append(f"{short(size):>8}" + "".join(cells))
    if pairs:
        lines.append("    size" + "".join(f"{ours + '/' + peer:>22}" for ours, peer in pairs))
    for size in sizes if pairs else []:
        cells = (ratio_cell(ratio(times, op, size, *pair)) for pair in pairs)
        lines.append(f"{short(size):>8}" + "".join(cells))
    return "\n".join(lines + footnotes(op, engines, records))


def footnotes(op, engines, records):
    """Which call or algorithm stands behind each engine, and any wrong results."""
    lines = []
    for engine in engines:
        mine = [record for record in records if (record["op"], record["engine"]) == (op, engine)]
        algos = list(dict.fromkeys(record["algo"] for record in mine))
        lines.append(f"  {engine}: {', '.join(algos)}")
        wrong = sum(record["wrong"] for record in mine)
        if wrong:
            lines.append(f"  {engine}: {wrong} WRONG elements; its times mean nothing")
    return lines


def bars(ranks, sizes, records):
    """Each bar that this run can speak of: met or short, with the size where it is tightest."""
    times = medians(records)
    lines = []
    for bar in BARS:
        inside = [size for size in sizes if bar.least <= size <= bar.most]
        found = [(ratio(times, bar.op, size, bar.ours, bar.peer), size) for size in inside]
        found = [(value, size) for value, size in found if value]
        if bar.ranks == ranks and found:
            lines.append(bar_line(bar, *min(found)))
    return "bars\n" + ("\n".join(lines) or "  none: no peer was measured")


def bar_line(bar, worst, size):
    verdict = "met  " if worst >= bar.factor else "short"
    where = f"from {short(bar.least)}" if bar.most == ANY else f"at {short(bar.least)}"
    where = where if bar.least else "at each size"
    claim = f"{bar.op}, {bar.ranks} ranks: {bar.ours} >= {bar.factor:.2f}x {bar.peer} {where}"
    return f"  {verdict}  {claim:<76} least {worst:.2f}x at {short(size)}"


def speed_cell(microseconds, size):
    if microseconds is None:
        return f"{'-':>22}"
    return f"{size / microseconds / 1e3:>9.2f}{microseconds:>13.1f}"


def ratio_cell(value):
    return f"{'-' if value is None else f'{value:.2f}x':>22}"


def short(size):
    """4096 is 4K."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size and size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)
