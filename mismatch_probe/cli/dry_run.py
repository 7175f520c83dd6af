"""The plan of a comparison on one screen."""

from rich.console import Console
from rich.table import Table

from mismatch_probe.compare.estimates import DryRun

_GIB = 1 << 30


def show_dry_run(plan: DryRun, console: Console) -> None:
    """Print what would be done and its upper bounds."""
    console.print(
        f"{plan.model} ({plan.architecture}, {plan.parameters:,} parameters): {plan.num_prompts} prompts of up to "
        f"{plan.longest_prompt_tokens} tokens, sequences of up to {plan.longest_sequence_tokens} tokens",
        highlight=False,
    )
    table = Table("stage", "responses", "tokens, at most", "weights, GiB", title="Would run; nothing was started")
    for column in table.columns[1:]:
        column.justify = "right"
    for stage in plan.stages:
        table.add_row(stage.stage, f"{stage.sequences:,}", f"{stage.max_tokens:,}", f"{stage.weight_bytes / _GIB:.3g}")
    console.print(table)
    console.print(f"disk: at most {plan.max_disk_bytes / _GIB:.3g} GiB", highlight=False)
