"""One example of each command, at the end of its help."""

from typing import Final

EXAMPLES: Final[dict[str, str]] = {
    "compare": "compare --model ckpt --dtype bf16 --dtype fp32 --prompts sums:long --out runs/mine",
    "train": "train --model ckpt --task sums:terms=3 --objective grpo --steps 100 --out runs/rl",
    "sanity": "sanity --model ckpt --train-dtype fp16 --infer-dtype fp16 --out runs/sanity",
    "evaluate": "evaluate --model ckpt --task sums:medium --dtype bf16 --dtype fp16 --out runs/evaluate",
    "headroom": "headroom --model ckpt --out runs/headroom",
    "localize": "localize --run runs/mine --dtype bf16",
    "import": "import logs/ --out runs/theirs",
    "explain": "explain runs/theirs --model ckpt/12 --step 12",
    "score": "score runs/theirs --model ckpt/12 --step 12 --out runs/scored",
    "watch": "watch logs/ --guards guards.toml",
    "report": "report runs/mine",
    "diff": "diff runs/before runs/after",
    "gate": "gate runs/mine --config mismatch.toml",
    "gate calibrate": "gate calibrate runs/before runs/after --config mismatch.toml",
    "doctor": "doctor --model ckpt",
    "schema": "schema summary",
    "init": "init gate --out mismatch.toml",
}


def example(command: str) -> str:
    return f"Example: mismatch-probe {EXAMPLES[command]}"
