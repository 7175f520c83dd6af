"""An imported log explained with a checkpoint: its responses are handed to `explain` in a process of its own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.children import start
from mismatch_probe.children.messages import Send
from mismatch_probe.config.model import ExplainSettings, LoggedSide
from mismatch_probe.errors import UsageError
from mismatch_probe.importing.run import LOG_SIDE
from mismatch_probe.importing.selection import of_step
from mismatch_probe.provenance.checkpoint import fingerprint
from mismatch_probe.records.findings import Explanation
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.records.tables import in_order, read_table
from mismatch_probe.tasks import resolve_model

MOST_RESPONSES: Final = 128

Tell = Callable[[LoggedSide, int, int, str], None]
"""As that of `explain`."""


def explain_log(
    run: RunDirectory, settings: ExplainSettings, step: int | None, most_responses: int, tell: Tell
) -> Explanation:
    """What explains each side of the log on the responses of a step, at most so many; `tell` hears how far it is.

    Raises:
        UsageError: the run is none of a log, has no such step, or the checkpoint cannot be used.
        EngineError: the model cannot be loaded or run.
    """
    _require_log(run)
    of_step(read_table(run.rollouts_path), run.path, step)
    folder = resolve_model(settings.model).absolute()
    asked = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(folder)})})
    job = start.Job(
        name="explaining the log",
        function=f"{__name__}:explain_responses",
        arguments=(str(run.path.absolute()), asked.model_dump(mode="json"), step, most_responses),
        preload="training",
        when_killed="lower --num-responses",
    )
    known = {"settings": settings, "step": step, "model_fingerprint": fingerprint(folder)}
    return Explanation.model_validate(start.run(job, lambda progress: tell(*progress))).model_copy(update=known)


def explain_responses(
    send: Send, run: str, settings: Mapping[str, Any], step: int | None, most_responses: int
) -> dict[str, Any]:
    """The job of `explain_log`, as JSON."""
    from mismatch_probe.explain import explain

    responses = logged_responses(RunDirectory(Path(run)), step, most_responses)
    explanation = explain(ExplainSettings.model_validate(settings), responses, lambda *progress: send(list(progress)))
    return explanation.model_dump(mode="json")


def logged_responses(run: RunDirectory, step: int | None, most: int) -> list[LoggedResponse]:
    """The first `most` responses of a step as they were logged.

    Raises:
        UsageError: the run has several steps and none is named, or no such step.
        BrokenRecord: a file of the run cannot be read.
    """
    manifest = run.read_manifest()
    settings = manifest.settings
    rollouts = of_step(read_table(run.rollouts_path), run.path, step)
    mu = settings.mu(LOG_SIDE)
    rollouts = rollouts.filter(pc.equal(rollouts["sampler"], mu.sampler)).slice(0, most).combine_chunks()
    legs, ids = Legs(run, manifest.run_key), rollouts["id"].to_pylist()
    log_mu = _column(legs, mu.leg("decode"), ids)
    pi = next((side for side in settings.train_sides if side.logged), None)
    log_pi = [None] * len(ids) if pi is None else _column(legs, pi.leg(), ids)
    return [
        LoggedResponse(
            where=row["where"],
            prompt_token_ids=np.asarray(row["prompt_token_ids"], dtype=np.int32),
            token_ids=np.asarray(row["token_ids"], dtype=np.int32),
            sampled=np.asarray(row["sampled"], dtype=np.bool_),
            log_mu=mu_row,
            log_pi=pi_row,
            step=row["step"],
            weight_version=row["weight_version"],
            temperature=settings.sampling.temperature,
            finish_reason=row["finish_reason"],
        )
        for row, mu_row, pi_row in zip(rollouts.to_pylist(), log_mu, log_pi, strict=True)
    ]


def _column(legs: Legs, name: str, ids: list[str]) -> list[Any]:
    table: pa.Table = in_order(legs.read(name), ids)
    return [np.asarray(row) for row in table["logprobs"].to_pylist()]


def _require_log(run: RunDirectory) -> None:
    if run.read_manifest().log is None:
        raise UsageError(
            f"{run.path} was not imported from a log; `compare` names the cause of its own runs, and `localize --run` "
            "looks inside the model"
        )
