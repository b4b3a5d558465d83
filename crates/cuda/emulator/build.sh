#!/usr/bin/env bash
# Builds the emulated GPU: crates/cuda/emulator/build.sh FOLDER
set -euo pipefail
out="$(mkdir -p "${1:?usage: build.sh FOLDER}" && realpath "$1")"
cd "$(dirname "$0")"
flags="-std=c++17 -O3 -Wall -Wextra -shared -fPIC -ftls-model=initial-exec"
g++ $flags -march=native driver.cpp lanes.cpp hopper.cpp check.cpp -o "$out/libcuda.so.1" -Wl,-soname,libcuda.so.1 -ldl
g++ $flags compiler.cpp -o "$out/libnvrtc.so.13" -ldl
g++ $flags -O3 -march=native blaslt.cpp -o "$out/libcublasLt.so.13" -L"$out" -l:libcuda.so.1 -Wl,-rpath,'$ORIGIN'
cp device.h lanes.h "$out/"
