#!/usr/bin/env python3
"""PyTorch's multiplies, one request at a time: reads JSON lines {order, m, n, k, dtype, threads, clock,
seconds} and answers each with {median_us, best_us}. Started by run.py with the interpreter of the peers."""

import json
import sys
import time

import torch


def main():
    for line in sys.stdin:
        print(json.dumps(measure(**json.loads(line))), flush=True)


def measure(order, m, n, k, dtype, threads, clock, seconds):
    torch.set_num_threads(threads)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    # A transposed operand is stored transposed and passed as a view.
    a = torch.rand(k, m).to(kind).t() if order == "tn" else torch.rand(m, k).to(kind)
    b = torch.rand(n, k).to(kind).t() if order == "nt" else torch.rand(k, n).to(kind)
    out = torch.empty(m, n, dtype=kind)
    now = {"wall": time.perf_counter, "cpu": time.thread_time}[clock]
    torch.mm(a, b, out=out)
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = now()
        torch.mm(a, b, out=out)
        times.append(now() - start)
    times.sort()
    return {"median_us": times[len(times) // 2] * 1e6, "best_us": times[0] * 1e6}


if __name__ == "__main__":
    main()
