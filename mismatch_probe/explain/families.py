"""Every hypothesis that is tried on a side, with the cause that it names."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.explain.hypotheses import Family, Option, departure
from mismatch_probe.explain.judging import Floats, Judge, LoggedTokens
from mismatch_probe.notation import join_names
from mismatch_probe.stats.bases import BASES, base_name
from mismatch_probe.stats.rounding import Floor

_TOP_P: Final = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
_TOP_K: Final = (1, 5, 8, 10, 20, 30, 40, 50, 64, 100, 128, 200, 256, 500, 512, 1000, 1024)
_MIN_P: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2)


def of_distribution(as_declared: Distribution, logged_temperature: Floats) -> Iterator[Family]:
    """Other sampling settings: what the engine makes of the logits, or fails to.

    logged_temperature: what the log says of each token [T], NaN where it says none.
    """
    temperature, cut = _declared_temperature(as_declared, logged_temperature), _declared_cut(as_declared)
    yield Family(
        "temperature",
        "distribution",
        (Option(departure("distribution", Code.TEMPERATURE, "another temperature", declared=temperature)),),
        free_temperature=True,
    )
    raw = Distribution(temperature=1.0)
    if as_declared != raw:
        yield Family(
            "raw log-probs",
            "distribution",
            (
                Option(
                    departure(
                        "distribution",
                        Code.RAW_LOGPROBS,
                        "raw log-probs (temperature 1, nothing cut)",
                        declared=cut if as_declared.temperature == 1 else _declared_both(as_declared, cut),
                    ),
                    distribution=raw,
                ),
            ),
        )
    cuts = (
        ("top-p", [(value, Distribution(as_declared.temperature, top_p=value)) for value in _TOP_P]),
        ("top-k", [(value, Distribution(as_declared.temperature, top_k=value)) for value in _TOP_K]),
        ("min-p", [(value, Distribution(as_declared.temperature, min_p=value)) for value in _MIN_P]),
    )
    for name, values in cuts:
        yield Family(
            name,
            "distribution",
            tuple(
                Option(
                    departure("distribution", Code.TRUNCATED_SUPPORT, f"{name} {value:g}", float(value), cut),
                    distribution=distribution,
                )
                for value, distribution in values
                if distribution != as_declared
            ),
        )
    if as_declared != as_declared.uncut():
        what = "no cut, not to the recorded sets either" if as_declared.in_sets else "no top-p, top-k or min-p"
        yield Family(
            "nothing cut",
            "distribution",
            (
                Option(
                    departure("distribution", Code.TRUNCATED_SUPPORT, what, declared=cut),
                    distribution=as_declared.uncut(),
                ),
            ),
        )


def _declared_temperature(as_declared: Distribution, logged_temperature: Floats) -> str:
    """Which temperature is declared, and by whom."""
    logged = np.unique(logged_temperature[np.isfinite(logged_temperature)])
    if as_declared.temperature is None:
        return "the log declares several"
    if len(logged) == 1 and logged[0] == as_declared.temperature:
        return f"the log declares {as_declared.temperature:g}"
    if not len(logged) and as_declared.temperature == 1:
        return "the log declares none and 1 is taken"
    return f"--temperature declares {as_declared.temperature:g}"


def _declared_both(as_declared: Distribution, cut: str) -> str:
    if as_declared.temperature is None:
        return f"the log declares several temperatures and {cut}"
    return f"temperature {as_declared.temperature:g} is declared and {cut}"


def _declared_cut(as_declared: Distribution) -> str:
    """What the probabilities are declared to be normalised over."""
    if as_declared.in_sets:
        return "the log declares what each token was drawn from"
    values = (("top-p", as_declared.top_p, 1.0), ("top-k", as_declared.top_k, 0), ("min-p", as_declared.min_p, 0.0))
    cuts = [f"{name} {value:g}" for name, value, uncut in values if value != uncut]
    return f"{join_names(cuts)} {'is' if len(cuts) == 1 else 'are'} declared" if cuts else "no cut is declared"


_COMPARED: Final = 64
"""Number of first tokens that show which response a line's log-probs belong to."""
_LEAST_TOKENS: Final = 8
_OFF_FLOORS: Final = 4.0
_LEAST_MATCHED: Final = 0.8
_SHIFTS: Final = (1, -1, 2, -2)


