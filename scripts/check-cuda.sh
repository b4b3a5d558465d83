#!/usr/bin/env bash
# Checks the CUDA backend on a machine without a GPU. Downloads NVIDIA's libraries with pip; exits with 2 if they cannot
# be installed.
# With --install it only downloads them.
# - NVRTC compiles every kernel for all supported architectures. Kernels that spill more than a few bytes fail.
# - cuDNN builds attention plans for described GPUs (crates/kernels/src/cuda/attention/plans.rs lists them). Skipped
#   without a C compiler.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels="${CARGO_TARGET_DIR:-target}/cuda-wheels"
# cuDNN 9.19 is the version that was measured on an H200. It uses NVRTC, and asks cuBLASLt for its version.
packages=("nvidia-cuda-nvrtc<14" "nvidia-cublas<14" nvidia-cudnn-cu13==9.19.1.2)
if [ ! -f "$wheels/complete" ]; then
    rm -rf "$wheels"
    python3 -m pip install --quiet --no-deps --no-compile --target "$wheels" "${packages[@]}" || exit 2
    touch "$wheels/complete"
fi
[ "${1:-}" != --install ] || exit 0
wheels="$(realpath "$wheels")"
# Folder of a library.
folder() { dirname "$(find "$wheels" -name "$1" | head -1)"; }
export LOCKSTEP_CUDA_PATH="$(folder 'libnvrtc.so.*'):$(folder 'libcudnn.so.*')"
export LOCKSTEP_NEED_NVRTC=1

tests=(every_kernel_compiles)
if cc -shared -fPIC -o "$wheels/libcuda.so.1" scripts/libcuda-without-gpu.c; then
    tests+=(plans_can_be_built --include-ignored)
    # cuDNN searches the other libraries there.
    export LD_LIBRARY_PATH="$wheels:$LOCKSTEP_CUDA_PATH:$(folder 'libcublasLt.so.*')${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
else
    echo "cuDNN plans skipped: they need a C compiler"
fi
# With --workspace the features of dependencies, and so the builds, are those of the other tests.
cargo test --quiet --workspace --lib -- --nocapture "${tests[@]}"
