#!/usr/bin/env python3
"""Collectives of Lockstep, Gloo, Open MPI and the in-place bound, interleaved in one run.

Each round starts every engine once on one op; the table holds medians over rounds. README.md tells
what is measured and how to read it.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import engines
import report

OPS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]


def main():
    args = parse()
    path = args.lockstep
    if path is None and any(engine in engines.LOCKSTEP for engine in args.engines):
        path = engines.build_lockstep()
    ready, reasons = engines.prepare(args.engines, args.dtype, path)
    for engine, reason in reasons.items():
        say(f"{engine} is left out: {reason}")

    records = []
    for op in args.ops:
        job = engines.Job(op, args.sizes, args.ranks, args.dtype, path)
        records += measure(job, [engine for engine in ready if engines.runs(engine, op)], args.rounds)
        print(report.table(op, args.ranks, args.sizes, ready, records) + "\n", flush=True)
        if args.json:
            save(args, records)
    print(report.bars(args.ranks, args.sizes, records))


def measure(job, names, rounds):
    """All rounds of one op. Each round begins with another engine, so that none always follows the
    same neighbour. An engine that fails is reported and skipped in later rounds of the op."""
    records, failed = [], set()
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for engine in names[first:] + names[:first]:
            if engine in failed:
                continue
            say(f"{job.op}: round {turn + 1} of {rounds}, {engine}")
            try:
                found = engines.start(engine, job)
            except engines.Failed as why:
                say(f"{engine} cannot do {job.op} with {job.ranks} ranks: {why}")
                failed.add(engine)
                continue
            records += [record | {"engine": engine, "round": turn} for record in found]
    return records


def save(args, records):
    """Every single measurement, so that other statistics can be drawn from it."""
    settings = {"ops": args.ops, "sizes": args.sizes, "ranks": args.ranks, "rounds": args.rounds, "dtype": args.dtype}
    medians = [
        {"op": op, "bytes": size, "engine": engine, "time_us": time, "algbw_gbs": size / time / 1e3}
        for (op, size, engine), time in report.medians(records).items()
    ]
    whole = {"machine": platform.platform(), "settings": settings, "medians": medians, "records": records}
    args.json.write_text(json.dumps(whole, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=one_of(OPS), default=OPS)
    parser.add_argument("--sizes", type=sizes, default=sizes("4K,64K,1M,16M,64M,256M"), help="bytes of the full buffer")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=engines.C_TYPES, default="f32")
    parser.add_argument("--lockstep", type=Path, help="default: target/release/lockstep, built first")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    parser.add_argument("--engines", type=one_of(engines.NAMES), default=engines.NAMES)
    args = parser.parse_args()
    # Every rank's share is a whole number of 8-byte elements.
    uneven = [report.short(size) for size in args.sizes if size % (8 * args.ranks)]
    if uneven:
        parser.error(f"{', '.join(uneven)}: {args.ranks} ranks need sizes that divide by {8 * args.ranks} bytes")
    return args


def one_of(known):
    """A parser of comma-separated names."""
    def names(text):
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return text.split(",")
    return names


def sizes(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return [int(word.rstrip("KMG")) * units.get(word[-1], 1) for word in text.upper().split(",")]


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
