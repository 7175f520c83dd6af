"""The worst responses as text, each token coloured by how far its two log-probs are apart."""

from collections.abc import Mapping
from typing import Final

from markupsafe import Markup

from mismatch_probe.inert import shortened
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.records.summary import PairSummary, ResponseTokens, Summary
from mismatch_probe.report.hostile import PART_OF_CHARACTER, visible, visible_token
from mismatch_probe.report.names import pair_key, pair_label
from mismatch_probe.report.sections.worst import in_text_anchor, most_tokens, worst_anchor
from mismatch_probe.report.view import Block, Cell, ColoredText, ColorScale, Note, Section, Table
from mismatch_probe.report.windows import Window, windows

_STEPS: Final = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Nats from which the next stronger colour begins: about a factor of three a step, the same on every page."""
_TOKEN_CHARACTERS, _ID_CHARACTERS, _PROMPT_CHARACTERS = 20, 48, 600


def responses(summary: Summary) -> Section | None:
    """None where no response was recorded, as in runs of earlier versions, or none deviates."""
    shown = [(pair, found) for pair in summary.pairs if (found := windows(summary, pair))]
    if not shown:
        return None
    blocks: list[Block] = [_scale()]
    for pair, of_pair in shown:
        blocks += _blocks(pair, of_pair, most_tokens(summary), is_first=pair is shown[0][0])
    quiet = [pair_label(pair) for pair in summary.pairs if pair.worst_tokens and not pair.worst_responses]
    if quiet:
        blocks.append(Note(f"{', '.join(quiet)}: no token of the worst responses differs by {_STEPS[0]:g} nats."))
    return Section(
        "responses",
        "Worst responses, token by token",
        "The responses whose importance weight exp(S), mean |d| or single token is farthest off. Blue tokens with a "
        "solid line are likelier under pi, orange ones with a dotted line under mu. Point at a token, or step through "
        "with the arrow keys, for its log-probs; an outlined token leads to its row among the worst. "
        f"A token that holds only a part of the next character is shown as {PART_OF_CHARACTER}.",
        blocks,
    )


def _scale() -> ColorScale:
    bounds = [f"{step:g}" for step in _STEPS]
    below = [(f"m{level}", f"≤ −{bounds[level - 1]}") for level in range(len(_STEPS), 0, -1)]
    above = [(f"p{level}", f"≥ {bounds[level - 1]}") for level in range(1, len(_STEPS) + 1)]
    return ColorScale([*below, ("", "less"), *above])


def _blocks(pair: PairSummary, shown: list[Window], most: int, *, is_first: bool) -> list[Block]:
    rows: list[list[Cell]] = [
        [
            Markup('<a href="#{}"><code class="id">{}</code></a>').format(
                _anchor(pair, number), visible(_id(response))
            ),
            write_count(response.num_tokens),
            write_number(response.log_weight),
            write_number(response.mean_abs_diff),
            write_number(response.kl_k3),
            write_number(response.largest_abs_diff),
        ]
        for number, response in enumerate(window.response for window in shown)
    ]
    columns = ["response", "tokens", "log weight S", "mean |d|", "KL (k3)", "largest |d|"]
    table = Table(f"Worst responses of {pair_label(pair)}", columns, rows, stacked=True, anchor=_table_anchor(pair))
    leading = {
        (token.sequence_id, token.position): worst_anchor(pair, number)
        for number, token in enumerate(pair.worst_tokens[:most])
    }
    texts = [
        _text(pair, number, window, leading, is_open=is_first and number == 0) for number, window in enumerate(shown)
    ]
    return [table, *texts]


def _anchor(pair: PairSummary, number: int) -> str:
    return f"response-{pair_key(pair)}-{number + 1}"


def _table_anchor(pair: PairSummary) -> str:
    return f"responses-{pair_key(pair)}"


def _id(response: ResponseTokens) -> str:
    return shortened(response.sequence_id, _ID_CHARACTERS, keep="start")


def _text(
    pair: PairSummary, number: int, window: Window, leading: Mapping[tuple[str, int], str], *, is_open: bool
) -> ColoredText:
    response, diffs = window.response, window.diffs
    log_mu = response.log_mu[window.start : window.end]
    tokens = [
        _token(response.tokens[place], diff, leading.get((response.sequence_id, response.first + place)))
        for place, diff in zip(window.places, diffs, strict=True)
    ]
    first, last = (response.first + place for place in (window.start + 1, window.end))
    return ColoredText(
        _anchor(pair, number),
        f"{pair_label(pair)}: {_id(response)}, tokens {write_count(first)} to {write_count(last)}",
        Markup("").join(tokens),
        log_mu=",".join("" if value is None else f"{value:.4f}" for value in log_mu),
        diff=",".join("" if value is None else write_number(value).replace(",", "") for value in diffs),
        first=first,
        prompt=response.prompt and shortened(response.prompt, _PROMPT_CHARACTERS, keep="end"),
        back=[("all of this pair", _table_anchor(pair)), ("its map of probabilities", f"scatter-{pair_key(pair)}")],
        is_open=is_open,
    )


def _token(text: str, diff: float | None, row: str | None) -> Markup:
    """A token with the class of its colour; one of the worst leads to its row, and its row here."""
    name, shown = _level(diff), _shown(text)
    if row is not None:
        return Markup('<a id="{}" class="{}" href="#{}">{}</a>').format(in_text_anchor(row), name, row, shown)
    if not name:
        return Markup("<span>{}</span>").format(shown)
    return Markup("<span class={}>{}</span>").format(name, shown)


def _shown(text: str) -> Markup:
    """A token's text, with a line break where its last line begins."""
    before, line_break, last_line = shortened(text, _TOKEN_CHARACTERS, keep="start").rpartition("\n")
    if not line_break:
        return visible_token(text, _TOKEN_CHARACTERS)
    return visible(before + line_break) + Markup("\n") + visible(last_line)


def _level(diff: float | None) -> str:
    """`p3`: likelier under pi, in the third of the colours; empty below the first, and without a number."""
    level = sum(abs(diff or 0) >= step for step in _STEPS)
    return f"{'p' if (diff or 0) > 0 else 'm'}{level}" if level else ""
