"""The input of the verdict: a run's data, the effective settings, and the worst tokens of a pair.

Departures are those of each logged side from the reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import REFERENCE_DTYPES, Dtype
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.provenance.stored_tensors import adapter_key
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.summary import ResponseTokens, TokenInContext
from mismatch_probe.stats.results import Conditioning, Estimate, FewTokens, RoutingCheck
from mismatch_probe.stats.rounding import conditioning, fp32_errors
from mismatch_probe.stats.sequences import Floats, Reals, TokenPair, difference
from mismatch_probe.stats.worst_responses import WorstResponse, few_tokens, worst_responses, worst_tokens
from mismatch_probe.verdict.case import doubled_first_token, share_without
from mismatch_probe.verdict.departures import (
    Departures,
    apart_floors,
    exact_outcome,
    floors_of,
    rounding_floor,
    rounds_by_more,
)
from mismatch_probe.verdict.preflight.facts import AGREEMENT, Sides, has_experts
from mismatch_probe.verdict.signatures import signatures
from mismatch_probe.verdict.signatures.profile import Disagreement, root_mean_square
from mismatch_probe.verdict.signatures.weights import floor_with_noise, is_no_rounding

NO_REPEAT: Final = "two FP64 passes over the same tokens differ, so that FP32 is not apart from FP64 by rounding alone"
WORST_TOKENS: Final = 20
CONTEXT_TOKENS: Final = 24
WORST_RESPONSES: Final = 5
RESPONSE_TOKENS: Final = 256
"""A longer response is recorded as so many tokens around its worst one."""
PROMPT_CHARACTERS: Final = 2000
"""The number of last characters that are recorded of a longer prompt."""
LEAST_NATS: Final = 0.01
"""Responses without a token that differs by so much are not shown."""
_DIGITS = 9
"""The significant digits of float32."""


def worst_in_context(data: PairData) -> list[TokenInContext]:
    """The tokens of the largest abs(d), largest first; none where no response is usable."""
    if data.pair is None:
        return []
    tokens, name_of = [], _names(data)
    for worst in worst_tokens(data.pair, WORST_TOKENS):
        row = int(data.rows[worst.row])
        texts = data.rollouts["token_texts"][row].as_py()
        position = data.position_in_response(worst.row, worst.position)
        tokens.append(
            TokenInContext(
                sequence_id=name_of(row),
                position=position,
                before="".join(texts[max(0, position - CONTEXT_TOKENS) : position]),
                token=texts[position],
                after="".join(texts[position + 1 : position + 1 + CONTEXT_TOKENS]),
                log_pi=worst.log_pi,
                log_mu=worst.log_mu,
                log_ref=worst.log_ref,
            )
        )
    return tokens


def few_tokens_of(data: PairData) -> FewTokens | None:
    """The few tokens that contribute half of the KL, if few do; a response of a log has the name of the log."""
    if data.pair is None:
        return None
    name_of = _names(data)

    def place(row: int, position: int) -> tuple[str, int]:
        return name_of(int(data.rows[row])), data.position_in_response(row, position)

    return few_tokens(data.pair, place)


def _names(data: PairData) -> Callable[[int], str]:
    """What names a response by its row: its id, or where it stands in a log, with as much of the path as tells the
    log's files apart.
    """
    if "where" not in data.rollouts.column_names:
        return lambda row: str(data.rollouts["id"][row].as_py())
    places = data.rollouts["where"]
    paths = {PurePath(place.rpartition(_OF)[2]) for place in places.unique().to_pylist()}
    first = next(iter(paths), PurePath())
    parents = [parent for parent in first.parents if all(path.is_relative_to(parent) for path in paths)]

    def name(row: int) -> str:
        place, of, path = places[row].as_py().rpartition(_OF)
        return f"{place}{of}{PurePath(path).relative_to(parents[0]) if parents else path}"

    return name


_OF: Final = " of "
"""Stands between a line, a row or a turn of a log and its path."""


def worst_with_tokens(data: PairData, prompt_texts: Mapping[str, str]) -> list[ResponseTokens]:
    """The responses that deviate most, with the log-probs of their tokens; none where no response is usable.

    prompt_texts: the texts by prompt id.
    """
    if data.pair is None:
        return []
    worst = worst_responses(data.pair, WORST_RESPONSES)
    return [
        _response_with_tokens(data, data.pair, each, prompt_texts)
        for each in worst
        if each.largest_abs_diff >= LEAST_NATS
    ]


def _response_with_tokens(
    data: PairData, pair: TokenPair, worst: WorstResponse, prompt_texts: Mapping[str, str]
) -> ResponseTokens:
    row = int(data.rows[worst.row])
    texts: list[str] = data.rollouts["token_texts"][row].as_py()
    positions = data.measured_positions(worst.row)
    first = max(0, min(int(positions[worst.worst]) - RESPONSE_TOKENS // 2, len(texts) - RESPONSE_TOKENS))
    window = slice(first, first + RESPONSE_TOKENS)
    of_response = slice(*pair.sequences.offsets[worst.row : worst.row + 2])
    log_pi, log_mu = (_values_at(positions, leg[of_response], len(texts))[window] for leg in (pair.log_pi, pair.log_mu))
    return ResponseTokens(
        sequence_id=_names(data)(row),
        prompt=prompt_texts.get(data.rollouts["prompt_id"][row].as_py(), "")[-PROMPT_CHARACTERS:] or None,
        num_tokens=worst.num_tokens,
        log_weight=worst.log_weight,
        mean_abs_diff=worst.mean_abs_diff,
        largest_abs_diff=worst.largest_abs_diff,
        kl_k3=worst.kl_k3,
        first=first,
        tokens=texts[window],
        log_pi=log_pi,
        log_mu=log_mu,
    )


def _values_at(positions: npt.NDArray[np.int64], values: Reals, length: int) -> list[float | None]:
    """The values at their positions of the response [`length`], None between them."""
    spread: list[float | None] = [None] * length
    for position, value in zip(positions.tolist(), values.tolist(), strict=True):
        spread[position] = float(f"{value:.{_DIGITS}g}")
    return spread


_LOGGED: Final = {"pi": "log_pi", "mu": "log_mu"}


def departures(
    settings: CompareSettings,
    name: PairName,
    data: Mapping[PairName, PairData],
    deviations: Mapping[PairName, Disagreement],
) -> Departures | None:
    """The departures of the logged sides; None where the pair has no logged sampler or no reference."""
    pi, mu = settings.pi(name[0]), settings.mu(name[1])
    if not mu.logged or data[name].pair is None:
        return None
    logged_pair = next((pair for pair in settings.pairs if settings.pi(pair[0]).logged and pair[1] == name[1]), None)
    pair_name = next((pair for pair in settings.pairs if not settings.pi(pair[0]).logged and pair[1] == name[1]), None)
    if pair_name is not None:
        return _departures_from_checkpoint(settings, name, pair_name, logged_pair, data, deviations)
    pair = data[name].pair
    return (
        None if pair is None or pair.log_ref is None else _departures_from_each_other(pair, pi, mu, settings.confidence)
    )


def _departures_from_checkpoint(
    settings: CompareSettings,
    name: PairName,
    pair_name: PairName,
    logged_pair: PairName | None,
    data: Mapping[PairName, PairData],
    deviations: Mapping[PairName, Disagreement],
) -> Departures | None:
    """The departures in units of the error of the training path; the trainer's side only where the log has one."""
    ours, level = data[pair_name].pair, settings.confidence
    if ours is None or ours.log_ref is None:
        return None
    pi, mu = settings.pi(pair_name[0]), settings.mu(pair_name[1])
    distance = difference(ours.log_pi, ours.log_ref), pi.dtype
    of_fp32 = fp32_errors(ours) if rounds_by_more(deviations[pair_name].conditioning) else None
    dtypes, error_mu = {"mu": mu.dtype}, difference(ours.log_mu, ours.log_ref)
    floors = {"mu": floors_of(error_mu, ours.log_ref, distance, mu.dtype, ours.sequences, level, of_fp32)}
    departure = None
    theirs = None if logged_pair is None else data[logged_pair].pair
    if logged_pair is not None and theirs is not None and theirs.log_ref is not None:
        if theirs.log_ref.shape != ours.log_ref.shape:
            return None
        dtypes["pi"] = settings.pi(logged_pair[0]).dtype
        error = difference(theirs.log_pi, theirs.log_ref)
        floors["pi"] = floors_of(error, theirs.log_ref, distance, dtypes["pi"], theirs.sequences, level, of_fp32)
        departure = apart_floors(
            theirs.log_pi, theirs.log_mu, theirs.log_ref, distance, dtypes, theirs.sequences, level, of_fp32
        )
    has_signature = bool(signatures(deviations[pair_name]))
    sides = ("pi", "mu") if name == logged_pair else ("mu",)
    return Departures(sides, _available_floors(floors), dtypes, departure, from_checkpoint=True, is_named=has_signature)


