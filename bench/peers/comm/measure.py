"""The timing loop of all Python peers, and their data.

Knows nothing of Gloo or MPI: an engine hands in its collectives, a barrier and a maximum.
bound.c repeats the same formula in C.
"""

import json
import math
import sys
import time

import numpy as np

DTYPES = {"f32": np.float32, "f64": np.float64}

WARM_SECONDS = 0.05
TIMED_SECONDS = 0.3
LEAST_ITERATIONS = 5


def measure(world, op, sizes, dtype):
    """Checks and times one op at each size; rank 0 prints one JSON object per size."""
    for size in sizes:
        send, recv = buffers(op, size // np.dtype(DTYPES[dtype]).itemsize, DTYPES[dtype], world.ranks)
        act = world.collective(op, send, recv)
        wrong = check(world, op, act, send, recv)
        seconds = seconds_per_call(world, act)
        if world.rank == 0:
            print(json.dumps(record(world, op, dtype, size, seconds, wrong)), flush=True)


def buffers(op, count, dtype, ranks):
    """The send and receive buffers; the larger has `count` elements. In place, both are the same."""
    whole = lambda: np.zeros(count, dtype)
    part = lambda: np.zeros(count // ranks, dtype)
    if op in ("all_reduce", "broadcast"):
        buffer = whole()
        return buffer, buffer
    if op == "reduce_scatter":
        return whole(), part()
    if op == "all_gather":
        return part(), whole()
    return whole(), whole()  # all_to_all


def check(world, op, act, send, recv):
    """Runs the op once on small integers, whose sums are exact. Returns the number of wrong elements on all
    ranks, and fills the buffers with zeros, whose repeated sums stay finite."""
    count = max(len(send), len(recv))
    index = np.arange(count) % 251
    part = slice(world.rank * count // world.ranks, (world.rank + 1) * count // world.ranks)
    sums = world.ranks * index + world.ranks * (world.ranks - 1) // 2

    # Element i of rank r is i % 251 + r; the expected results follow from that.
    mine = index + world.rank
    per_rank = np.split(index, world.ranks)
    given, wanted = {
        "all_reduce": (mine, sums),
        "reduce_scatter": (mine, sums[part]),
        "all_gather": (mine[part], np.concatenate([p + r for r, p in enumerate(per_rank)])),
        "all_to_all": (mine, np.concatenate([index[part] + r for r in range(world.ranks)])),
        "broadcast": (mine, index),
    }[op]
    send[:] = given
    act()
    wrong = int(np.count_nonzero(recv != wanted))
    send[:] = 0
    recv[:] = 0
    return int(world.total(wrong))


def seconds_per_call(world, act):
    """Warms up in doubling batches until one lasts WARM_SECONDS, then times enough calls to fill
    TIMED_SECONDS. Every rank sees the same maximum, so every rank makes the same number of calls."""
    batch = 1
    while (warm := loop(world, act, batch)) < WARM_SECONDS:
        batch *= 2
    iterations = max(LEAST_ITERATIONS, math.ceil(TIMED_SECONDS * batch / warm))
    return loop(world, act, iterations) / iterations


def loop(world, act, iterations):
    """The slowest rank's seconds for `iterations` calls, from a common start."""
    world.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        act()
    return world.maximum(time.perf_counter() - start)


def record(world, op, dtype, size, seconds, wrong):
    """The same fields that `lockstep bench comm --json` prints."""
    share = (world.ranks - 1) / world.ranks
    bus = {"all_reduce": 2 * share, "broadcast": 1.0}.get(op, share)
    algbw = size / seconds / 1e9
    return {
        "op": op, "engine": world.name, "algo": world.algo(op), "ranks": world.ranks, "dtype": dtype,
        "bytes": size, "time_us": seconds * 1e6, "algbw_gbs": algbw, "busbw_gbs": algbw * bus,
        "wrong": wrong, "buffers": "ordinary",
    }


def main(world_type):
    """`gloo.py OP BYTES,BYTES,.. DTYPE`, as run.py starts it on every rank."""
    op, sizes, dtype = sys.argv[1:]
    measure(world_type(), op, [int(size) for size in sizes.split(",")], dtype)
