"""How a document was made: its settings, the time it took, its checkpoint."""

from mismatch_probe.notation import write_seconds, write_size
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.localize import Localization
from mismatch_probe.report.sections.provenance import key_values
from mismatch_probe.report.view import Block, Note, Section


def made(document: Headroom | Localization) -> Section:
    """The last section of a page of its own."""
    seconds = {name: write_seconds(value) for name, value in document.seconds.items()}
    blocks: list[Block] = [key_values("Seconds of each stage", seconds)]
    if isinstance(document, Localization):
        blocks += cost(document)
    blocks.append(key_values("Settings, resolved", document.settings.model_dump(mode="json"), folded=True))
    return Section(
        "provenance",
        "Provenance",
        f"Measured {document.created_at} by mismatch-probe {document.tool_version}; checkpoint {document.model}, "
        f"fingerprint {document.model_fingerprint}.",
        blocks,
    )


def cost(localization: Localization) -> list[Block]:
    memory = [
        f"{job} job: at most {write_size(size)} of memory" for job, size in localization.peak_memory_bytes.items()
    ]
    return [Note("What it took:", [f"{write_size(localization.stored_bytes)} of activations on disk", *memory])]
