"""What may have stood before the responses instead of the logged prompts, from the checkpoint's own files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from transformers import PreTrainedModel

from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import ExplainSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.explain.hypotheses import Context, Family, Option, departure
from mismatch_probe.explain.judging import LoggedTokens
from mismatch_probe.provenance.checkpoint import has_tokenizer
from mismatch_probe.tasks.encoding import render_texts
from mismatch_probe.tasks.problems import Message
from mismatch_probe.tasks.source import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CONTENT: Final = "mismatch probe content"
_SYSTEM: Final = "You are a helpful assistant."
_MOST_PIECES: Final = 2
_FIX: Final = "fix the tokenizer's chat_template"


@dataclass(frozen=True)
class Template:
    """Token ids before and behind a user's message."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def templates(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[Template], list[str]]:
    """Without a system prompt of ours, and with the usual one; and why one of them is left out, as many refuse one."""
    if tokenizer.chat_template is None:
        return [], []
    conversation: list[Message] = [{"role": "user", "content": _CONTENT}]
    usable, refusals = [], []
    for messages in (conversation, [{"role": "system", "content": _SYSTEM}, *conversation]):
        try:
            with render_texts(tokenizer, [("a user's message", messages)], _FIX) as texts:
                prefix, content, suffix = next(texts).partition(_CONTENT)
        except UsageError as error:
            refusals.append(str(error))
        else:
            if content:
                usable.append(Template(_text_ids(tokenizer, prefix), _text_ids(tokenizer, suffix)))
    return usable, refusals


def headers_of(templates: list[Template], special: frozenset[int]) -> list[tuple[int, ...]]:
    """What templates put before a message: all of it, and its beginning up to each special token."""
    headers: dict[tuple[int, ...], None] = {}
    for template in templates:
        ends = [place for place in range(1, len(template.prefix)) if template.prefix[place] in special]
        headers |= dict.fromkeys(template.prefix[:end] for end in (*ends[-_MOST_PIECES:], len(template.prefix)))
    return [header for header in headers if header]


def _text_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


_MOST_CUTS: Final = 6
_ROUND_WIDTHS: Final = (8, 64, 128)
_MOST_PACKED: Final = 3


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that the checkpoint's files name, None or empty where they name none."""

    bos: int | None
    pads: tuple[int, ...]
    special: frozenset[int]
    headers: tuple[tuple[int, ...], ...]
    """What may precede a prompt."""
    templates: tuple[Template, ...]
    refusals: tuple[str, ...]
    """Why the chat template gave none."""
    longest: int | None


def contexts(tokens: LoggedTokens, special: SpecialTokens) -> Iterator[Family]:
    """Every family of contexts that this log has a use for."""
    prompts = [sequence.prompt_token_ids for sequence in tokens.sequences]
    for family in (
        *_beginnings(prompts, special),
        *_headers(prompts, special),
        *_without_shared_ends(prompts, special),
        *_with_padding(prompts, special),
        *_with_other_positions(prompts),
        *_packed_contexts(tokens, special),
    ):
        usable = tuple(option for option in family.options if _is_other(option, prompts))
        if usable:
            yield Family(family.name, family.part, usable, family.chosen_for)


def _is_other(option: Option, prompts: list[list[int]]) -> bool:
    """Whether a context is one, and not the logged one again."""
    context = option.context
    assert context is not None
    return all(context.prompts) and (context.prompts != prompts or any(context.response_shift))


def _beginnings(prompts: list[list[int]], special: SpecialTokens) -> Iterator[Family]:
    firsts = {prompt[0] for prompt in prompts}
    name = "BOS" if special.bos in firsts or len(firsts) > 1 else "the first token"
    bos = special.bos if name == "BOS" else next(iter(firsts))
    if bos is not None:
        has_bos = [prompt[0] == bos for prompt in prompts]
        where = "twice" if all(has_bos) else "before it"
        yield _family(f"{name} {where}", f"a prompt with {name} {where}", [[bos, *prompt] for prompt in prompts])
        yield _family(
            f"{name} missing",
            f"a prompt without {name}",
            [prompt[1:] if has else prompt for prompt, has in zip(prompts, has_bos, strict=True)],
        )
    if special.bos is not None and name != "BOS":
        yield _family("BOS before it", "a prompt with BOS before it", [[special.bos, *prompt] for prompt in prompts])


