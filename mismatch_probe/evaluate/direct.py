"""The direct check: the training path answers the same problems itself, batch by batch, and resumes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

from mismatch_probe.compare.batches import run_batches
from mismatch_probe.compare.events import AnyEvent, parse
from mismatch_probe.compare.plan import fixed_batches
from mismatch_probe.config.sides import Side
from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.provenance.keys import sequence_seed
from mismatch_probe.records.evaluation import EvaluationDirectory
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.records.tables import ROLLOUTS, write_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mismatch_probe.training_path.generation import Sampler


def sample_training_path(
    run: EvaluationDirectory,
    manifest: Manifest,
    prompts: Sequence[EncodedPrompt],
    tokenizer: "PreTrainedTokenizerBase",
    listener: Callable[[AnyEvent], None],
) -> None:
    """As many responses from pi in each training dtype as an engine gave, unless they are there already.

    Raises:
        EngineError: the model cannot be loaded or run; whole batches are kept.
        StorageError: a batch could not be recorded.
    """
    for pi in sides_still_to_sample(run):
        _sample(run, manifest, prompts, tokenizer, pi, listener)


def sides_still_to_sample(run: EvaluationDirectory) -> list[Side]:
    """Training sides without all of their own responses. Raises BrokenRecord where the manifest cannot be read."""
    return [pi for pi in run.read_manifest().settings.train_sides if not run.pi_rollouts_path(pi).exists()]


def _sample(
    run: EvaluationDirectory,
    manifest: Manifest,
    prompts: Sequence[EncodedPrompt],
    tokenizer: "PreTrainedTokenizerBase",
    pi: Side,
    listener: Callable[[AnyEvent], None],
) -> None:
    from mismatch_probe.training_path.generation import Sampler

    settings = manifest.settings
    rows = [(prompt, sample) for prompt in prompts for sample in range(settings.sampling.samples_per_prompt)]
    assert settings.engine.batch_sequences is not None, "resolved when the run was made"
    size = settings.engine.batch_sequences
    batches = fixed_batches(len(rows), size)
    assert pi.training is not None
    stage, training = pi.stage("sample"), pi.training
    parts = run.parts(stage, ("rollouts",))
    with ExitStack() as stack:

        @cache
        def loaded() -> Sampler:
            folder, trust = manifest.identity_of(pi).folder, pi.model.trust_remote_code
            return stack.enter_context(Sampler(folder, pi.dtype, training, settings.sampling, trust_remote_code=trust))

        def work(numbers: list[int]) -> tuple[dict[str, pa.Table], int]:
            seed = sequence_seed(settings.sampling.seed, stage, numbers[0] // size)
            table = _batch(loaded(), [rows[number] for number in numbers], tokenizer, pi, seed)
            return {"rollouts": table}, pa.compute.sum(pa.compute.list_value_length(table["token_ids"])).as_py()

        run_batches(parts, stage, batches, work, lambda message: listener(parse(message)))
    write_table(run.pi_rollouts_path(pi), parts.read(len(batches), "rollouts").combine_chunks())
    parts.remove()


def _batch(
    sampler: "Sampler",
    rows: Sequence[tuple[EncodedPrompt, int]],
    tokenizer: "PreTrainedTokenizerBase",
    pi: Side,
    seed: int,
) -> pa.Table:
    prompts = [prompt for prompt, _ in rows]
    end: int | None = tokenizer.eos_token_id
    generated = sampler.sample(prompts, end, seed)
    texts = TokenTexts(tokenizer)
    return pa.table(
        {
            "id": [pi.row_id(prompt.prompt_id, sample) for prompt, sample in rows],
            "prompt_id": [prompt.prompt_id for prompt in prompts],
            "sampler": [pi.sampler] * len(rows),
            "seed": [seed] * len(rows),
            "prompt_token_ids": [prompt.token_ids for prompt in prompts],
            "token_ids": [response.token_ids for response in generated],
            "token_texts": [texts(response.token_ids) for response in generated],
            "finish_reason": [response.finish_reason for response in generated],
        },
        schema=ROLLOUTS,
    )
