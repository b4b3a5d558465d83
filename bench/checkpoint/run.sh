#!/usr/bin/env bash
# The cost of checkpoints for a model of 124M parameters, and the speed of writing and reading compared with dd on the same
# disk. README.md tells what is measured.
#
# usage: bench/checkpoint/run.sh [FOLDER on the disk to measure] [rounds]          LOCKSTEP may name the program
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
lockstep=$(realpath -m "${LOCKSTEP:-$root/target/release/lockstep}")
rounds=${2:-5}
[[ -x $lockstep ]] || { echo "no program at $lockstep; run cargo build --release" >&2; exit 1; }

work=$(mktemp -d -p "${1:-.}")
trap 'rm -rf "$work"' EXIT

(cd "$root" && cargo run --quiet --release -p lockstep-ckpt --example checkpoint_speed -- "$work" "$rounds")
"$lockstep" train "$here/model.toml" --runs "$work/runs"
python3 "$here/report.py" "$work/runs/checkpoint/metrics.jsonl"
