"""The text of single tokens, for people to read: whitespace kept, bytes that are no UTF-8 escaped."""

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
    """Pieces of text by token id, each decoded once.

    Decoding ids one at a time through the tokenizer loses the leading space of SentencePiece tokens and turns a part of
    a multi-byte character into U+FFFD; the vocabulary entry itself keeps both. Without a tokenizer a token is its id.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def __call__(self, token_ids: Iterable[int]) -> list[str]:
        return [self._piece(token_id) for token_id in token_ids]

    def _piece(self, token_id: int) -> str:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._decode(token_id)
        return self._pieces[token_id]

    def _decode(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"<id {token_id}>"
        added = self._added.get(token_id)
        if added is not None:
            return added
        entry = self._tokenizer.convert_ids_to_tokens([token_id])[0]
        if entry is None:
            return f"<id {token_id}>"
        if "ByteLevel" in self._decoder_kinds and all(char in self._bytes for char in entry):
            return bytes(self._bytes[char] for char in entry).decode("utf-8", errors="backslashreplace")
        if byte := _BYTE_TOKEN.fullmatch(entry):
            return bytes([int(byte[1], 16)]).decode("utf-8", errors="backslashreplace")
        if _SPACE_MARK in entry:
            return str(entry).replace(_SPACE_MARK, " ")
        return str(entry)

    @cached_property
    def _bytes(self) -> dict[str, int]:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]

    @cached_property
    def _added(self) -> dict[int, str]:
        return {index: str(token) for index, token in getattr(self._tokenizer, "added_tokens_decoder", {}).items()}

    @cached_property
    def _decoder_kinds(self) -> set[str]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return set() if backend is None else _kinds(json.loads(backend.to_str())["decoder"])
