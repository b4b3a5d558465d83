#!/bin/sh
# Explores the interleavings of the shared-memory protocols (crates/comm/src/memory/loom_models.rs).
# The environment variable LOOM_MAX_PREEMPTIONS overrides the bounds that the models set.
set -eu
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
exec cargo test -p lockstep-comm --lib --release loom -- "$@"
