#!/usr/bin/env python3
"""What `lockstep plan` foretells of this machine against what `lockstep bench step` measures on it.

    cargo build --release && python3 bench/predict/report.py [--rounds 5] [--binary target/release/lockstep]

Calibrates with `lockstep bench machine`, then measures the README's model and `small` on 1, 2 and 4 ranks, in rounds
that go through all cases in turn, so that a machine that is busy for a while slows all of them alike. Prints the
foretold and the measured step, the error, and the state memory, which is to be the same to the byte.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

SMALL = """name = "small"
[model]
preset = "small"
[data]
seq = 256
[train]
micro_batch = 4
global_batch = {batch}
steps = 1000000
"""


def run(binary, *words):
    done = subprocess.run([binary, *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def cases(folder):
    for ranks in (1, 2, 4):
        sets = [f"layout.data={ranks}", f"train.micro_batch={min(8, 16 // ranks)}"]
        yield "grammar", ranks, "examples/grammar.toml", sets
    for ranks in (1, 2, 4):
        path = os.path.join(folder, f"small-{ranks}.toml")
        with open(path, "w") as file:
            file.write(SMALL.format(batch=4 * ranks))
        yield "small", ranks, path, [f"layout.data={ranks}"]


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--steps", type=int, default=8)
    asked.add_argument("--binary", default="target/release/lockstep")
    asked = asked.parse_args()
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        machine = os.path.join(folder, "machine.toml")
        all_cases = list(cases(folder))
        foretold, measured, memory = {}, {}, {}
        for number in range(asked.rounds):
            # Each round has a calibration of its own beside what it is to foretell.
            print(run(asked.binary, "bench", "machine", "--out", machine), end="")
            for name, ranks, path, sets in all_cases:
                key = (name, ranks)
                typed = [word for value in sets for word in ("--set", value)]
                plan = json.loads(run(asked.binary, "plan", path, "--cluster", machine, "--ranks", str(ranks), "--json", *typed))
                foretold.setdefault(key, []).append(plan["step_s"])
                step = json.loads(
                    run(
                        asked.binary, "bench", "step", "--config", path, "--ranks", str(ranks), "--json",
                        "--threads", str(max(1, cores // ranks)), "--steps", str(asked.steps), *typed,
                    ).splitlines()[-1]
                )
                measured.setdefault(key, []).append(step["step_ms"] / 1e3)
                held = {row["tag"]: row["peak"] for row in step["memory"]}
                stage = plan["memory"][0]
                memory[key] = all(
                    stage[tag] == held[tag] for tag in ("parameters", "gradients", "optimizer")
                )
            print(f"round {number + 1} of {asked.rounds} is over", flush=True)
        print(f"\n{'model':<10} {'ranks':>5} {'foretold':>10} {'measured':>10} {'error':>8}  states")
        for key in foretold:
            told, came = (statistics.median(values[key]) for values in (foretold, measured))
            states = "to the byte" if memory[key] else "differ"
            print(f"{key[0]:<10} {key[1]:>5} {1e3 * told:>8.1f}ms {1e3 * came:>8.1f}ms {100 * (told / came - 1):>+7.1f}%  {states}")


if __name__ == "__main__":
    main()