def _departures_from_each_other(pair: TokenPair, pi: Side, mu: Side, level: float) -> Departures:
    """The departures of each side, in units of the error of the other side."""
    assert pair.log_ref is not None
    errors: dict[str, Floats] = {
        side: difference(getattr(pair, column), pair.log_ref) for side, column in _LOGGED.items()
    }
    dtypes: dict[str, Dtype] = {"pi": pi.dtype, "mu": mu.dtype}
    others = {"pi": "mu", "mu": "pi"}
    floors = {
        side: floors_of(errors[side], pair.log_ref, (errors[other], dtypes[other]), dtypes[side], pair.sequences, level)
        for side, other in others.items()
    }
    return Departures(("pi", "mu"), _available_floors(floors), dtypes, None, from_checkpoint=False)


def _available_floors(floors: dict[str, Estimate | None]) -> dict[str, Estimate]:
    return {side: estimate for side, estimate in floors.items() if estimate is not None}


def sides_of(manifest: Manifest, name: PairName, data: PairData) -> Sides:
    """The effective settings of both sides of a pair, and the first tokens of its prompts."""
    pi, mu = manifest.settings.pi(name[0]), manifest.settings.mu(name[1])
    prompts, start = data.rollouts["prompt_token_ids"].to_pylist(), manifest.model.start_token
    return Sides(
        train_dtype=pi.dtype,
        infer_dtype=mu.dtype,
        train=_recorded_settings(manifest, pi.stage("score")),
        infer=_recorded_settings(manifest, mu.stage("sample")),
        checkpoints=(manifest.identity_of(pi), manifest.identity_of(mu)),
        difference=manifest.difference_of(pi, mu),
        doubled_first_token=doubled_first_token(prompts),
        lacking_start=None if start is None else (start[1], *share_without(start[0], prompts)),
        reference=settings_of_reference(manifest, pi),
    )


