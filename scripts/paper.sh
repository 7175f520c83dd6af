#!/usr/bin/env bash
# Runs the grids of reports/paper and copies what came of them: scripts/paper.sh FOLDER VENV
# What was run is not run again, so one that was interrupted goes on. It takes two hours to three on two cores.
set -euo pipefail
folder=${1:?usage: scripts/paper.sh FOLDER VENV}
bin=$(cd "${2:?usage: scripts/paper.sh FOLDER VENV}" && pwd)/bin
cd "$(dirname "$0")/.."
experts=build/paper/experts # what shapes.toml names
[ -e "$experts/config.json" ] || "$bin/python" -m scripts.upcycled mismatch_probe/demo_checkpoint "$experts"
for grid in precision conditions guarded shapes corrections sanity; do
    run=$folder/$grid
    "$bin/mismatch-probe" ablate --config "reports/paper/$grid.toml" --out "$run" $([ -e "$run/manifest.json" ] && echo --resume)
    cp "$run/ablation.json" "reports/paper/$grid.json"
done
"$bin/python" -m scripts.paper reports/paper
