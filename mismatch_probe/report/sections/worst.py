"""The largest deviations in their context, and what could not be measured."""

import math

from markupsafe import Markup

from mismatch_probe.inert import shortened
from mismatch_probe.notation import ABSENT, write_count, write_number
from mismatch_probe.records.summary import PairSummary, Summary, TokenInContext
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.names import pair_key, pair_label
from mismatch_probe.report.view import Block, Cell, Note, Section, Table

_MOST_ON_PAGE = 60
_AT_ONCE = 5
_CONTEXT_CHARACTERS = 80
_TOKEN_CHARACTERS = 60
_ID_CHARACTERS = 48
_NO_TEXT = "The checkpoint has no tokenizer, so prompts and tokens have no text: each token is shown by its id."


def worst(summary: Summary, *, has_text: bool = True) -> Section:
    """`has_text`: whether the checkpoint has a tokenizer that tells the text of its tokens."""
    blocks: list[Block] = [] if has_text else [Note(_NO_TEXT)]
    blocks += [block for pair in summary.pairs for block in _tables(pair, most_tokens(summary))]
    return Section(
        "worst",
        "Worst tokens in context",
        "The tokens with the largest |d|, each marked in the text around it and numbered from 1 within its "
        "response. Characters that cannot be seen are shown by name.",
        blocks,
    )


def worst_anchor(pair: PairSummary, number: int) -> str:
    """Of the row of a pair's worst token, counted from 0."""
    return f"worst-{pair_key(pair)}-{number + 1}"


def most_tokens(summary: Summary) -> int:
    """How many tokens of each pair the page shows: fewer where there are many pairs."""
    return max(_AT_ONCE, _MOST_ON_PAGE // max(1, len(summary.pairs)))


def _tables(pair: PairSummary, most: int) -> list[Block]:
    """The first few at once, the others on request."""
    tokens = pair.worst_tokens[:most]
    if not tokens:
        return [Note(f"{pair_label(pair)}: no token deviates.")]
    anchors = [worst_anchor(pair, number) for number in range(len(tokens))]
    tables: list[Block] = [
        _table(f"Worst tokens of {pair_label(pair)}", tokens[:_AT_ONCE], anchors, anchor=f"worst-{pair_key(pair)}")
    ]
    if tokens[_AT_ONCE:]:
        rest = tokens[_AT_ONCE:]
        tables.append(_table(f"{len(rest)} more of {pair_label(pair)}", rest, anchors[_AT_ONCE:], folded=True))
    return tables


def _table(
    caption: str, tokens: list[TokenInContext], anchors: list[str], *, anchor: str = "", folded: bool = False
) -> Table:
    rows: list[list[Cell]] = [
        [
            _in_context(token),
            write_number(token.log_pi - token.log_mu),
            write_number(math.exp(token.log_pi)),
            write_number(math.exp(token.log_mu)),
            ABSENT if token.log_ref is None else write_number(math.exp(token.log_ref)),
            write_count(token.position + 1),
            Markup('<code class="id">{}</code>').format(
                visible(shortened(token.sequence_id, _ID_CHARACTERS, keep="start"))
            ),
        ]
        for token in tokens
    ]
    columns = ["token in its context", "d", "p under pi", "p under mu", "p under ref", "token number", "response"]
    return Table(
        caption,
        columns,
        rows,
        text_columns=frozenset({6}),
        folded=folded,
        stacked=True,
        anchor=anchor,
        row_anchors=anchors[: len(rows)],
    )


def _in_context(token: TokenInContext) -> Markup:
    return Markup('<bdi class="context">{}<mark>{}</mark>{}</bdi>').format(
        visible(shortened(token.before, _CONTEXT_CHARACTERS, keep="end")),
        visible(shortened(token.token, _TOKEN_CHARACTERS, keep="start")),
        visible(shortened(token.after, _CONTEXT_CHARACTERS, keep="start")),
    )