def edits(tokens: LoggedTokens, floor: Floor) -> Iterator[Family]:
    for by in _SHIFTS:
        yield Family(
            f"labels {by:+d}",
            "log",
            (
                Option(
                    departure("log", Code.LABEL_OFFSET, _shift(by), float(by)),
                    edit=partial(_shift_labels, tokens=tokens, by=by),
                ),
            ),
        )
    yield Family(
        "another base",
        "log",
        tuple(
            Option(
                departure("log", Code.OTHER_BASE, f"logarithms to {base_name(base)}", float(base)),
                edit=partial(_in_base, base=base),
            )
            for base in BASES
        ),
    )
    yield Family(
        "responses exchanged",
        "log",
        (
            Option(
                departure("log", Code.MISPAIRED, "log-probs of another response"),
                edit=partial(_exchange_responses, tokens=tokens, floor=floor),
            ),
        ),
        chosen_for="response",
    )


def _shift(by: int) -> str:
    places = "1 place" if abs(by) == 1 else f"{abs(by)} places"
    return f"labels shifted, each log-prob is that of the token {places} {'after' if by > 0 else 'before'} it"


def _shift_labels(prediction: Floats, judge: Judge, tokens: LoggedTokens, by: int) -> Floats:
    result = np.full_like(prediction, np.nan)
    for row in range(tokens.num_responses):
        own = prediction[tokens.of_row(row)]
        own_result = result[tokens.of_row(row)]
        if abs(by) < len(own):
            own_result[max(0, -by) : len(own) - max(0, by)] = own[max(0, by) : len(own) + min(0, by)]
    return result


def _in_base(prediction: Floats, judge: Judge, base: int) -> Floats:
    return np.asarray(prediction / np.log(base))


def _exchange_responses(prediction: Floats, judge: Judge, tokens: LoggedTokens, floor: Floor) -> Floats:
    """For each response that is off, the prediction of the response that its even tokens fit best.

    Only the even tokens choose, so that the odd ones can test the choice. Where most responses find another one, those
    that do not get no prediction: theirs may be short, or not in the sample.
    """
    heads = _heads(prediction, tokens)
    units = floor.at(heads)
    column = _heads(np.where(judge.is_counted, judge.column, np.nan), tokens)
    column[:, 1::2] = np.nan
    result = prediction.copy()
    homeless, num_matched = [], 0
    for row in range(tokens.num_responses):
        scores = np.abs(column[row] - heads) / units
        is_known = np.isfinite(scores)
        overlap = is_known.sum(axis=1)
        typical = np.where(overlap * 2 >= _LEAST_TOKENS, _median(scores, is_known), np.inf)
        best = int(typical.argmin())
        if not np.isfinite(typical[row]) or typical[row] <= _OFF_FLOORS:
            continue
        if best == row or typical[best] > _OFF_FLOORS:
            homeless.append(row)
        else:
            num_matched += 1
            own, other = result[tokens.of_row(row)], prediction[tokens.of_row(best)]
            length = min(len(own), len(other))
            own[:length], own[length:] = other[:length], np.nan
    if num_matched >= _LEAST_MATCHED * (num_matched + len(homeless)):
        for row in homeless:
            result[tokens.of_row(row)] = np.nan
    return result


def _median(values: Floats, is_known: np.ndarray) -> Floats:
    """Of each row's known values; infinite where there are none."""
    in_order = np.sort(np.where(is_known, values, np.inf), axis=1)
    counts = is_known.sum(axis=1)
    middle = np.stack([np.maximum(counts - 1, 0) // 2, counts // 2], axis=1)
    return np.asarray(np.take_along_axis(in_order, np.minimum(middle, values.shape[1] - 1), axis=1).mean(axis=1))


def _heads(values: Floats, tokens: LoggedTokens) -> Floats:
    """The first tokens of each response [R, C], NaN beyond its end."""
    heads = np.full((tokens.num_responses, _COMPARED), np.nan)
    inside = tokens.places < _COMPARED
    heads[tokens.rows[inside], tokens.places[inside]] = values[inside]
    return heads
