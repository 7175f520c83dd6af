#!/usr/bin/env bash
# Runs the grids of reports/paper and copies what came of them: scripts/paper.sh FOLDER VENV
# What was run is not run again, so one that was interrupted goes on. It takes three hours to five on two cores that have other work.
# Of smollm2 it needs the checkpoint that `make real` makes, and leaves that grid out without it.
set -euo pipefail
folder=${1:?usage: scripts/paper.sh FOLDER VENV}
bin=$(cd "${2:?usage: scripts/paper.sh FOLDER VENV}" && pwd)/bin
cd "$(dirname "$0")/.."
export PYTHONPATH=examples/rewards${PYTHONPATH:+:$PYTHONPATH} # the reward of smollm2.toml
experts=build/paper/experts                                   # what shapes.toml names
[ -e "$experts/config.json" ] || "$bin/python" -m scripts.upcycled mismatch_probe/demo_checkpoint "$experts"
grids="precision conditions guarded slow shapes corrections sanity sanity-seeds"
if [ -e build/real/smollm2/config.json ]; then # what smollm2.toml names
    grids="$grids smollm2"
else
    echo "build/real/smollm2 holds no checkpoint, so the grid smollm2 is left out and its record stays; \`make real\` makes one."
fi
for grid in $grids; do
    run=$folder/$grid
    "$bin/mismatch-probe" ablate --config "reports/paper/$grid.toml" --out "$run" $([ -e "$run/manifest.json" ] && echo --resume)
    cp "$run/ablation.json" "reports/paper/$grid.json"
    case $grid in slow | smollm2) # whose single steps the page speaks of
        mkdir -p "reports/paper/steps/$grid"
        for file in "$run"/cells/*/metrics.jsonl; do
            [ ! -e "$file" ] || cp "$file" "reports/paper/steps/$grid/$(basename "$(dirname "$file")").jsonl"
        done
        ;;
    esac
done
[ ! -d "$folder/smollm2/cells" ] || "$bin/python" -m scripts.moved_weights "$folder/smollm2" reports/paper/moved-weights.json
"$bin/python" -m scripts.paper reports/paper
