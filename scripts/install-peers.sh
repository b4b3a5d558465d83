#!/usr/bin/env bash
# Makes bench/peers/.venv, a Python environment with the systems Lockstep is measured against:
# torch (Gloo, and the step benchmark), transformers (Hugging Face folders) and mpi4py (Open MPI).
# Run scripts/install-mpi.sh first. Running it twice does nothing.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/bench/peers/.venv"

command -v mpicc >/dev/null || { echo "install-peers: no mpicc; run scripts/install-mpi.sh first" >&2; exit 1; }

# A venv that was moved or half made has no working python; --clear starts it over.
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    python3 -m venv --clear "$venv"
fi

have() {
    "$venv/bin/python" -c "import $1" 2>/dev/null
}

have numpy || "$venv/bin/pip" install numpy
have torch || "$venv/bin/pip" install torch
have transformers || "$venv/bin/pip" install transformers safetensors
# From source, so that it binds to the Open MPI of this machine and not to a wheel's own MPI.
have mpi4py.MPI || MPICC="$(command -v mpicc)" "$venv/bin/pip" install --no-binary mpi4py mpi4py

"$venv/bin/python" - <<'PYTHON'
import sys
import numpy
import torch
import transformers
from mpi4py import MPI
import mpi4py

print(f"python {sys.version.split()[0]}, numpy {numpy.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
print(f"mpi4py {mpi4py.__version__} on {MPI.Get_library_version().split(',')[0]}")
PYTHON
