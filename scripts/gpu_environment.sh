#!/usr/bin/env bash
# Makes the virtual environment named by $1 over the packages of $GPU_PYTHON, whose torch it keeps, and adds what the
# tests on a GPU need and that Python lacks. Safe to repeat. Offline: on another machine with the same Python,
#     .venv/bin/pip freeze --all --exclude-editable | grep -vi '^torch==' > list && pip wheel --no-deps -w WHEELS -r list
# and WHEELS=folder here.
set -euo pipefail
venv=${1:?usage: GPU_PYTHON=python3 gpu_environment.sh VENV}
python=${GPU_PYTHON:?set GPU_PYTHON to a Python that has a torch with CUDA}
cd "$(dirname "$0")/.."

# As pip knows it: torch.__version__ may also name the CUDA version.
torch=$("$python" -c 'import importlib.metadata, torch; print(importlib.metadata.version("torch"))') || {
  echo "gpu: $python has no torch" >&2
  exit 2
}
site=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
# Debian's Python may lack ensurepip: pip is then that of GPU_PYTHON's packages.
[ -x "$venv/bin/python" ] || "$python" -m venv --system-site-packages "$venv" ||
  "$python" -m venv --clear --system-site-packages --without-pip "$venv"
# Where GPU_PYTHON is of a virtual environment itself, its packages are not the system's.
found=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" >"$found/torch-of-gpu-python.pth"

echo "torch==$torch" >"$venv/constraints.txt"
from=()
if [ -n "${WHEELS:-}" ]; then
  from=(--no-index --find-links "$WHEELS")
else
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25' ||
    echo "gpu: pip cannot be upgraded: the installation takes longer" >&2
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${from[@]}" \
  -c "$venv/constraints.txt" --config-settings editable_mode=compat \
  -e '.[embedded]' pytest pytest-timeout pytest-xdist hypothesis psutil cryptography fsspec
"$venv/bin/python" -c "
import importlib.metadata, torch
assert importlib.metadata.version('torch') == '$torch', torch.__version__
print(f'gpu: torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs')"