def _headers(prompts: list[list[int]], special: SpecialTokens) -> Iterator[Family]:
    """Of prompts that all begin with BOS both places: before it, where whole turns stand, and behind it, with and
    without a BOS of the header's own.
    """
    has_bos = all(prompt[0] == special.bos for prompt in prompts)
    options = []
    for header in special.headers:
        what = f"a prompt with an extra header of {len(header)} tokens before it"
        options.append(_option(f"header {header}", what, [[*header, *prompt] for prompt in prompts]))
        bodies = (header, header[1:]) if tuple(header[:1]) == (special.bos,) else (header,)
        for body in bodies if has_bos else ():
            what = f"a prompt with an extra header of {len(body)} tokens behind its BOS"
            second_place = [[prompt[0], *body, *prompt[1:]] for prompt in prompts]
            options.append(_option(f"header {body} behind BOS", what, second_place))
    for template in special.templates:
        around = [[*template.prefix, *prompt, *template.suffix] for prompt in prompts]
        num_tokens = len(template.prefix) + len(template.suffix)
        what = f"a prompt with the chat template around it ({num_tokens} tokens)"
        options.append(_option(f"template {template}", what, around))
    if options:
        yield Family("extra header", "context", tuple(options))


def _without_shared_ends(prompts: list[list[int]], special: SpecialTokens) -> Iterator[Family]:
    """Without what all prompts begin or end with, a template's header or its generation prompt; or with it twice."""
    if len({tuple(prompt) for prompt in prompts}) < 2:
        return
    start = _shared_start(prompts)
    end = _shared_start([prompt[::-1] for prompt in prompts])[::-1]
    places = [place for place in range(2, len(start)) if start[place] in special.special][: _MOST_CUTS - 1]
    if len(start) > 1:
        yield Family(
            "header missing",
            "context",
            tuple(
                _option(
                    f"without {count} first",
                    f"a prompt without its first {count} tokens",
                    [prompt[count:] for prompt in prompts],
                )
                for count in dict.fromkeys([*places, len(start)])
            ),
        )
        yield _family("header twice", "a prompt with its header twice", [[*start, *prompt] for prompt in prompts])
    if start and end:
        bare = [prompt[len(start) : len(prompt) - len(end)] for prompt in prompts]
        yield _family("template missing", "a prompt without what all prompts begin and end with", bare)
    places = [len(end) - place for place in range(1, len(end)) if end[place] in special.special][: _MOST_CUTS - 1]
    if end:
        yield Family(
            "end missing",
            "context",
            tuple(
                _option(
                    f"without {count} last",
                    f"a prompt without its last {count} tokens",
                    [prompt[:-count] for prompt in prompts],
                )
                for count in dict.fromkeys([*places, len(end)])
            ),
        )


def _with_padding(prompts: list[list[int]], special: SpecialTokens) -> Iterator[Family]:
    options = [
        _option(
            f"padded to {width} with {pad}",
            f"left padding to {width} tokens attended to",
            [[pad] * max(0, width - len(prompt)) + prompt for prompt in prompts],
            code=Code.POSITIONS,
        )
        for width in _widths(prompts)
        for pad in special.pads
    ]
    if options:
        yield Family("left padding", "context", tuple(options))


def _with_other_positions(prompts: list[list[int]]) -> Iterator[Family]:
    shifts = {f"shifted by {by:+d}": [by] * len(prompts) for by in (1, -1)} | {
        f"counted from {width}": [width - len(prompt) for prompt in prompts] for width in _widths(prompts)
    }
    yield Family(
        "positions",
        "context",
        tuple(
            Option(
                departure("context", Code.POSITIONS, f"positions of the response {name}"),
                context=Context(f"positions {name}", prompts, shift),
            )
            for name, shift in shifts.items()
        ),
    )


