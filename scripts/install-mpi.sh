#!/usr/bin/env bash
# Installs Open MPI and the build dependencies of the Rust crate `mpi`: libclang for bindgen, and
# pkg-config. Debian and Ubuntu packages only. Running it twice does nothing.
set -euo pipefail

packages=(libopenmpi-dev openmpi-bin libclang-dev pkg-config)

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

apt_install() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

installed() {
    dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q '^install ok installed$'
}

command -v apt-get >/dev/null || { echo "install-mpi: no apt-get here; install Open MPI by hand" >&2; exit 1; }

missing=()
for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
done

if [ "${#missing[@]}" -gt 0 ]; then
    echo "installing ${missing[*]}"
    # A failed install usually means stale package lists; only then are they refreshed.
    if ! apt_install "${missing[@]}"; then
        as_root apt-get update
        apt_install "${missing[@]}"
    fi
fi

echo "mpirun: $(command -v mpirun), $(mpirun --version 2>/dev/null | head -n 1)"
