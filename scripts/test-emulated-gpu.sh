#!/usr/bin/env bash
# Runs tests of the CUDA backend on a GPU that g++ and the CPU emulate (crates/cuda/emulator): kernels, memory, streams, graphs
# and the code around them, but neither cuDNN nor NCCL, and nothing about speed.
#
#     scripts/test-emulated-gpu.sh                              # operations and collectives against their references
#     scripts/test-emulated-gpu.sh --test device -- embedding      # other arguments of `cargo test --workspace`
#     LOCKSTEP_EMULATED_ORDER=random scripts/test-emulated-gpu.sh    # threads of a block run in a random order
#     LOCKSTEP_EMULATED_CHECK=1 scripts/test-emulated-gpu.sh         # races and uninitialized memory end the process
#     LOCKSTEP_EMULATED_STREAMS=late scripts/test-emulated-gpu.sh    # streams run as late as possible
set -euo pipefail
cd "$(dirname "$0")/.."

folder="$(mkdir -p "${CARGO_TARGET_DIR:-target}" && realpath "${CARGO_TARGET_DIR:-target}")/emulated-gpu"
crates/cuda/emulator/build.sh "$folder"
[ -n "${LOCKSTEP_EMULATED_CHECK:-}" ] || unset LOCKSTEP_EMULATED_CHECK
# What is compiled with checks is another program.
export LOCKSTEP_CACHE="$folder/cache${LOCKSTEP_EMULATED_CHECK:+-checked}"
export LOCKSTEP_CUDA_PATH="$folder" LOCKSTEP_DEVICE=cuda
# With --workspace the features of dependencies, and so the builds, are those of the other tests.
[ $# -gt 0 ] || set -- --test device
cargo test --workspace "$@"
