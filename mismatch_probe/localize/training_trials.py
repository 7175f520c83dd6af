"""Parts of the training path in FP32, one after another, everything else as it is."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from transformers import PreTrainedModel

from mismatch_probe.config.localize import LocalizeSettings
from mismatch_probe.localize.interventions import TOGETHER
from mismatch_probe.localize.trials import NOT_16_BIT, InFP32, Score, try_parts
from mismatch_probe.localize.workspace import JobNotes, Workspace
from mismatch_probe.records.activations import is_layer
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.inside.fp32_parts import ATTENTION, EVERYTHING, model_part_in_fp32, model_parts


def try_training_parts(
    workspace: Workspace,
    settings: LocalizeSettings,
    model: PreTrainedModel,
    sequences: Sequence[TokenSequence],
    score: Score,
    notes: JobNotes,
) -> None:
    """Try every part, every layer, all parts together, and the whole model; what cannot be tried is said in `notes`."""
    if not settings.train_dtype.is_16_bit or settings.training.precision not in ("weights", "to"):
        notes.left_out["training path"] = NOT_16_BIT
        return
    names = model_parts(model)
    if settings.training.attention == "flash_attention_2":
        names.remove(ATTENTION)
        notes.left_out["attention of the training path"] = "flash_attention_2 does not compute in FP32"
    parts: dict[str, InFP32] = {name: partial(model_part_in_fp32, model, name) for name in [*names, EVERYTHING]}
    parts[TOGETHER] = partial(_all_in_fp32, model, [name for name in names if not is_layer(name)])
    notes.trials += try_parts(workspace, "train", sequences, score, parts)


@contextmanager
def _all_in_fp32(model: PreTrainedModel, parts: Sequence[str]) -> Iterator[int]:
    with ExitStack() as stack:
        yield sum(stack.enter_context(model_part_in_fp32(model, part)) for part in parts)
