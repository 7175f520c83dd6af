"""Laws that a trainer's metrics of one step obey, whatever the policies are. Where one is broken, the numbers are not
what their names say.

Each follows from convexity alone, and holds for means of means too, or it says which estimate is void. With a the mean
of |d|, M its largest, r its root mean square and h(x) = e^-x + x - 1: h is convex and h(x) / x^2 falls, and
h(|d|) <= e^d - d - 1 <= e^|d| - |d| - 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.notation import write_count, write_number
from mismatch_probe.records.lines import Contradiction
from mismatch_probe.stats.catalogue import METRICS, metric_words
from mismatch_probe.stats.sequences import Floats

MetricColumns = Mapping[str, Floats]
"""Values [steps] of metrics by our names."""
Mask = npt.NDArray[np.bool_]

_RELATIVE: Final = 0.02
_ABSOLUTE: Final = 2e-6
"""What sums in 32 bits leave of a k3 of 0."""
_SHARE_OF_STEPS: Final = 0.1
_FEWEST_DIGITS, _MOST_DIGITS = 3, 7
"""Behind the point, of numbers that a console rounds."""
_OTHER_TOKENS: Final = (
    "The two are means over other tokens (another mask, another average), or one of them was made after a clamp or a "
    "mask: compare nothing that rests on both."
)
_SHARES: Final = (
    *("ess_clamped", "share_masked", "weight_share_above", "weight_share_below", "prob_abs_diff_max", "prob_abs_diff"),
    *("ess_token", "ess_seq"),
)


@dataclass(frozen=True)
class CurveLaw:
    """A law of the metrics `needs`: where it is broken, by how much more than rounding is for `slack` to say."""

    name: str
    needs: tuple[str, ...]
    excess: Callable[[MetricColumns], Floats]
    """By how much each step breaks it; not above 0 where it holds."""
    scale: Callable[[MetricColumns], Floats]
    """The size of what is compared."""
    sentence: str
    """Names the metrics of `needs` in braces, as they stand at the first step that breaks it, and `limit`."""
    means: str = _OTHER_TOKENS
    limit: Callable[[MetricColumns], Floats] | None = None
    is_exact: bool = True
    relative: float = _RELATIVE
    least_share: float = 0.0
    """Of the steps: a law that only luck breaks at a few steps is broken at more."""


def _h(size: Floats) -> Floats:
    return np.exp(-size) + size - 1


def _limit_law(
    sign: float,
    name: str,
    needs: tuple[str, ...],
    quantity: str,
    limit: Callable[[MetricColumns], Floats],
    words: str,
    **options: Any,
) -> CurveLaw:
    """`quantity` is at most (sign 1), or at least (sign -1), `limit`."""
    return CurveLaw(
        name,
        needs,
        lambda of: sign * (of[quantity] - limit(of)),
        lambda of: np.abs(limit(of)),
        words,
        limit=limit,
        **options,
    )


_upper = partial(_limit_law, 1.0)
_lower = partial(_limit_law, -1.0)


def _clamped_ess(of: MetricColumns, *, most: bool) -> Floats:
    """The bound of the ESS of weights clamped from both sides, by their deviation and the mean before the clamp."""
    mean = of["weight_mean"] + (of["weight_share_below"] > 0 if most else 0)
    bound = 1 / (1 + np.square(of["weight_std"] / mean))
    return bound if most else np.where(of["weight_share_above"] > 0, 0.0, bound)


_VOID_CHI2: Final = (
    "E[w^2] - 1 is at least 0 where the weights average 1. Here nearly all weights of responses are close to 0, and "
    "the rare large ones that balance them are not in the batch: this number and an ESS of responses say nothing. Use "
    "those of tokens."
)
_SUPPORT: Final = (
    "The mean weight of a token is 1 + k3 - k1, and 1 where both sides normalise over the same tokens. One does not: a "
    "cut vocabulary (top-p, top-k: truncated_support), another temperature, or raw log-probs against processed ones."
)
_ONE_SIDED: Final = (
    "For small deviations k3 is half the mean square. So much less means a tail on one side: tokens that the training "
    "path finds far less likely than the engine did, as with a cut vocabulary or shifted labels; or a clamp before one "
    "of the two."
)

LAWS: Final[tuple[CurveLaw, ...]] = (
    _lower(
        "chi2_seq_below_zero", ("chi2_seq",), "chi2_seq", lambda of: np.zeros_like(of["chi2_seq"]),
        "chi-squared of responses is {chi2_seq}, and cannot be below 0",
        means=_VOID_CHI2, is_exact=False, least_share=0.2,
    ),
    _lower(
        "chi2_token_below_zero", ("chi2_token",), "chi2_token", lambda of: np.zeros_like(of["chi2_token"]) - 1e-3,
        "chi-squared of tokens is {chi2_token}, and cannot be below 0", means=_SUPPORT, is_exact=False, least_share=0.5,
    ),
    CurveLaw(
        "mean_weight", ("kl_k3", "kl_k1"), lambda of: np.abs(of["kl_k3"] - of["kl_k1"]) - 0.5 * of["kl_k3"] - 1e-3,
        lambda of: of["kl_k3"],
        "KL (k1) is {kl_k1} and KL (k3) {kl_k3}, so that the mean weight of a token is {limit}, not 1",
        means=_SUPPORT, limit=lambda of: 1 + of["kl_k3"] - of["kl_k1"], is_exact=False, least_share=0.8,
    ),
    _lower(
        "k3_below_abs", ("kl_k3", "abs_logprob_diff"), "kl_k3", lambda of: _h(of["abs_logprob_diff"]),
        "KL (k3) is {kl_k3}, and with a mean |d| of {abs_logprob_diff} it is at least {limit}",
    ),
    _lower(
        "k3_below_abs_seq", ("kl_k3", "abs_logprob_diff_seq"), "kl_k3", lambda of: _h(of["abs_logprob_diff_seq"]),
        "KL (k3) is {kl_k3}, and with a mean |d| of {abs_logprob_diff_seq} it is at least {limit}",
    ),
    _lower(
        "k3_below_rms_and_max", ("kl_k3", "logprob_diff_rms", "abs_logprob_diff_max"), "kl_k3",
        lambda of: np.square(of["logprob_diff_rms"] / of["abs_logprob_diff_max"]) * _h(of["abs_logprob_diff_max"]),
        "KL (k3) is {kl_k3}, and with an rms d of {logprob_diff_rms} and a largest |d| of {abs_logprob_diff_max} it is "
        "at least {limit}",
    ),
    _lower(
        "k3_below_half_square", ("kl_k3", "logprob_diff_rms"), "kl_k3",
        lambda of: np.square(of["logprob_diff_rms"]) / 2,
        "KL (k3) is {kl_k3}, and half the square of rms d ({logprob_diff_rms}) is {limit}",
        means=_ONE_SIDED, is_exact=False, relative=0.15, least_share=0.5,
    ),
    _upper(
        "k3_above_factor", ("kl_k3", "token_mult_prob_error"), "kl_k3", lambda of: of["token_mult_prob_error"] - 1,
        "KL (k3) is {kl_k3}, and with a mean probability factor of {token_mult_prob_error} it is at most {limit}",
    ),
    _lower(
        "factor_below_abs", ("token_mult_prob_error", "abs_logprob_diff"), "token_mult_prob_error",
        lambda of: np.exp(of["abs_logprob_diff"]),
        "the mean probability factor is {token_mult_prob_error}, and with a mean |d| of {abs_logprob_diff} at least "
        "{limit}",
        relative=1e-3,
    ),
    _upper(
        "mean_above_max", ("abs_logprob_diff", "abs_logprob_diff_max"), "abs_logprob_diff",
        lambda of: of["abs_logprob_diff_max"], "mean |d| is {abs_logprob_diff}, and the largest one is {limit}",
    ),
    _upper(
        "prob_mean_above_max", ("prob_abs_diff", "prob_abs_diff_max"), "prob_abs_diff",
        lambda of: of["prob_abs_diff_max"],
        "mean |pi - mu| is {prob_abs_diff}, and the largest one is {limit}",
    ),
    _upper(
        "prob_spread", ("prob_abs_diff_std", "prob_abs_diff", "prob_abs_diff_max"), "prob_abs_diff_std",
        lambda of: np.sqrt(np.maximum(of["prob_abs_diff"] * (of["prob_abs_diff_max"] - of["prob_abs_diff"]), 0)),
        "the standard deviation of |pi - mu| is {prob_abs_diff_std}, and with a mean of {prob_abs_diff} and a largest "
        "of {prob_abs_diff_max} it is at most {limit}",
    ),
    _upper(
        "prob_above_logprob", ("prob_abs_diff", "abs_logprob_diff"), "prob_abs_diff", lambda of: of["abs_logprob_diff"],
        "mean |pi - mu| is {prob_abs_diff}, and mean |d| is {limit}: probabilities differ by less than log-probs",
    ),
    _upper(
        "ess_above_weights", ("ess_clamped", "weight_std", "weight_mean", "weight_share_below"), "ess_clamped",
        lambda of: _clamped_ess(of, most=True),
        "the ESS is {ess_clamped}, and weights with a mean of {weight_mean} and a deviation of {weight_std} leave at "
        "most {limit}",
    ),
    _lower(
        "ess_below_weights", ("ess_clamped", "weight_std", "weight_mean", "weight_share_above"), "ess_clamped",
        lambda of: _clamped_ess(of, most=False),
        "the ESS is {ess_clamped}, and weights with a mean of {weight_mean} and a deviation of {weight_std} leave at "
        "least {limit}",
    ),
    CurveLaw(
        "ess_of_chi2", ("ess_token", "chi2_token", "is_ratio_mean_token"),
        lambda of: np.abs(of["ess_token"] - np.square(of["is_ratio_mean_token"]) / (1 + of["chi2_token"])),
        lambda of: of["ess_token"],
        "the ESS of tokens is {ess_token}, and their mean weight and chi-squared make it {limit}",
        limit=lambda of: np.square(of["is_ratio_mean_token"]) / (1 + of["chi2_token"]),
    ),
    _lower(
        "chi2_below_mean", ("chi2_token", "kl_k3", "kl_k1"), "chi2_token",
        lambda of: np.square(1 + of["kl_k3"] - of["kl_k1"]) - 1,
        "chi-squared of tokens is {chi2_token}, and KL (k3) and (k1) make it at least {limit}",
    ),
    _lower(
        "ppl_below_log", ("ppl_ratio", "log_ppl_diff"), "ppl_ratio", lambda of: np.exp(of["log_ppl_diff"]),
        "the ratio of perplexities is {ppl_ratio}, and their log difference of {log_ppl_diff} makes it at least "
        "{limit}",
        relative=1e-3,
    ),
    CurveLaw(
        "log_ppl_above_abs", ("log_ppl_diff", "log_ppl_abs_diff"),
        lambda of: np.abs(of["log_ppl_diff"]) - of["log_ppl_abs_diff"], lambda of: of["log_ppl_abs_diff"],
        "the mean difference of log-perplexities is {log_ppl_diff}, and the mean of their sizes is {log_ppl_abs_diff}",
    ),
    CurveLaw(
        "ratio_of_entropy", ("kl_entropy_ratio", "kl_k3", "entropy"),
        lambda of: np.abs(of["kl_entropy_ratio"] - of["kl_k3"] / of["entropy"]), lambda of: of["kl_entropy_ratio"],
        "KL over entropy is {kl_entropy_ratio}, and {kl_k3} over {entropy} is {limit}",
        limit=lambda of: of["kl_k3"] / of["entropy"],
    ),
    CurveLaw(
        "mean_weight_above_error", ("is_ratio_mean_token", "ratio_abs_error"),
        lambda of: np.abs(of["is_ratio_mean_token"] - 1) - of["ratio_abs_error"], lambda of: of["ratio_abs_error"],
        "the mean weight is {is_ratio_mean_token}, and its distance from 1 exceeds mean |rho - 1|, {ratio_abs_error}",
    ),
    _upper(
        "weight_above_max", ("weight_max", "abs_logprob_diff_max"), "weight_max",
        lambda of: np.exp(np.minimum(of["abs_logprob_diff_max"], 20.0)),
        "the largest weight is {weight_max}, and with a largest |d| of {abs_logprob_diff_max} it is at most {limit}",
    ),
)  # fmt: skip


def contradictions_in(
    columns: MetricColumns, steps: npt.NDArray[np.int64], names: Mapping[str, str]
) -> list[Contradiction]:
    """The laws that are broken, the exact ones first.

    columns: by metric, values [steps] with NaN where a step lacks one. names: the trainer's name of each metric.
    """
    fillers = [name for name, values in columns.items() if _is_filler(name, values)]
    measured_columns = {name: values for name, values in columns.items() if name not in fillers}
    contradictions = [
        _contradiction_by(law, measured_columns, steps, names) for law in (*_range_laws(measured_columns), *LAWS)
    ]
    contradictions += [_contradiction_by(_filler_law(name), columns, steps, names) for name in fillers]
    return sorted(
        (contradiction for contradiction in contradictions if contradiction is not None),
        key=lambda contradiction: not contradiction.is_exact,
    )


def _is_filler(name: str, values: Floats) -> bool:
    """Whether a metric is 0 throughout that cannot be 0, as where it was not computed."""
    facts = METRICS.get(name)
    return facts is not None and np.isfinite(facts.least) and facts.least > 0 and not np.nan_to_num(values).any()


def _filler_law(name: str) -> CurveLaw:
    return CurveLaw(
        "not_computed", (name,), lambda of: np.ones_like(of[name]), lambda of: np.zeros_like(of[name]),
        f"{metric_words(name)} is 0 throughout, where it is at least {METRICS[name].least:g}",
        means="It was not computed, and 0 stands for it. NeMo-RL writes so where it skips prev_logprobs "
        "(force_on_policy_ratio): its other errors are then those of the policy while it "
        "learns, not of the one that sampled.",
        is_exact=False,
    )  # fmt: skip


def is_grave(contradiction: Contradiction) -> bool:
    """Whether it stands at so many steps that nothing may rest on the numbers."""
    return contradiction.is_exact and contradiction.num_steps >= _SHARE_OF_STEPS * contradiction.num_judged


def resolution_of(values: Floats) -> float:
    """The last digit to which all values are rounded, as on a console; 0 where they are not."""
    finite = values[np.isfinite(values)]
    for digits in range(_FEWEST_DIGITS, _MOST_DIGITS):
        if np.allclose(finite, np.round(finite, digits), rtol=0, atol=1e-12):
            return float(10.0**-digits)
    return 0.0


def _contradiction_by(
    law: CurveLaw, columns: MetricColumns, steps: npt.NDArray[np.int64], names: Mapping[str, str]
) -> Contradiction | None:
    if not columns.keys() >= set(law.needs):
        return None
    is_complete = np.all([np.isfinite(columns[name]) for name in law.needs], axis=0)
    if not is_complete.any():
        return None
    of = {name: columns[name][is_complete] for name in law.needs}
    with np.errstate(all="ignore"):
        slack = law.relative * law.scale(of) + _ABSOLUTE + sum(resolution_of(values) for values in of.values())
        is_broken: Mask = np.asarray(law.excess(of) > slack)
    if not is_broken.any() or is_broken.mean() < law.least_share:
        return None
    place = int(np.argmax(is_broken))
    figures = {name: write_number(float(values[place])) for name, values in of.items()}
    if law.limit is not None:
        figures["limit"] = write_number(float(law.limit(of)[place]))
    at = steps[is_complete][is_broken]
    share = f"at {write_count(len(at))} of {write_count(int(is_complete.sum()))} steps, first at step {at[0]}"
    return Contradiction(
        law=law.name,
        sentence=f"{law.sentence.format(**figures)} ({share})",
        means=law.means,
        curves=[names[name] for name in law.needs],
        num_steps=len(at),
        num_judged=int(is_complete.sum()),
        first_step=int(at[0]),
        is_exact=law.is_exact,
    )


def _range_laws(columns: MetricColumns) -> Sequence[CurveLaw]:
    """That each metric lies in the range that its meaning gives it."""
    laws = []
    for name in columns:
        facts, words = METRICS.get(name), metric_words(name)
        least = facts.least if facts is not None else 0.0 if name in _SHARES else -np.inf
        most = facts.most if facts is not None else 1.0 if name in _SHARES else np.inf
        means = "It is another number than its name says, or was not computed and filled in."
        if np.isfinite(least):
            laws.append(
                _lower(
                    f"{name}_range", (name,), name, lambda of, least=least, name=name: np.full_like(of[name], least),  # type: ignore[misc]
                    f"{words} is {{{name}}}, and cannot be below {least:g}", means=means, relative=1e-6,
                )
            )  # fmt: skip
        if np.isfinite(most):
            laws.append(
                _upper(
                    f"{name}_range", (name,), name, lambda of, most=most, name=name: np.full_like(of[name], most),  # type: ignore[misc]
                    f"{words} is {{{name}}}, and cannot be above {most:g}", means=means, relative=1e-5,
                )
            )  # fmt: skip
    return laws
