"""Plants faults into one side of a pair and sees whether `localize` names module and layer.

    python -m benchmarks.localize_faults SCRATCH [MODEL ...] [--trials N] [--seed N] [--publish FOLDER]

A MODEL is one of `MODELS`, or the folder of a real checkpoint, whose trials go on where they were interrupted. Each
model's trials are kept in SCRATCH; the report `localize-faults.md` is made of all that are there.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from transformers.models.mixtral import MixtralConfig

from benchmarks.localize_faults.faults import Fault
from benchmarks.localize_faults.lab import REAL_NEW_TOKENS, REAL_PROMPTS, Trial, Workload, run_model
from benchmarks.localize_faults.publish import publish
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.records.findings import Suspect
from mismatch_probe.tasks import resolve_model
from tests.tiny_models import FAMILIES, make_checkpoint, plant_outliers

TRIALS: Final = 4
REAL_TRIALS: Final = 3
CHATS: Final = Path("examples/prompts/chats.jsonl")
NUM_LAYERS: Final = 3
EVERYWHERE: Final[list[tuple[str, float]]] = [
    ("weight", 0.02),
    ("layer", 0.01),
    ("epsilon", 5e-4),
    ("epsilon", 2e-3),
    ("rope", 1.1),
    ("rope", 2.0),
    ("row", 0.1),
]
MODELS: Final[dict[str, list[tuple[str, float]]]] = {
    "llama": EVERYWHERE,
    "qwen2": EVERYWHERE,
    "qwen3-moe": [*EVERYWHERE, ("router", 0.0)],
    "mixtral": [*EVERYWHERE, ("router", 0.0)],
    "outliers": EVERYWHERE,
    "demo": [("weight", 0.02), ("layer", 0.01), ("epsilons", 1e-5), ("rope", 1.1)],
}
"""Random models of 3 layers, one of them with a sink, a massive activation and a huge and a dead channel, and the
trained demo model, whose embedding and head are one tensor."""
SINK: Final = 1


def _mixtral(**changes: Any) -> MixtralConfig:
    moe = FAMILIES["qwen3-moe"]().to_dict()
    shape = {name: moe[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
    return MixtralConfig(
        **shape,
        head_dim=32,
        intermediate_size=64,
        num_local_experts=4,
        rms_norm_eps=1e-6,
        sliding_window=None,
        **changes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}, or folders; all of these")
    parser.add_argument("--trials", type=int, help=f"of a fault on each side; {TRIALS}, {REAL_TRIALS} of a real one")
    parser.add_argument("--seed", type=int, default=0, help="of the first place; the next has the next seed")
    parser.add_argument("--publish", type=Path, default=Path("reports"), help="folder of the report")
    arguments = parser.parse_args()
    scratch, seed = arguments.scratch, arguments.seed
    FAMILIES["mixtral"] = _mixtral
    for model in arguments.models or MODELS:
        real = Path(model)
        seeds = range(seed, seed + (arguments.trials or (REAL_TRIALS if real.is_dir() else TRIALS)))
        at = scratch / real.name
        at.mkdir(parents=True, exist_ok=True)
        if real.is_dir():
            workload = Workload.of_chats(real, CHATS, REAL_PROMPTS, REAL_NEW_TOKENS)
            trials = run_model(real.name, real, at / "trials", EVERYWHERE, seeds, workload)
            _keep(trials, scratch / f"{real.name}.json")
            shutil.rmtree(at)
            continue
        before: list[int] = []
        if model == "demo":
            checkpoint = resolve_model(ModelSettings(path="demo"))
        elif model == "outliers":
            checkpoint = make_checkpoint(at / "checkpoint", "llama", num_hidden_layers=NUM_LAYERS)
            plant_outliers(checkpoint, SINK)
            before = [SINK]
        else:
            checkpoint = make_checkpoint(at / "checkpoint", model, num_hidden_layers=NUM_LAYERS)
        trials = run_model(model, checkpoint, at / "trials", MODELS[model], seeds, Workload.of_random_ids(before))
        shutil.rmtree(at)
        _keep(trials, scratch / f"{model}.json")
    publish([item for path in sorted(scratch.glob("*.json")) for item in _read(path)], arguments.publish)


def _keep(trials: list[Trial], path: Path) -> None:
    kept = [{**asdict(trial), "suspects": [suspect.model_dump() for suspect in trial.suspects]} for trial in trials]
    path.write_text(json.dumps(kept))


def _read(path: Path) -> list[Trial]:
    return [
        Trial(
            load["model"],
            load["side"],
            load["fault"] and Fault(**load["fault"]),
            [Suspect.model_validate(suspect) for suspect in load["suspects"]],
        )
        for load in json.loads(path.read_text())
    ]


if __name__ == "__main__":
    main()
