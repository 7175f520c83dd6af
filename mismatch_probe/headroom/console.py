"""The answer on one screen; plain lines where the output is no terminal."""

from dataclasses import replace

from rich.console import Console

from mismatch_probe.headroom.sentences import parts_in_fp32
from mismatch_probe.records.headroom import GradientFindings, Headroom, HeadroomCode, LayerRange, Trial
from mismatch_probe.report.findings.gradients import underflow_table, with_powers
from mismatch_probe.report.findings.headroom import layers_table
from mismatch_probe.report.screen import print_advice, print_line, print_room, print_titled
from mismatch_probe.report.view import Table

_STYLES = {
    HeadroomCode.FITS: "bold green",
    HeadroomCode.FITS_WITH_LOSS_SCALE: "bold green",
    HeadroomCode.FITS_EXCEPT: "bold yellow",
    HeadroomCode.DOES_NOT_FIT: "bold red",
}
_MOST_LAYERS = 12


def render_headroom(headroom: Headroom, console: Console) -> None:
    """Verdict, what shows it, the layers nearest to the limit, the loss scales, and what to do."""
    print_room(console)
    print_line(console, with_powers(headroom.verdict.sentence), _STYLES[headroom.verdict.code])
    print_line(console, "")
    for line in headroom.verdict.evidence:
        print_line(console, with_powers(line))
    if headroom.activations is not None:
        print_titled(console, layers_table(_nearest(headroom.activations.layers)))
    tried = next((trial for trial in (headroom.plain, headroom.advised) if trial is not None and trial.scales), None)
    if tried is not None and headroom.gradients is not None:
        print_titled(console, _scales(headroom.gradients, tried))
    if headroom.sampled_by is not None:
        print_line(console, f"responses sampled by {headroom.sampled_by}; device {headroom.device}", "dim")
    print_advice(console, [with_powers(advice) for advice in headroom.verdict.advice])


def _nearest(layers: list[LayerRange]) -> list[LayerRange]:
    """The layers with the least room, in the model's order."""
    nearest = sorted(layers, key=lambda layer: float("-inf") if layer.margin_bits is None else layer.margin_bits)
    shown = {layer.layer for layer in nearest[:_MOST_LAYERS]}
    return [layer for layer in layers if layer.layer in shown]


def _scales(gradients: GradientFindings, trial: Trial) -> Table:
    """Every other loss scale that was tried, and those between which FP16 fits."""
    ends = (trial.from_exponent, trial.to_exponent)
    tried = {scale.exponent for scale in trial.scales if not scale.exponent % 2 or scale.exponent in ends}
    underflow = [underflow for underflow in gradients.underflow if underflow.exponent in tried]
    above = f", with {parts_in_fp32(trial)} in FP32" if trial.modules_in_fp32 or trial.residual_in_fp32_from else ""
    table = underflow_table(gradients.model_copy(update={"underflow": underflow}), trial)
    return replace(table, caption=f"{table.caption}{above}")