def _packed_contexts(tokens: LoggedTokens, special: SpecialTokens) -> Iterator[Family]:
    """The responses before each one in the log, prompts and all, at the front of its context."""
    texts = [sequence.prompt_token_ids + sequence.token_ids for sequence in tokens.sequences]
    options = []
    for count in range(1, min(_MOST_PACKED, len(texts) - 1) + 1):
        in_rows = [
            [token for ids in texts[max(0, row - count) : row] for token in ids]
            + texts[row][: len(sequence.prompt_token_ids)]
            for row, sequence in enumerate(tokens.sequences)
        ]
        longest = max(
            len(prompt) + len(sequence.token_ids) for prompt, sequence in zip(in_rows, tokens.sequences, strict=True)
        )
        if special.longest is None or longest <= special.longest:
            what = (
                "the response before it in its context" if count == 1 else f"{count} responses before it in its context"
            )
            options.append(_option(f"packed {count}", f"packing without boundaries: {what}", in_rows, Code.PACKING))
    if options:
        yield Family("packing", "context", tuple(options), chosen_for="response")


def _shared_start(prompts: Sequence[list[int]]) -> list[int]:
    """What all prompts begin with."""
    least, most = min(prompts), max(prompts)
    return [token_id for token_id, _ in takewhile(lambda pair: pair[0] == pair[1], zip(least, most, strict=False))]


def _widths(prompts: Sequence[list[int]]) -> list[int]:
    """To which prompts of a batch may have been padded: the longest of the log, and the next round numbers."""
    longest = max(map(len, prompts))
    return list(dict.fromkeys([longest, *(int(np.ceil(longest / size)) * size for size in _ROUND_WIDTHS)]))


def _family(name: str, what: str, prompts: list[list[int]]) -> Family:
    return Family(name, "context", (_option(name, what, prompts),))


def _option(name: str, what: str, prompts: list[list[int]], code: str = Code.PROMPT_PREFIX) -> Option:
    return Option(departure("context", code, what), context=Context.of(name, prompts))


def special_tokens(settings: ExplainSettings, model: PreTrainedModel) -> SpecialTokens:
    """From the model's config and, where it has one, its tokenizer."""
    config: Any = model.config.get_text_config()
    ids = [_ids(getattr(config, f"{name}_token_id", None)) for name in ("bos", "pad", "eos")]
    tokenizer: Any = None
    if has_tokenizer(Path(settings.model.path)):
        tokenizer = load_tokenizer(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
    special = frozenset() if tokenizer is None else frozenset(tokenizer.all_special_ids)
    around, refusals = templates(tokenizer) if tokenizer is not None and settings.chat_template else ([], [])
    bos = [*ids[0], *_ids(getattr(tokenizer, "bos_token_id", None))]
    pads = list(dict.fromkeys([*ids[1], *_ids(getattr(tokenizer, "pad_token_id", None)), *ids[2][:1]])) or [0]
    return SpecialTokens(
        bos=bos[0] if bos else None,
        pads=tuple(pads[:2]),
        special=special,
        headers=tuple(dict.fromkeys((*_given_headers(settings, tokenizer), *headers_of(around, special)))),
        templates=tuple(around),
        refusals=tuple(refusals),
        longest=getattr(config, "max_position_embeddings", None),
    )


def rope_base(model: PreTrainedModel) -> float | None:
    """None where the config does not say one for all layers."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None)
    base = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return float(base) if isinstance(base, int | float) else None


def _given_headers(settings: ExplainSettings, tokenizer: Any) -> Iterator[tuple[int, ...]]:
    yield from settings.headers
    for text in settings.header_texts:
        if tokenizer is None:
            raise UsageError(
                f"the header {text!r} cannot be encoded, as {settings.model.path} has no tokenizer; give its token "
                "ids: --header 1,2,3"
            )
        yield tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ids(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
