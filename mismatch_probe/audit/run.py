"""An audit: the server is asked, and its tokens are held against the checkpoint, as declared and changed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.audit.asking import ServedResponses, ask_server, load_questions
from mismatch_probe.audit.judging import (
    AuditFindings,
    Changed,
    CheckpointView,
    SeededTemperature,
    ServedSample,
    best_law,
    fit_temperature,
    is_refuted,
    law_p_value,
    other_laws,
    temperature_of_seeds,
)
from mismatch_probe.audit.scoring import (
    QUANTISATIONS,
    Prediction,
    draw,
    inverse_temperatures,
    logged_tokens,
    pair_differences,
    predict,
    step_seeds,
    with_rounded_weights,
)
from mismatch_probe.audit.verdict import judge
from mismatch_probe.config.examinations import AuditSettings
from mismatch_probe.config.model import DeclaredPolicy, ExplainSettings, ModelSettings
from mismatch_probe.dtypes import COMPUTED_IN
from mismatch_probe.explain.contexts import contexts, special_tokens
from mismatch_probe.explain.fitting import Distribution, curve
from mismatch_probe.explain.hypotheses import Context
from mismatch_probe.explain.passes import LoadedWeights, reference_weights, weights_in
from mismatch_probe.notation import write_many
from mismatch_probe.provenance import checkpoint, environment
from mismatch_probe.records.examinations import Audit, AuditedResponses
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.sequences import Sequences
from mismatch_probe.tasks import resolve_model
from mismatch_probe.training_path.fit import require_fit

StageProgressCallback = Callable[[str, int, int, str], None]
"""Hears what is done, which stage that is, from 1, of how many, and how far it is."""

_NUM_STAGES: Final = 5
_NOT_OF_SERVERS: Final = ("left padding", "positions", "packing")
"""Families of contexts that a trainer's batches have."""
_LEAST_DIFFERING: Final = 0.002
"""Share of greedy tokens that differ, from which they may be sampled."""
_LEAST_TEMPERATURE: Final = 0.3
"""A lower one cannot be distinguished from rounding by the tokens' likelihood."""


@dataclass
class _StageClock:
    tell: StageProgressCallback
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str, doing: str) -> Iterator[Callable[[str], None]]:
        tell = partial(self.tell, doing, len(self.seconds) + 1, _NUM_STAGES)
        tell("")
        start = time.perf_counter()
        yield tell
        self.seconds[name] = round(time.perf_counter() - start, 3)


def audit_server(settings: AuditSettings, tell: StageProgressCallback) -> Audit:
    """Is the server at `settings.server.url` serving what it should? `tell` receives each stage, and how far it is.

    Raises:
        UsageError: the checkpoint, the prompts, the server or the settings cannot be used.
        EngineError: the server cannot be reached, fails or lies; or the checkpoint cannot be computed.
    """
    stages = _StageClock(tell)
    folder = resolve_model(settings.model)
    require_fit(folder, trust_remote_code=settings.model.trust_remote_code)
    questions = load_questions(settings, folder)
    num_responses = len(questions[1]) * settings.sampling.samples_per_prompt
    with stages("asking", f"the server: {write_many(num_responses, 'response')}") as how_far:
        responses = ask_server(settings, folder, questions, lambda done, of: how_far(f"{done} of {of}"))
    sample = _sample_of(settings, responses)
    explained = ExplainSettings(
        model=ModelSettings(path=str(folder), trust_remote_code=settings.model.trust_remote_code),
        mu=DeclaredPolicy(dtype=settings.dtype),
        pi=DeclaredPolicy(dtype=settings.dtype),
        adapter=settings.server.adapter,
        header_texts=settings.headers,
        device=settings.device,
        batch_tokens=settings.batch_tokens,
    )
    in_dtype, differences = None, None
    rounded_to = settings.dtype if settings.dtype.rounds_coarsely else None
    with reference_weights(explained, sample.tokens, rounded_to=rounded_to) as reference:
        with stages("reference", "the checkpoint in FP32: the same token ids"):
            look = _look(sample, reference, settings)
        if look.claim is not None:
            with (
                stages("dtype", f"the checkpoint in {settings.dtype.upper()}"),
                weights_in(explained, sample.tokens, settings.dtype) as weights,
            ):
                differences = pair_differences(weights, sample.context, look.claim, sample.law)
                in_dtype = predict(weights, sample.context, sample.law, sample.seeds)
        with stages("candidates", "other weights: rounded to fewer bits"):
            changed = _changed_weights(sample, reference, look)
            if rounded_to is None and look.claim is not None:
                changed += _other_dtypes(sample, explained, look.claim)
        findings = AuditFindings(settings, sample, look, in_dtype, differences, changed, responses)
        answer = judge(findings)
        if answer.verdict.cause is None and answer.verdict.kind == "bug":
            with stages("prompts", "the checkpoint with other prompts") as how_far:
                prompts = _other_prompts(sample, reference, look, explained, how_far)
            answer = judge(replace(findings, changed=[*changed, *prompts]))
    return Audit(
        tool_version=__version__,
        created_at=environment.utc_now(),
        model=settings.model.path,
        model_fingerprint=checkpoint.fingerprint(folder),
        settings=settings,
        mode=answer.mode,
        responses=_record_of(responses),
        agreement=answer.agreement,
        law=answer.law,
        candidates=answer.candidates,
        cannot_tell=answer.cannot_tell,
        verdict=answer.verdict,
        seconds=stages.seconds,
    )