def settings_of_reference(manifest: Manifest, pi: Side) -> dict[str, Any]:
    """The effective settings of pi's reference; empty where there is none.

    Whether it agrees with itself is that of FP64 where a run has it: rounding in FP32 may be large.
    """
    reference = manifest.settings.reference_of(pi)
    stage = None if reference is None else manifest.stages.get(reference.stage("score"))
    exact = manifest.stages.get(manifest.settings.reference_in(Dtype.FP64, pi).stage("score"))
    if stage is None or exact is None or AGREEMENT not in exact.effective_settings:
        return {} if stage is None else stage.effective_settings
    return {**stage.effective_settings, AGREEMENT: exact.effective_settings[AGREEMENT]}


def _recorded_settings(manifest: Manifest, stage: str) -> dict[str, Any]:
    """
    Raises:
        BrokenRecord: the manifest has no such stage, or not the adapter that the stage names.
    """
    if stage not in manifest.stages:
        raise BrokenRecord(f"the manifest says nothing of the stage {stage}, so it is damaged: compare again")
    settings = manifest.stages[stage].effective_settings
    adapter = settings.get("adapter")
    if isinstance(adapter, str):  # a server's side records the folder that it should serve
        if adapter_key(adapter) not in manifest.content_keys:
            raise BrokenRecord(f"the manifest says nothing of the adapter {adapter}, so it is damaged: compare again")
        return {**settings, "adapter": {"folder": adapter, "fingerprint": manifest.content_keys[adapter_key(adapter)]}}
    return settings


