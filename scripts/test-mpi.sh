#!/usr/bin/env bash
# The collective suite, the failure cases and a training of boosted trees under mpirun. Run scripts/install-mpi.sh first.
# The cases on device memory use an emulated GPU, whose memory is the host's, so that every MPI can read it.
# A case passes when all expected ranks have printed PASS in time. The exit status of mpirun is ignored: it is
# an error whenever a rank dies, which some cases intend.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v mpirun >/dev/null || { echo "test-mpi: no mpirun; run scripts/install-mpi.sh first" >&2; exit 1; }

# With --workspace the features of dependencies are those of the other tests, so less is built again.
built="$(cargo test --workspace --features mpi --test under_mpi --no-run --message-format=json)"
# executable CRATE: the path of its test under_mpi.
executable() {
    grep "crates/$1" <<<"$built" | grep -o '"executable":"[^"]*under_mpi[^"]*"' | tail -n 1 | cut -d'"' -f4
}
collectives="$(executable comm)"
trees="$(executable gbdt)"
for binary in "$collectives" "$trees"; do
    [ -x "$binary" ] || { echo "test-mpi: the test did not build" >&2; exit 1; }
done

options=(--oversubscribe -n 4)
[ "$(id -u)" -ne 0 ] || options+=(--allow-run-as-root)

failed=0
binary="$collectives"
# check CASE REPORTS [MPIRUN OPTIONS]: REPORTS is the number of ranks that must pass.
check() {
    local case="$1" reports="$2" output passed
    shift 2
    output="$(timeout 300 mpirun "${options[@]}" "$@" "$binary" "$case" 2>&1)"
    passed="$(grep -c 'PASS rank' <<<"$output")"
    if [ "$passed" -eq "$reports" ] && ! grep -q panicked <<<"$output"; then
        echo "ok      $case ($passed ranks)"
    else
        echo "FAILED  $case: $passed of $reports ranks passed"
        echo "$output"
        failed=1
    fi
}

check collectives 4
check groups 4
check numbers 4
check disagreement 4
check messages-disagree 4
check counts-disagree 4
check late 3
check left 4
check stopped 3
# Without this, mpirun kills the survivors when it notices the killed rank, usually after they have reported.
check killed 3 --mca orte_enable_recovery 1
if command -v g++ >/dev/null && [ "$(uname -m)" = x86_64 ]; then
    gpu="$(mkdir -p "${CARGO_TARGET_DIR:-target}" && realpath "${CARGO_TARGET_DIR:-target}")/emulated-gpu"
    crates/cuda/emulator/build.sh "$gpu"
    export LOCKSTEP_CUDA_PATH="$gpu" LOCKSTEP_CACHE="$gpu/cache" LOCKSTEP_DEVICE=cuda
    check device 4
    check device-disagreement 4
    check device-killed 3 --mca orte_enable_recovery 1
    unset LOCKSTEP_CUDA_PATH LOCKSTEP_CACHE LOCKSTEP_DEVICE
else
    echo "skipped device: the emulated GPU needs g++ on x86-64"
fi
binary="$trees"
check trees 4
exit "$failed"
