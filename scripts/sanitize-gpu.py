#!/usr/bin/env python3
"""Runs the tests of a binary under compute-sanitizer, each in a process of its own.

    cargo test --no-run -p lockstep-kernels --test device        # prints the binary
    LOCKSTEP_DEVICE=cuda scripts/sanitize-gpu.py target/debug/deps/device-…
    LOCKSTEP_DEVICE=cuda scripts/sanitize-gpu.py tests/lockstep-kernels-device --tools racecheck --filter norm

A test is clean if it passes and the tool reports nothing. Prints the beginning of the report of each other test. A tool may
itself fail in kernels of cuBLASLt and cuDNN, or not end in time: such tests are counted apart. Exits with 1 if a tool has
found something, if a test failed, or if no test was clean.

Known reports, with CUDA 13.0: racecheck and synccheck find errors in cuDNN's attention kernels. initcheck takes what cuDNN
and cuBLASLt write with the copy engine for uninitialized, also when `attention_add_bf16` reads it.
"""

import argparse
import collections
import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys

TOOLS = ["memcheck", "initcheck", "synccheck", "racecheck"]
CLEAN, FOUND, BROKEN = "clean", "found something", "the test failed"
FAILED, LATE, SKIPPED = "the tool failed", "not finished", "skipped"
# The last line of a tool.
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def main():
    args = parse()
    names = tests(args)
    jobs = [(tool, test) for tool in args.tools for test in names]
    counts, reports = collections.Counter(), []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for (tool, test), (end, report) in zip(jobs, pool.map(lambda job: run(args, *job), jobs)):
            counts[tool, end] += 1
            if end not in (CLEAN, SKIPPED):
                reports.append((tool, test, end, report))
                print(f"{tool} {test}: {end}", file=sys.stderr, flush=True)
    for tool, test, end, report in reports:
        print(f"\n{tool} {test}: {end}\n{report}")
    for tool in args.tools:
        ends = [f"{counts[tool, end]} {end}" for end in (CLEAN, FOUND, BROKEN, FAILED, LATE, SKIPPED) if counts[tool, end]]
        print(f"{tool}: {', '.join(ends) or 'no tests'}")
    sys.exit(any(counts[tool, FOUND] or counts[tool, BROKEN] or not counts[tool, CLEAN] for tool in args.tools))


def tests(args):
    """Names of the tests that are not ignored."""
    listed = subprocess.run([args.binary, "--list"], check=True, capture_output=True, text=True).stdout
    ignored = subprocess.run([args.binary, "--list", "--ignored"], check=True, capture_output=True, text=True).stdout
    names = lambda text: {line.removesuffix(": test") for line in text.splitlines() if line.endswith(": test")}
    return sorted(name for name in names(listed) - names(ignored) if args.filter in name)


def run(args, tool, test):
    """How a test ended under a tool, and the beginning of what the tool has reported."""
    words = [args.sanitizer, "--tool", tool, "--print-limit", "5", args.binary, test, "--exact", "--nocapture"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, **pipes, text=True, errors="replace", start_new_session=True)
    try:
        out, err = process.communicate(timeout=args.seconds)
    except subprocess.TimeoutExpired:
        # The test is a child of the tool and would go on alone.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return LATE, f"after {args.seconds} s"
    lines = out.splitlines()
    said = [line for line in lines if line.startswith("=========") and line.strip("= ")]
    report = "\n".join(said[1:13] or (out + err).splitlines()[-12:])
    if any("Internal Sanitizer Error" in line for line in said):
        return FAILED, report
    summary = SUMMARY.search(out)
    if summary is None:
        return FAILED, report
    if int(summary[1]) > 0:
        return FOUND, report
    if process.returncode != 0:
        own = [line for line in (out + err).splitlines() if not line.startswith("=========")]
        return BROKEN, "\n".join(own[-12:])
    return (SKIPPED if any("skipped: " in line for line in lines) else CLEAN), ""


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=os.path.abspath)
    parser.add_argument("--tools", type=lambda text: text.split(","), default=TOOLS, help=f"default: {','.join(TOOLS)}")
    parser.add_argument("--filter", default="", help="only tests whose name contains this")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="processes at a time")
    parser.add_argument("--seconds", type=float, default=120.0, help="most time for a test; default: 120")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program; default: the first on the PATH")
    args = parser.parse_args()
    for tool in args.tools:
        if tool not in TOOLS:
            parser.error(f"--tools {tool}: choose from {', '.join(TOOLS)}")
    if not shutil.which(args.sanitizer):
        parser.error(f"there is no {args.sanitizer}: install the CUDA toolkit, or name the program with --sanitizer")
    return args


if __name__ == "__main__":
    main()
