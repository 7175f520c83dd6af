"""Predicted against realised: what `localize` says an FP32 head would remove, and what it does remove in `compare`.

`python -m benchmarks.localize_advice OUT.md`. The prediction is measured on one set of responses. The advice is then
followed through `training.lm_head_dtype` on responses of another seed, and two comparisons of those, with it and
without, are set against each other in pairs.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mismatch_probe.compare.preparation import prepare
from mismatch_probe.compare.run import execute, start_run
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.difference.runs import difference_of
from mismatch_probe.localize.run import localize
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.stats.results import Estimate
from mismatch_probe.tasks import resolve_model
from tests.tiny_models import make_checkpoint

MODELS: Final = ("llama", "qwen2", "demo")
PROMPTS: Final = {"source": "sums:terms=2-6", "num_prompts": 768}
SAMPLING: Final = {"max_new_tokens": 96}


def measure(model: str, scratch: Path) -> tuple[Estimate, Estimate]:
    """Share of the token KL that the head in FP32 removes on the training side: predicted, and realised elsewhere."""
    made = None if model == "demo" else make_checkpoint(scratch / "checkpoint", model, num_hidden_layers=4)
    path = str(made or resolve_model(ModelSettings(path="demo")))
    values = {"model": {"path": path}, "prompts": PROMPTS, "sampling": {**SAMPLING, "seed": 0}}
    localization = localize(parse_settings(LocalizeSettings, values), scratch / "localize", lambda *messages: None)
    assert localization.interventions is not None
    predicted = next(
        intervention.removed
        for intervention in localization.interventions.ranked
        if (intervention.side, intervention.part) == ("train", "lm_head")
    )
    plain = _compared(scratch / "plain", values, {})
    advised = _compared(scratch / "advised", values, {"lm_head_dtype": "fp32"})
    (pair,) = difference_of(plain, advised).pairs
    assert pair.comparison == "paired"
    ratio = pair.metrics["kl_k3"].ratio
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    return predicted, replace(ratio, value=1 - ratio.value, low=1 - ratio.high, high=1 - ratio.low)


def _compared(path: Path, values: dict[str, Any], training: dict[str, str]) -> RunDirectory:
    """A comparison in BF16 on responses of another seed."""
    settings = parse_settings(
        CompareSettings,
        {
            **values,
            "pairs": [("bf16", "bf16")],
            "sampling": {**SAMPLING, "seed": 1},
            "engine": {"args": {"enforce_eager": True}},
            "training": training,
            "floors": {"num_sequences": 0},
            "full_vocabulary": {"positions": 0},
        },
    )
    run = start_run(path, prepare(settings))
    execute(run, lambda event: None)
    return run


def main(out: Path, models: list[str]) -> None:
    lines = [
        "# Predicted against realised gain",
        "",
        "Share of the token KL (k3, BF16 on both sides) that the training path's head in FP32 removes: as `localize`",
        "measured it, and as two comparisons of other responses (another seed) show it once the advice is followed",
        "(`training.lm_head_dtype = fp32`), in pairs. 95 % intervals, clustered by prompt.",
        "",
        "| model | predicted | advised: surely removes something | realised | realised within the predicted interval |",
        "|---|---|---|---|---|",
    ]
    for model in models:
        with tempfile.TemporaryDirectory() as scratch:
            predicted, realised = measure(model, Path(scratch))
        assert predicted.low is not None
        assert predicted.high is not None
        within = "yes" if predicted.low <= realised.value <= predicted.high else "**no**"
        advised = "yes" if predicted.low > 0 else "no"
        lines.append(f"| {model} | {_written(predicted)} | {advised} | {_written(realised)} | {within} |")
    lines += ["", "Made by `python -m benchmarks.localize_advice reports/localize-advice.md`."]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _written(share: Estimate) -> str:
    assert share.low is not None
    assert share.high is not None
    return f"{100 * share.value:.1f} % ({100 * share.low:.1f} to {100 * share.high:.1f})"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(MODELS))
