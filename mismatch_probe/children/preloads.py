"""What jobs have in common: imported once, in this order, by the server that they are forked from."""

from typing import Final, Literal

Preload = Literal["training", "engine"]

STAGES: Final[dict[Preload, list[str]]] = {
    "training": [
        "torch",
        "transformers",
        "pandas",
        "mismatch_probe.compare.inputs",
        "mismatch_probe.training_path.preload",
        "mismatch_probe.training_path.fit",
        "mismatch_probe.compare.scoring_job",
        "mismatch_probe.compare.children",
    ],
    "engine": ["mismatch_probe.engines.vllm.preload", "mismatch_probe.compare.engine_job"],
}
"""By whom it serves; each stage imports on top of the one before, so both servers hold one torch."""
