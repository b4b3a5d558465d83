#!/usr/bin/env bash
# Sequence parallel on a slow link: step time of two tensor parallel ranks with and without overlap of communication
# and matrix multiplies. README.md describes the measurement.
#
# usage: bench/overlap/rows.sh [rounds] [steps per run]         needs root; LOCKSTEP: path of the binary
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
lockstep=$(realpath -m "${LOCKSTEP:-$root/target/release/lockstep}")
rounds=${1:-5} steps=${2:-5}
. "$here/link.sh"

bench=("$lockstep" bench step --config "$here/rows.toml" --steps "$steps" --threads 1 --json)
for ((round = 1; round <= rounds; round++)); do
    echo "round $round of $rounds" >&2
    together overlapped
    together waited --set comm.overlap=false
done
python3 "$here/rows.py" "$work"
