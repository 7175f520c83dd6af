"""The text of single tokens, for people to read: whitespace kept, characters whole, bytes that are no UTF-8 escaped."""

import codecs
import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


def _kinds(node: Any) -> set[str]:
    """Every `type` named anywhere in a tokenizer's decoder, such as ByteLevel or ByteFallback."""
    if isinstance(node, dict):
        return {str(node.get("type"))}.union(*map(_kinds, node.values()))
    return set().union(*map(_kinds, node)) if isinstance(node, list) else set()


class TokenTexts:
    """Pieces of text of a sequence of token ids; joined they are its text.

    Decoding ids one at a time through the tokenizer loses the leading space of SentencePiece tokens and turns a part of
    a multi-byte character into U+FFFD; the vocabulary entry itself keeps both. A character whose bytes are several
    tokens is the text of the last of these, and the others are empty. Without a tokenizer a token is its id.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str | bytes] = {}

    @property
    def has_tokenizer(self) -> bool:
        """Whether a token has a text at all."""
        return self._tokenizer is not None

    def __call__(self, token_ids: Iterable[int]) -> list[str]:
        texts: list[str] = []
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        for token_id in token_ids:
            piece = self._piece(token_id)
            if isinstance(piece, bytes):
                texts.append(decoder.decode(piece))
                continue
            _end_character(texts, decoder)
            texts.append(piece)
        _end_character(texts, decoder)
        return texts

    def _piece(self, token_id: int) -> str | bytes:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._decode(token_id)
        return self._pieces[token_id]

    def _decode(self, token_id: int) -> str | bytes:
        """The vocabulary entry as text, or as bytes where one token may hold a part of a character."""
        if self._tokenizer is None:
            return f"<id {token_id}>"
        text = self._added_tokens.get(token_id)
        if text is not None:
            return text
        entry = self._tokenizer.convert_ids_to_tokens([token_id])[0]
        if entry is None:
            return f"<id {token_id}>"
        if "ByteLevel" in self._decoder_kinds and all(char in self._bytes for char in entry):
            return bytes(self._bytes[char] for char in entry)
        if byte := _BYTE_TOKEN.fullmatch(entry):
            return bytes([int(byte[1], 16)])
        if _SPACE_MARK in entry:
            return str(entry).replace(_SPACE_MARK, " ")
        return str(entry)

    @cached_property
    def _bytes(self) -> dict[str, int]:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]

    @cached_property
    def _added_tokens(self) -> dict[int, str]:
        return {index: str(token) for index, token in getattr(self._tokenizer, "added_tokens_decoder", {}).items()}

    @cached_property
    def _decoder_kinds(self) -> set[str]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        decoder = None if backend is None else backend.decoder
        return set() if decoder is None else _kinds(json.loads(decoder.__getstate__()))


def _end_character(texts: list[str], decoder: codecs.IncrementalDecoder) -> None:
    """Give the bytes of a character that was not completed to the last token, escaped."""
    rest = decoder.decode(b"", final=True)
    if rest:
        texts[-1] += rest
