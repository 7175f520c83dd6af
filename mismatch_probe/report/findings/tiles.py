"""What is asked first of `headroom` and of `localize`."""

from mismatch_probe.notation import write_estimate, write_number
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.localize import Localization
from mismatch_probe.report.findings.gradients import fitting_scales
from mismatch_probe.report.findings.interventions import surely_best, whose, write_removed
from mismatch_probe.report.view import Tile


def headroom_tiles(headroom: Headroom) -> list[Tile]:
    """Room of the activations, error against BF16's, loss scales; none where nothing was run."""
    activations, plain, bf16 = headroom.activations, headroom.plain, headroom.bf16
    if activations is None or not activations.tightest or plain is None or bf16 is None:
        return []
    tightest = activations.tightest[0]
    place = f"{tightest.module or 'the model'} ({tightest.operation})"
    tiles = [
        Tile("Room before FP16 overflows", _room(tightest.margin_bits), f"at {place}"),
        Tile("Loss scales that fit", fitting_scales(plain), "what small gradients are multiplied by"),
    ]
    errors = plain.logprob_error_nats, bf16.logprob_error_nats
    if all(errors):
        fp16, other = (error for error in errors if error)
        note = f"{write_number(fp16)} against {write_number(other)} nats, rms"
        tiles.insert(1, Tile("Error of log-probs, FP16 to BF16", f"{write_number(fp16 / other)} times", note))
    return tiles


def _room(margin_bits: float | None) -> str:
    return "none" if margin_bits is None else f"{margin_bits:.1f} bits"


def localize_tiles(localization: Localization) -> list[Tile]:
    """How large the mismatch is, what mends most of it, and where it begins."""
    kl = write_estimate(localization.kl_k3)
    tiles = [Tile("KL per token", kl.value, f"{kl.interval} nats, on the responses that were looked into")]
    best = surely_best(localization)
    if best is not None:
        note = f"of the KL, by {best.part} in higher precision on {whose(best)}"
        tiles.append(Tile("What mends most", write_removed(best.removed), note))
    elif localization.interventions is not None:
        tiles.append(Tile("What mends most", "nothing for sure", "every interval of what a part removes holds 0"))
    if localization.first_difference is not None:
        inside, _, module = localization.first_difference.rpartition(".")
        tiles.append(Tile("The sides first differ at", module, f"in {inside or 'the model'}, on the same input"))
    return tiles
