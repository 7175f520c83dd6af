"""Imported once by a process that commands are forked from: each that trains would import it for a quarter second."""

from importlib import import_module

for module in (
    "mismatch_probe.ablate.forecast",
    "mismatch_probe.ablate.run",
    "mismatch_probe.cli.training_watch",
    "mismatch_probe.importing.run",
    "mismatch_probe.localize.jobs",
    "tests.warm_python",
    "torch.distributed.elastic.agent.server.api",
    "transformers.integrations.mistral.tokenizer",
    "transformers.models.qwen3.modeling_qwen3",
):
    import_module(module)
