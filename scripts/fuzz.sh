#!/usr/bin/env bash
# Fuzzes the parsers of files and network data: scripts/fuzz.sh [EXECUTIONS [TARGET…]]
# Uses libFuzzer with the stable toolchain; LLVM's sancov pass measures the coverage. See fuzz/README.md.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"

runs=${1:-100000}
shift || true
targets=${*:-run_file cluster_file manifest config_json safetensors token_file trees_data trees_model frame handshake}
host=$(rustc -vV | sed -n 's/^host: //p')

flags="--cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module"
for option in level=4 inline-8bit-counters pc-table trace-compares; do
    flags+=" -Cllvm-args=-sanitizer-coverage-$option"
done
# With --target, the flags do not apply to build scripts and macros.
RUSTFLAGS="$flags" cargo build --quiet --release --target "$host" --bins

bin=${CARGO_TARGET_DIR:-target}/$host/release
mkdir -p artifacts
# Inputs that are files are written to memory.
TMPDIR=$(mktemp -d -p "$([ -d /dev/shm ] && echo /dev/shm || echo /tmp)")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
# Not instrumented: it is not linked with libFuzzer.
cargo run --quiet --example seeds -- corpus
for target in $targets; do
    mkdir -p "corpus/$target"
    log=artifacts/$target.log
    # The targets measure CPU time themselves; this timeout only ends real hangs, even on a busy machine.
    if ! "$bin/$target" "corpus/$target" -runs="$runs" -dict=values.dict -timeout=120 -rss_limit_mb=1024 -malloc_limit_mb=1024 \
        -artifact_prefix="artifacts/$target-" -print_final_stats=1 >"$log" 2>&1; then
        tail -40 "$log"
        echo "$target: FAILED, see fuzz/$log"
        exit 1
    fi
    stat() { sed -n "s/^stat::$1: *//p" "$log"; }
    echo "$target: $(stat number_of_executed_units) executions, peak $(stat peak_rss_mb) MiB"
done
