#!/usr/bin/env bash
# Makes the virtual environment: scripts/setup.sh VENV
# With a GPU (nvidia-smi answers) the CUDA build of vLLM is installed, otherwise the pinned CPU build.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup.sh VENV}
needed_gib=5
torch_cpu_index=https://download.pytorch.org/whl/cpu

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "mismatch-probe needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
free_kib=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print $4 }')
if [ ! -d "$venv" ] && [ "$free_kib" -lt $((needed_gib * 1024 * 1024)) ]; then
    echo "The environment $venv needs about $needed_gib GiB, and its disk has $((free_kib / 1024)) MiB free:" \
        "free some, or name a folder on another disk, make VENV=FOLDER" >&2
    exit 2
fi
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv" # whole, also after an interruption
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet)

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    echo "GPU found: installing the CUDA build of vLLM; that takes some minutes" >&2
    "${pip[@]}" -e '.[vllm-cuda,datasets,dev]'
else
    echo "no GPU found: installing the pinned CPU build of vLLM, 3.5 GB on disk; that takes some minutes" >&2
    torch=$(grep '^torch==' requirements/cpu.lock)
    pinned=("${pip[@]}" --no-deps --no-compile) # Python compiles what is imported, a quarter of 27,000 modules
    "${pinned[@]}" "$torch" 2>/dev/null || "${pinned[@]}" --index-url "$torch_cpu_index" "$torch"
    "${pinned[@]}" -r requirements/cpu.lock
    "${pip[@]}" --no-deps --no-build-isolation -e .
fi
