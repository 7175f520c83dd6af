"""The worst responses and tokens in their context, token by token within a budget of bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from mismatch_probe.inert import cut_text
from mismatch_probe.notation import ABSENT, write_count, write_number
from mismatch_probe.records.summary import PairSummary, ResponseTokens, Summary, TokenInContext
from mismatch_probe.report.names import PART_OF_CHARACTER, pair_key, pair_label, visible, visible_token
from mismatch_probe.report.view import Block, Cell, ColoredText, ColorScale, Column, Note, Section, Table

_MOST_ON_PAGE = 60
_AT_ONCE = 5
_CONTEXT_CHARACTERS = 80
_WORST_TOKEN_CHARACTERS = 60
_WORST_ID_CHARACTERS = 48
_NO_TEXT: Final = "so prompts and tokens have no text: each token is shown by its id."
_WHY_NO_TEXT: Final = {
    True: f"The import was given no tokenizer, {_NO_TEXT} With the checkpoint, mismatch-probe import --model, the text "
    "is shown.",
    False: f"The checkpoint has no tokenizer, {_NO_TEXT}",
}
"""By whether the run is an import."""
_MOST_TOKENS: Final = 2400
_FEWEST_A_PAIR: Final = 64
_LONGEST: Final = 256
"""Tokens of a page, of a pair at least, and of a response at most."""


@dataclass(frozen=True)
class TokenWindow:
    """The recorded tokens of a response from `start` up to `end`."""

    response: ResponseTokens
    start: int
    end: int

    @property
    def places(self) -> range:
        return range(self.start, self.end)

    @property
    def diffs(self) -> list[float | None]:
        """d of the tokens, nats; None where one was not sampled."""
        return _diffs(self.response)[self.start : self.end]

    def holds(self, token: TokenInContext) -> bool:
        return token.sequence_id == self.response.sequence_id and token.position - self.response.first in self.places


def windows(summary: Summary, pair: PairSummary) -> list[TokenWindow]:
    """Of one pair, as far as the page's budget reaches: at least one where a response was recorded."""
    sharing = sum(bool(each.worst_responses) for each in summary.pairs)
    budget = max(_FEWEST_A_PAIR, _MOST_TOKENS // max(1, sharing))
    length = min(budget, _LONGEST)
    chosen_windows: list[TokenWindow] = []
    for response in pair.worst_responses:
        window = _around_the_worst(response, length)
        if len(window.places) > budget:
            break
        chosen_windows.append(window)
        budget -= len(window.places)
    return chosen_windows


def _around_the_worst(response: ResponseTokens, length: int) -> TokenWindow:
    diffs = _diffs(response)
    worst = max(range(len(diffs)), key=lambda place: abs(diffs[place] or 0))
    start = max(0, min(worst - length // 2, len(diffs) - length))
    return TokenWindow(response, start, min(start + length, len(diffs)))


def _diffs(response: ResponseTokens) -> list[float | None]:
    return [
        None if pi is None or mu is None else pi - mu for pi, mu in zip(response.log_pi, response.log_mu, strict=True)
    ]


def worst(summary: Summary, *, has_text: bool = True, is_import: bool = False) -> Section:
    """`has_text`: whether the run has a tokenizer, by which tokens have a text."""
    blocks: list[Block] = [] if has_text else [Note(_WHY_NO_TEXT[is_import])]
    most = most_tokens(summary)
    blocks += [block for pair in summary.pairs for block in _tables(pair, most, windows(summary, pair))]
    return Section(
        "worst",
        "Worst tokens in context",
        "The tokens with the largest |d|, each marked in the text around it and numbered from 1 within its "
        "response; a number that is a link leads to the token there. Characters that cannot be seen are shown by name.",
        blocks,
    )


def worst_anchor(pair: PairSummary, number: int) -> str:
    """Of the row of a pair's worst token, counted from 0."""
    return f"worst-{pair_key(pair)}-{number + 1}"


def in_text_anchor(row: str) -> str:
    """Of the token in its response whose row among the worst is `row`."""
    return f"{row}-in-text"


def most_tokens(summary: Summary) -> int:
    """How many tokens of each pair the page shows: fewer where there are many pairs."""
    return max(_AT_ONCE, _MOST_ON_PAGE // max(1, len(summary.pairs)))


def _tables(pair: PairSummary, most: int, in_full: Sequence[TokenWindow]) -> list[Block]:
    """The first few at once, the others on request."""
    tokens = pair.worst_tokens[:most]
    if not tokens:
        return [Note(f"{pair_label(pair)}: no token deviates.")]
    anchors = [worst_anchor(pair, number) for number in range(len(tokens))]
    rows = [
        (token, anchor if any(window.holds(token) for window in in_full) else None)
        for token, anchor in zip(tokens, anchors, strict=True)
    ]
    title, anchor = f"Worst tokens of {pair_label(pair)}", f"worst-{pair_key(pair)}"
    tables: list[Block] = [_response_table(title, rows[:_AT_ONCE], anchors[:_AT_ONCE], anchor=anchor)]
    if rows[_AT_ONCE:]:
        title = f"{len(rows) - _AT_ONCE} more of {pair_label(pair)}"
        tables.append(_response_table(title, rows[_AT_ONCE:], anchors[_AT_ONCE:], is_folded=True))
    return tables


_UNDER_REF: Final[Column[tuple[TokenInContext, str | None]]] = Column(
    "p under ref", lambda row: ABSENT if row[0].log_ref is None else write_number(math.exp(row[0].log_ref))
)


def _response_table(
    caption: str,
    rows: Sequence[tuple[TokenInContext, str | None]],
    anchors: list[str],
    *,
    anchor: str = "",
    is_folded: bool = False,
) -> Table:
    """A row has the row's anchor next to its token where the page shows the token in its whole response too."""
    columns: list[Column[tuple[TokenInContext, str | None]]] = [
        Column("token in its context", lambda row: _in_context(row[0])),
        Column("d", lambda row: write_number(row[0].log_pi - row[0].log_mu)),
        Column("p under pi", lambda row: write_number(math.exp(row[0].log_pi))),
        Column("p under mu", lambda row: write_number(math.exp(row[0].log_mu))),
        *([_UNDER_REF] if any(row[0].log_ref is not None for row in rows) else []),
        Column("token number", lambda row: _number(*row)),
        Column("response", lambda row: _short_id(row[0]), is_text=True),
    ]
    return Table.of(caption, rows, columns, is_folded=is_folded, is_stacked=True, anchor=anchor, row_anchors=anchors)


def _number(token: TokenInContext, in_full: str | None) -> Cell:
    number = write_count(token.position + 1)
    return number if in_full is None else Markup('<a href="#{}">{}</a>').format(in_text_anchor(in_full), number)


def _short_id(token: TokenInContext) -> Markup:
    return Markup('<code class="id">{}</code>').format(
        visible(cut_text(token.sequence_id, _WORST_ID_CHARACTERS, keep="start"))
    )


def _in_context(token: TokenInContext) -> Markup:
    return Markup('<bdi class="context">{}<mark>{}</mark>{}</bdi>').format(
        visible(cut_text(token.before, _CONTEXT_CHARACTERS, keep="end")),
        visible_token(token.token, _WORST_TOKEN_CHARACTERS),
        visible(cut_text(token.after, _CONTEXT_CHARACTERS, keep="start")),
    )


_STEPS: Final = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Nats from which the next stronger colour begins: about a factor of three a step, the same on every page."""
_TOKEN_CHARACTERS, _ID_CHARACTERS, _PROMPT_CHARACTERS = 20, 48, 600


def responses(summary: Summary) -> Section | None:
    """None where no response was recorded, as in runs of earlier versions, or none deviates."""
    windows_of_pairs = [(pair, of_pair) for pair in summary.pairs if (of_pair := windows(summary, pair))]
    if not windows_of_pairs:
        return None
    blocks: list[Block] = [_color_scale()]
    for pair, of_pair in windows_of_pairs:
        blocks += _blocks(pair, of_pair, most_tokens(summary), is_first=pair is windows_of_pairs[0][0])
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


def _color_scale() -> ColorScale:
    bounds = [f"{step:g}" for step in _STEPS]
    negative_levels = [(f"m{level}", f"≤ −{bounds[level - 1]}") for level in range(len(_STEPS), 0, -1)]
    positive_levels = [(f"p{level}", f"≥ {bounds[level - 1]}") for level in range(1, len(_STEPS) + 1)]
    return ColorScale([*negative_levels, ("", "less"), *positive_levels])


def _blocks(pair: PairSummary, windows_of_pair: list[TokenWindow], most: int, *, is_first: bool) -> list[Block]:
    columns: list[Column[tuple[int, ResponseTokens]]] = [
        Column("response", lambda row: _link(pair, *row)),
        Column("tokens", lambda row: write_count(row[1].num_tokens)),
        Column("log weight S", lambda row: write_number(row[1].log_weight)),
        Column("mean |d|", lambda row: write_number(row[1].mean_abs_diff)),
        Column("KL (k3)", lambda row: write_number(row[1].kl_k3)),
        Column("largest |d|", lambda row: write_number(row[1].largest_abs_diff)),
    ]
    caption = f"Worst responses of {pair_label(pair)}"
    rows = list(enumerate(window.response for window in windows_of_pair))
    table = Table.of(caption, rows, columns, is_stacked=True, anchor=_table_anchor(pair))
    leading = {
        (token.sequence_id, token.position): worst_anchor(pair, number)
        for number, token in enumerate(pair.worst_tokens[:most])
    }
    texts = [
        _colored_text(pair, number, window, leading, is_open=is_first and number == 0)
        for number, window in enumerate(windows_of_pair)
    ]
    return [table, *texts]


def _link(pair: PairSummary, number: int, response: ResponseTokens) -> Markup:
    return Markup('<a href="#{}"><code class="id">{}</code></a>').format(_anchor(pair, number), visible(_id(response)))


def _anchor(pair: PairSummary, number: int) -> str:
    return f"response-{pair_key(pair)}-{number + 1}"


def _table_anchor(pair: PairSummary) -> str:
    return f"responses-{pair_key(pair)}"


def _id(response: ResponseTokens) -> str:
    return cut_text(response.sequence_id, _ID_CHARACTERS, keep="start")


def _colored_text(
    pair: PairSummary, number: int, window: TokenWindow, leading: Mapping[tuple[str, int], str], *, is_open: bool
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
        prompt=response.prompt and cut_text(response.prompt, _PROMPT_CHARACTERS, keep="end"),
        links=[("all of this pair", _table_anchor(pair)), ("its map of probabilities", f"scatter-{pair_key(pair)}")],
        is_open=is_open,
    )


def _token(text: str, diff: float | None, row: str | None) -> Markup:
    """A token with the class of its colour; one of the worst leads to its row, and its row here."""
    name, markup = _level(diff), _token_markup(text)
    if row is not None:
        return Markup('<a id="{}" class="{}" href="#{}">{}</a>').format(in_text_anchor(row), name, row, markup)
    if not name:
        return Markup("<span>{}</span>").format(markup)
    return Markup("<span class={}>{}</span>").format(name, markup)


def _token_markup(text: str) -> Markup:
    """A token's text, with a line break where its last line begins."""
    lines_before, line_break, last_line = cut_text(text, _TOKEN_CHARACTERS, keep="start").rpartition("\n")
    if not line_break:
        return visible_token(text, _TOKEN_CHARACTERS)
    return visible(lines_before + line_break) + Markup("\n") + visible(last_line)


def _level(diff: float | None) -> str:
    """`p3`: likelier under pi, in the third of the colours; empty below the first, and without a number."""
    level = sum(abs(diff or 0) >= step for step in _STEPS)
    return f"{'p' if (diff or 0) > 0 else 'm'}{level}" if level else ""