def disagreements(
    manifest: Manifest, data: Mapping[PairName, PairData], routings: Mapping[PairName, RoutingCheck | str | None]
) -> dict[PairName, Disagreement]:
    """The deviations of every usable pair, each with the result of FP32 against FP32.

    routings: the comparison of both sides' experts, or why there is none.
    """
    deviations = {}
    for name, pair_data in data.items():
        if pair_data.pair is not None:
            check = routings.get(name)
            disagreement = _deviation_of_pair(manifest, name, pair_data)
            deviations[name] = replace(disagreement, routing=check if isinstance(check, RoutingCheck) else None)
    return {
        name: _settled_deviation(disagreement, exact_of(manifest, name, deviations))
        for name, disagreement in deviations.items()
    }


def exact_of(manifest: Manifest, name: PairName, deviations: Mapping[PairName, Disagreement]) -> Disagreement | None:
    """The pair that decides between bug and precision for another pair; None where it was not run or is not usable."""
    exact = manifest.settings.exact_counterpart(name)
    return None if exact is None else deviations.get(exact)


def _settled_deviation(deviation: Disagreement, exact: Disagreement | None) -> Disagreement:
    if exact is None:
        return deviation
    outcome = exact_outcome(exact)
    return replace(deviation, is_settled=outcome == "differs", formats_alone=outcome == "agrees")


def _deviation_of_pair(manifest: Manifest, name: PairName, data: PairData) -> Disagreement:
    assert data.pair is not None
    sides = sides_of(manifest, name, data)
    dtypes = sides.train_dtype, sides.infer_dtype
    rounding = rounding_floor(data.pair, *dtypes)
    rounds_coarsely = any(dtype.rounds_coarsely for dtype in dtypes)
    exact_repeat = _repeat_in_fp64(manifest, name)
    measured = NO_REPEAT if is_no_rounding(exact_repeat) else _conditioning(manifest, name, data.pair)
    if rounds_by_more(measured) and not rounds_coarsely:
        rounding = max(rounding, root_mean_square(fp32_errors(data.pair)) * float(np.sqrt(2)))
    disagreement = Disagreement(
        data.pair,
        *dtypes,
        floor=floor_with_noise(data.pair, dtypes, rounding) if rounds_coarsely else rounding,
        conditioning=measured,
        exact_repeat=exact_repeat,
        rounding=rounding,
        prompt_lengths=data.prompt_lengths,
        has_experts=has_experts(sides.train.get("config", {})),
        ref_repeats_pi=not manifest.settings.pi(name[0]).logged,
        repeats_decode=sides.infer.get("decode_support") == sides.infer.get("replay_support"),
    )
    if data.prompt_start is None:
        return disagreement
    start = Disagreement(data.prompt_start, *dtypes, floor=disagreement.floor)
    sensitivity = root_mean_square(start.sensitivity)
    floor, rounding = disagreement.logit_floor * sensitivity, disagreement.logit_rounding * sensitivity
    return replace(disagreement, prompt_start=replace(start, floor=floor, rounding=rounding))


def _repeat_in_fp64(manifest: Manifest, name: PairName) -> float | None:
    """The median nats between two passes in FP64 of the training side over the same tokens; None where that side is of
    a log, which other code computed, or where it was not measured.
    """
    pi = manifest.settings.pi(name[0])
    stage = manifest.stages.get(manifest.settings.reference_in(Dtype.FP64, pi).stage("score"))
    agreement = None if pi.logged or stage is None else stage.effective_settings.get(AGREEMENT)
    return None if agreement is None else agreement.get("again_nats")


def _conditioning(manifest: Manifest, name: PairName, pair: TokenPair) -> Conditioning | str | None:
    """What rounding in FP32 does to the checkpoint of the training side, or why a check of that failed."""
    settings, pi = manifest.settings, manifest.settings.pi(name[0])
    if not any(pi.has_weights_of(settings.pi(check)) for check in manifest.rounding_checks):
        return None
    measured = conditioning(pair, settings.confidence)
    stages = (settings.reference_in(dtype, pi).stage("score") for dtype in REFERENCE_DTYPES)
    notes = [manifest.stages[stage].note for stage in stages if stage in manifest.stages]
    return measured or next(filter(None, notes), "it was not computed")
