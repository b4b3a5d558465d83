#!/usr/bin/env bash
# The part of the gradient reduction that overlaps with the backward pass, on a slow link between two "hosts":
# network namespaces connected by a veth pair of 1 Gbit/s. README.md describes the measurement.
#
# usage: bench/overlap/run.sh [rounds] [steps per run]          needs root; LOCKSTEP: path of the binary
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
lockstep=$(realpath -m "${LOCKSTEP:-$root/target/release/lockstep}")
rounds=${1:-5} steps=${2:-5}
. "$here/link.sh"

bench=("$lockstep" bench step --config "$here/model.toml" --steps "$steps" --threads 1 --json)

# The same computation on both sides without communication, so that the machine is equally busy.
apart() {
    local pids=() node=0
    for ns in "$a" "$b"; do
        ip netns exec "$ns" "${bench[@]}" --ranks 1 --set train.global_batch=8 > "alone-$node" &
        pids+=($!)
        node=$((node + 1))
    done
    for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
    grep -h '^{' alone-0 >> none.jsonl
}

for ((round = 1; round <= rounds; round++)); do
    echo "round $round of $rounds" >&2
    together overlap
    together end --set comm.overlap=false --set comm.bucket_mb=100000
    apart
done
python3 "$here/report.py" "$work"
