#!/usr/bin/env bash
# Creates bench/peers/.venv, a Python environment with the systems that Lockstep is compared with:
# torch (Gloo, and the step benchmark), transformers (Hugging Face folders) and mpi4py (Open MPI).
# Run scripts/install-mpi.sh first. Running it twice does nothing.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/bench/peers/.venv"

command -v mpicc >/dev/null || { echo "install-peers: no mpicc; run scripts/install-mpi.sh first" >&2; exit 1; }

# A moved or incomplete venv has no working python; --clear creates it again.
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    python3 -m venv --clear "$venv"
fi

have() {
    "$venv/bin/python" -c "import $1" 2>/dev/null
}

have numpy || "$venv/bin/pip" install numpy
have torch || "$venv/bin/pip" install torch
have transformers || "$venv/bin/pip" install transformers safetensors
# Built from source, so that it uses the Open MPI of this machine and not that of a wheel.
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
