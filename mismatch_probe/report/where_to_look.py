"""Where to look when two sides disagree: where along the response, in which tokens and sequences, on which side."""

from collections import Counter

from markupsafe import Markup

from mismatch_probe.inert import shortened
from mismatch_probe.notation import write_estimate, write_number, write_range
from mismatch_probe.records.summary import PairSummary, TokenInContext
from mismatch_probe.report.hostile import visible, visible_token
from mismatch_probe.report.names import pair_key
from mismatch_probe.stats.results import CurveBin

_STANDS_OUT = 2.0
_MAX_TOKENS_NAMED = 3
_TOKEN_CHARACTERS = 40


def where_to_look(pair: PairSummary) -> list[Markup]:
    """Sentences in HTML, model output in them inert; empty where the record has nothing to point at."""
    sentences = [_along_the_response(pair), _on_which_side(pair), _in_which_tokens(pair), _in_which_sequences(pair)]
    return [lead for lead in sentences if lead]


def _along_the_response(pair: PairSummary) -> Markup:
    bins = pair.length.abs_diff_by_position if pair.length else []
    overall = pair.metrics.get("abs_logprob_diff")
    if len(bins) < 2 or overall is None:
        return Markup()
    worst = max(bins, key=lambda bin_: bin_.mean.value)
    if worst.mean.value < _STANDS_OUT * overall.value:
        shape = "the deviation is even: no stretch of the response stands out"
    else:
        place = (
            "it starts there and decays"
            if worst is bins[0]
            else "it grows towards the end"
            if worst is bins[-1]
            else "it peaks there"
        )
        shape = (
            f"mean |d| is {write_estimate(worst.mean)} at {_tokens(worst)}, "
            f"against {write_estimate(overall)} over all tokens; {place}"
        )
    return Markup('<a href="#length">Along the response</a>: {}.').format(shape)


def _on_which_side(pair: PairSummary) -> Markup:
    if pair.blame is None or pair.blame.rms_error_pi is None or pair.blame.rms_error_mu is None:
        return Markup()
    pi, mu = pair.blame.rms_error_pi, pair.blame.rms_error_mu
    larger, smaller = max(pi.value, mu.value), min(pi.value, mu.value)
    if larger < _STANDS_OUT * smaller:
        which = "both sides err alike"
    else:
        which = "the training path (pi) errs more" if pi.value > mu.value else "the inference engine (mu) errs more"
    return Markup('<a href="#errors">Which side</a>: {}: rms error {} for pi, {} for mu.').format(
        which, write_estimate(pi), write_estimate(mu)
    )


def _in_which_tokens(pair: PairSummary) -> Markup:
    if not pair.worst_tokens:
        return Markup()
    named = [
        Markup('<code class="token">{}</code> (token {}, d {})').format(
            visible_token(token.token, _TOKEN_CHARACTERS),
            token.position + 1,
            write_number(_d(token)),
        )
        for token in pair.worst_tokens[:_MAX_TOKENS_NAMED]
    ]
    return Markup('<a href="#worst-{}">Which tokens</a>: ').format(pair_key(pair)) + Markup(", ").join(named) + "."


def _in_which_sequences(pair: PairSummary) -> Markup:
    owners = Counter(token.sequence_id for token in pair.worst_tokens)
    if not owners:
        return Markup()
    sequence_id, most = owners.most_common(1)[0]
    if len(owners) > 1 and most == 1:
        text = Markup("no two of the {} worst tokens lie in one response").format(len(pair.worst_tokens))
    else:
        text = Markup("{} of the {} worst tokens lie in <code>{}</code>").format(
            most, len(pair.worst_tokens), visible(shortened(sequence_id, _TOKEN_CHARACTERS, keep="start"))
        )
    return Markup('<a href="#worst-{}">Which responses</a>: {}.').format(pair_key(pair), text)


def _tokens(curve_bin: CurveBin) -> str:
    return f"token{'s' if curve_bin.high - curve_bin.low > 1 else ''} {write_range(curve_bin)}"


def _d(token: TokenInContext) -> float:
    return token.log_pi - token.log_mu
