"""The largest deviations in their context, and what could not be measured."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from mismatch_probe.inert import shortened
from mismatch_probe.notation import ABSENT, write_count, write_number
from mismatch_probe.records.summary import PairSummary, Summary, TokenInContext
from mismatch_probe.report.hostile import visible, visible_token
from mismatch_probe.report.names import pair_key, pair_label
from mismatch_probe.report.view import Block, Cell, Note, Section, Table
from mismatch_probe.report.windows import Window, windows

_MOST_ON_PAGE = 60
_AT_ONCE = 5
_CONTEXT_CHARACTERS = 80
_TOKEN_CHARACTERS = 60
_ID_CHARACTERS = 48
_NO_TEXT = "The checkpoint has no tokenizer, so prompts and tokens have no text: each token is shown by its id."


def worst(summary: Summary, *, has_text: bool = True) -> Section:
    """`has_text`: whether the checkpoint has a tokenizer that tells the text of its tokens."""
    blocks: list[Block] = [] if has_text else [Note(_NO_TEXT)]
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


def _tables(pair: PairSummary, most: int, in_full: Sequence[Window]) -> list[Block]:
    """The first few at once, the others on request."""
    tokens = pair.worst_tokens[:most]
    if not tokens:
        return [Note(f"{pair_label(pair)}: no token deviates.")]
    anchors = [worst_anchor(pair, number) for number in range(len(tokens))]
    rows = [
        _row(token, anchor if any(window.holds(token) for window in in_full) else None)
        for token, anchor in zip(tokens, anchors, strict=True)
    ]
    title, anchor = f"Worst tokens of {pair_label(pair)}", f"worst-{pair_key(pair)}"
    tables: list[Block] = [_table(title, rows[:_AT_ONCE], anchors[:_AT_ONCE], anchor=anchor)]
    if rows[_AT_ONCE:]:
        title = f"{len(rows) - _AT_ONCE} more of {pair_label(pair)}"
        tables.append(_table(title, rows[_AT_ONCE:], anchors[_AT_ONCE:], folded=True))
    return tables


def _table(
    caption: str, rows: list[list[Cell]], anchors: list[str], *, anchor: str = "", folded: bool = False
) -> Table:
    columns = ["token in its context", "d", "p under pi", "p under mu", "p under ref", "token number", "response"]
    return Table(
        caption,
        columns,
        rows,
        text_columns=frozenset({6}),
        folded=folded,
        stacked=True,
        anchor=anchor,
        row_anchors=anchors,
    )


def _row(token: TokenInContext, in_full: str | None) -> list[Cell]:
    """`in_full`: the row's anchor where the page shows the token in its whole response too."""
    number = write_count(token.position + 1)
    return [
        _in_context(token),
        write_number(token.log_pi - token.log_mu),
        write_number(math.exp(token.log_pi)),
        write_number(math.exp(token.log_mu)),
        ABSENT if token.log_ref is None else write_number(math.exp(token.log_ref)),
        number if in_full is None else Markup('<a href="#{}">{}</a>').format(in_text_anchor(in_full), number),
        Markup('<code class="id">{}</code>').format(
            visible(shortened(token.sequence_id, _ID_CHARACTERS, keep="start"))
        ),
    ]


def _in_context(token: TokenInContext) -> Markup:
    return Markup('<bdi class="context">{}<mark>{}</mark>{}</bdi>').format(
        visible(shortened(token.before, _CONTEXT_CHARACTERS, keep="end")),
        visible_token(token.token, _TOKEN_CHARACTERS),
        visible(shortened(token.after, _CONTEXT_CHARACTERS, keep="start")),
    )
