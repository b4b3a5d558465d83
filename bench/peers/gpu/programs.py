"""Runs a program that prints its measurements as one JSON object, and prints such an object for PyTorch."""

import json
import subprocess
import sys


def run(words, environment=None):
    """Runs a program to its end: the object that it printed, or nothing."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not found:
        said = done.stderr.strip().splitlines()[-12:] or ["it said nothing"]
        print(f"exit {done.returncode}: " + "\n".join(said), file=sys.stderr)
        return None
    return found[-1]


def print_record(program, args, tokens, times, **more):
    """Prints measured steps of PyTorch with the fields that `lockstep bench step --json` prints."""
    import torch

    middle = len(times) // 2
    median = sorted(times)[middle]
    print(json.dumps({
        "program": program, "config": args.config, "dtype": args.dtype, "steps": len(times),
        "tokens_per_s": tokens / median, "step_ms": 1e3 * median,
        "sustained_tokens_per_s": tokens * (len(times) - middle) / sum(times[middle:]),
        "allocated_bytes": torch.cuda.max_memory_allocated(), "torch": torch.__version__, **more,
    }), flush=True)
