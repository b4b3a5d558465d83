#!/usr/bin/env bash
# Compiles every CUDA kernel with NVRTC, for all supported architectures, on a machine without a GPU. Fails on register
# spills. Downloads the wheel of NVRTC with pip. Exits with 2 if it cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels="${CARGO_TARGET_DIR:-target}/cuda-wheels"
if [ ! -d "$wheels/nvidia" ]; then
    python3 -m pip install --quiet --target "$wheels" nvidia-cuda-nvrtc || exit 2
fi
lib="$(dirname "$(find "$(realpath "$wheels")" -name 'libnvrtc.so.*' | head -1)")"
# With --workspace the features of dependencies, and so the builds, are those of the other tests.
LOCKSTEP_CUDA_PATH="$lib" LOCKSTEP_NEED_NVRTC=1 \
    cargo test --quiet --workspace --lib every_kernel_compiles