def _record_of(responses: ServedResponses) -> AuditedResponses:
    server = responses.server
    return AuditedResponses(
        software=server.software,
        model=server.model,
        root=server.root,
        num_responses=len(responses.sequences),
        num_prompts=len({*responses.prompt_numbers}),
        num_tokens=sum(len(sequence.token_ids) for sequence in responses.sequences),
        num_empty=responses.num_empty,
        from_text=responses.is_text,
        num_other_prompts=len(responses.other_prompts),
    )


def _sample_of(settings: AuditSettings, responses: ServedResponses) -> ServedSample:
    tokens = logged_tokens(responses.sequences, responses.prompt_numbers)
    sampling = settings.sampling
    law = None if sampling.is_greedy else Distribution(sampling.temperature, sampling.top_p, sampling.top_k)
    seeds = None
    if law is not None and sampling.noise == "vllm-cpu":
        seeds = [
            number
            for seed, length in zip(responses.seeds, tokens.lengths.tolist(), strict=True)
            for number in step_seeds(seed, length)
        ]
    prompts = np.asarray(responses.prompt_numbers)
    return ServedSample(
        tokens=tokens,
        context=Context.as_logged(tokens),
        clusters=prompts[tokens.rows],
        estimator=Estimator(Sequences.of_lengths(tokens.lengths, prompts), settings.confidence),
        law=law,
        seeds=seeds,
    )


def _look(sample: ServedSample, reference: LoadedWeights, settings: AuditSettings) -> CheckpointView:
    is_predicted = sample.law is None or sample.seeds is not None
    claim = predict(reference, sample.context, sample.law, sample.seeds) if is_predicted else None
    fitted = fit_temperature(curve(*reference.temperature_curve(sample.context, None)), settings.confidence)
    if sample.law is None:
        assert claim is not None
        laws = [Distribution(round(fitted.value, 3))]
        is_drawn = claim.differs.mean() > _LEAST_DIFFERING and fitted.low > _LEAST_TEMPERATURE
        return CheckpointView(claim, laws, draw(reference, sample.context, laws) if is_drawn else None, fitted)
    by_seeds = _temperature_of_seeds(sample, reference, claim)
    laws = [sample.law, *other_laws(sample.law, reference.vocab_size, fitted.value)]
    if by_seeds is not None and by_seeds.law not in laws:
        laws.append(by_seeds.law)
    draws = draw(reference, sample.context, laws)
    best, evidence = best_law(laws, draws)
    fitted_prediction, fitted_p_value = None, None
    if best and is_refuted(evidence, len(laws)):
        fitted_p_value = law_p_value(draw(reference, sample.context, [laws[best]]), settings.sampling.seed)
        if claim is not None:
            fitted_prediction = predict(reference, sample.context, laws[best], sample.seeds)
    return CheckpointView(claim, laws, draws, fitted, fitted_prediction, by_seeds, fitted_p_value)


def _temperature_of_seeds(
    sample: ServedSample, reference: LoadedWeights, claim: Prediction | None
) -> SeededTemperature | None:
    """None where the noise is not known, or names no more tokens at another temperature than declared."""
    if sample.seeds is None or sample.law is None or claim is None or not claim.differs.any():
        return None
    fit = temperature_of_seeds(inverse_temperatures(reference, sample.context, sample.seeds), sample.estimator.level)
    if fit is None or fit.low <= (sample.law.temperature or 1.0) <= fit.high:
        return None
    law = replace(sample.law, temperature=round(fit.value, 4))
    return SeededTemperature(law, fit, predict(reference, sample.context, law, sample.seeds))


def _changed_weights(sample: ServedSample, reference: LoadedWeights, look: CheckpointView) -> list[Changed]:
    changed = []
    for quantisation in QUANTISATIONS:
        with with_rounded_weights(reference.model, quantisation):
            weights = LoadedWeights(reference.model, reference.arithmetic, sample.tokens, reference.batch_tokens)
            prediction = draws = None
            if look.claim is not None:
                prediction = predict(weights, sample.context, sample.law, sample.seeds)
            if sample.law is not None:
                draws = draw(weights, sample.context, [sample.law])
            changed.append(Changed("weights", f"weights in {quantisation.name}", prediction, draws))
    return changed


def _other_dtypes(sample: ServedSample, explained: ExplainSettings, claim: Prediction) -> list[Changed]:
    """The checkpoint in the coarse dtypes that engines compute in."""
    changed = []
    for dtype in (each for each in COMPUTED_IN if each.rounds_coarsely):
        with weights_in(explained, sample.tokens, dtype) as weights:
            differences = pair_differences(weights, sample.context, claim, sample.law)
        changed.append(Changed("arithmetic", f"arithmetic in {dtype.upper()}", None, None, differences))
    return changed


def _other_prompts(
    sample: ServedSample,
    reference: LoadedWeights,
    look: CheckpointView,
    explained: ExplainSettings,
    how_far: Callable[[str], None],
) -> list[Changed]:
    """With what a template, a missing BOS or a system prompt makes of the prompts."""
    options = [
        option
        for family in contexts(sample.tokens, special_tokens(explained, reference.model))
        if family.name not in _NOT_OF_SERVERS
        for option in family.options
    ]
    changed = []
    for number, option in enumerate(options, 1):
        how_far(f"{number} of {len(options)}")
        assert option.context is not None
        prediction = draws = None
        if look.claim is not None:
            prediction = predict(reference, option.context, sample.law, sample.seeds)
        if sample.law is not None:
            draws = draw(reference, option.context, [sample.law])
        changed.append(Changed("prompt", option.departure.what, prediction, draws))
    return changed
