"""The bytes of an answer, of which no more are read than its question can have."""

import zlib
from typing import Final

import httpx

from mismatch_probe.notation import write_size

ACCEPTED: Final = "gzip"
"""As a header. It is unpacked here, a little at a time; what others make of few bytes has no bound."""
_AS_IT_IS: Final = ("", "identity")
_PACKED: Final = ("gzip", "x-gzip")
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS


class TooLong(Exception):  # noqa: N818 - an answer, of a kind
    """More came than is read, packed or unpacked; the text ends a sentence about the server."""


class Unreadable(Exception):  # noqa: N818 - as TooLong
    """What came cannot be unpacked; the text ends a sentence about the server."""


async def read_body(response: httpx.Response, most_bytes: int) -> str:
    """All of an answer that streams in, unpacked and decoded from UTF-8, whatever else its headers call it.

    Raises:
        TooLong: it has more than `most_bytes`. No more than these and one chunk of the network's are held.
        Unreadable: it is packed otherwise than was asked for, or cut off.
        httpx.RequestError: the connection ends before it does.
    """
    packing = response.headers.get("content-encoding", "").strip().lower()
    if packing not in (*_AS_IT_IS, *_PACKED):
        raise Unreadable(f"packs its answer as {packing}, and {ACCEPTED} alone was asked for")
    unpacking = zlib.decompressobj(_GZIP_BITS) if packing in _PACKED else None
    body, num_sent = bytearray(), 0
    async for chunk in response.aiter_raw():
        num_sent += len(chunk)
        try:
            body += chunk if unpacking is None else unpacking.decompress(chunk, most_bytes - len(body) + 1)
        except zlib.error as error:
            raise Unreadable(f"packs its answer otherwise than as {packing}, as which it comes") from error
        if max(len(body), num_sent) > most_bytes:
            raise TooLong(
                f"has more than the {write_size(most_bytes)} that it can have: see what answers at this address"
            )
    if unpacking is not None and num_sent and not unpacking.eof:
        raise Unreadable("is cut off")
    return body.decode("utf-8", errors="replace")
