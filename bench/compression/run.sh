#!/usr/bin/env bash
# Compares the loss of training with and without gradient compression: README's grammar run on two ranks, with
# uncompressed gradients, int8, and top-k of 1%. README.md shows the results.
#
# usage: bench/compression/run.sh [steps]                       LOCKSTEP: path of the binary
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
lockstep=$(realpath -m "${LOCKSTEP:-$root/target/release/lockstep}")
steps=${1:-800}
[[ -x $lockstep ]] || { echo "no binary at $lockstep; run cargo build --release" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

for how in none int8 topk:0.01; do
    echo "comm.compression=$how" >&2
    "$lockstep" train "$root/examples/grammar.toml" --ranks 2 --engine tcp --runs runs --set "name=\"${how/:/-}\"" \
        --set "comm.compression=\"$how\"" --set train.steps="$steps" --set train.sample_tokens=1 > "$how.txt" 2>&1 \
        || { tail -n 5 "$how.txt" >&2; exit 1; }
done
python3 "$here/report.py" runs none int8 topk-0.01
