#!/usr/bin/env bash
# Sequence parallelism on a slow link: how long a step of two ranks takes that cut every matrix between them, when rows
# travel while others are multiplied, and when they are waited for. README.md tells what is measured.
#
# usage: bench/overlap/rows.sh [rounds] [steps per run]         root is needed, and LOCKSTEP may name the program
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
