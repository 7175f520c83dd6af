"""What a server's side takes besides its address, and the key, which is sent to that address alone."""

import base64
import os
import re
from collections.abc import Iterator, Mapping
from html.entities import codepoint2name
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import Count
from mismatch_probe.engines.server.protocols import PROTOCOLS
from mismatch_probe.errors import UsageError

KEY_VARIABLE: Final = "MISMATCH_PROBE_SERVER_KEY"

_NAME_OF_A_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]*")
_SECRETS: Final = frozenset({"api_key", "auth", "authorization", "headers", "key", "password", "token"})


def _as_name_of_a_variable(text: str) -> str:
    if not _NAME_OF_A_VARIABLE.fullmatch(text):
        raise ValueError("it is the name of an environment variable, in capitals; the key itself stays there")
    return text


class ServerArguments(BaseModel):
    """What a server's side is asked with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    model: Annotated[str, Field(min_length=1)] | None = None
    """The name to ask for; unset, the only one that is served."""
    protocol: str | None = None
    """How it is asked; unset, in the first protocol that it serves."""
    concurrency: Count = 16
    """Requests in flight at once."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 600.0
    tries: Count = 6
    """Times that a request is sent before the server is given up."""
    longest_prefill: Count = 2048
    """The longest sequence, in tokens, that is scored by prefill where that is asked for at all."""
    key_variable: Annotated[str, AfterValidator(_as_name_of_a_variable)] = KEY_VARIABLE
    """The environment variable that holds the key, if the server wants one."""
    transfer: Literal["gloo", "nccl"] | None = None
    """The backend of vLLM's weight transfer that `train` sends it weights through."""


def known_arguments() -> dict[str, str]:
    """Every argument with its type as text."""
    fields = ServerArguments.model_fields.items()
    return {name: str(field.annotation) for name, field in fields if name != "url"}


def default_arguments() -> dict[str, Any]:
    """What those arguments are that are not given."""
    return {name: ServerArguments.model_fields[name].default for name in known_arguments()}


def engine_arguments(arguments: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """`arguments` with parsed values.

    Raises:
        UsageError: an argument is not among those of `types`, is a secret, or has a value that it cannot have.
    """
    for name in arguments:
        if name in _SECRETS:
            raise UsageError(
                f"{name} cannot be given: a run directory keeps its command line, so a key belongs into the "
                f"environment ({KEY_VARIABLE}, or the variable that key_variable names)"
            )
    settings = parse_settings(ServerArguments, {"url": "", **arguments})
    if settings.protocol is not None:
        PROTOCOLS.require(settings.protocol, f"protocol = {settings.protocol!r}")
    return {name: getattr(settings, name) for name in arguments if name in types or name == "url"}


STRUCK: Final = "[key]"

_WRAPPED: Final = r"\s\u00ad\u200b-\u200f\u2060\ufeff"
"""What wrapping a text puts between two of its characters."""
_SEPARATORS: Final = ":;,._|/-"
"""What is written between the bytes or the groups of a long number; of them those that the key itself lacks."""
_BETWEEN_BYTES: Final = rf"(?:[\s{re.escape(_SEPARATORS)}]|\\[nrtx]|0x){{0,4}}"
_LEAST_TO_ENCODE: Final = 8
"""A shorter key is looked for as it is written alone: in base64 it would be any text."""
_BASE64: Final = r"A-Za-z0-9+/_\-"
_IN_NUMBERS: Final = re.compile(r"[0-9.eE+-]+")


class ApiKey:
    """None where the environment holds none."""

    def __init__(self, text: str | None) -> None:
        self._text = text
        self._spellings = None if text is None else re.compile("|".join(_spellings(text)))
        self._as_number = text if text is not None and _IN_NUMBERS.fullmatch(text) else None

    @classmethod
    def of(cls, variable: str) -> "ApiKey":
        """
        Raises:
            UsageError: what the environment variable holds cannot stand in a header.
        """
        text = os.environ.get(variable, "").strip()
        if not (text.isascii() and text.isprintable()):
            raise UsageError(
                f"the environment variable {variable} holds characters that no key has; set it to the key alone"
            )
        return cls(text or None)

    @property
    def is_set(self) -> bool:
        return self._text is not None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._text is None else {"Authorization": f"Bearer {self._text}"}

    def strike_text(self, text: str) -> str:
        """`text` without the key: as it is, in other cases, wrapped, with any of its characters escaped as JSON, a URL
        or HTML does, in base64 (so of `Basic` too) or in hexadecimal digits; with separators between its characters
        or its bytes, but for such as are in the key.
        """
        return text if self._spellings is None else self._spellings.sub(STRUCK, text)

    def strike(self, value: Any) -> Any:
        """JSON values with `strike_text` done to every text in them, those that name others included."""
        if self._spellings is None:
            return value
        if isinstance(value, str):
            return self.strike_text(value)
        if isinstance(value, list):
            return [self.strike(item) for item in value]
        if isinstance(value, dict):
            return {self.strike_text(name): self.strike(item) for name, item in value.items()}
        return STRUCK if self._as_number is not None and self._as_number in repr(value) else value


def _spellings(text: str) -> Iterator[str]:
    """Patterns, each of which takes time in proportion to what it is looked for in."""
    characters = [_character(character) for character in text]
    separators = "".join(re.escape(separator) for separator in _SEPARATORS if separator not in text)
    between = rf"(?:[{_WRAPPED}{separators}]|\\[nrt]){{0,4}}"
    yield f"(?i:{(between if len(text) >= _LEAST_TO_ENCODE else '').join(characters)})"
    if len(text) >= _LEAST_TO_ENCODE:
        yield f"(?i:{_BETWEEN_BYTES.join(f'{byte:02x}' for byte in text.encode())})"
        for offset in range(3):
            for alphabet in {_in_base64(text, offset), _in_base64(text, offset).replace("+", "-").replace("/", "_")}:
                yield f"[{_BASE64}]{{0,2}}{re.escape(alphabet)}[{_BASE64}=]{{0,4}}"


def _character(character: str) -> str:
    code = ord(character)
    spelt = [
        re.escape(character),
        f"%(?:25){{0,4}}{code:02x}",
        rf"\\{{1,8}}(?:u00|x){code:02x}",
        f"&(?:amp;)?#0{{0,6}}{code};",
        f"&(?:amp;)?#x0{{0,6}}{code:x};",
    ]
    if not character.isalnum():
        spelt.append(rf"\\{{1,8}}{re.escape(character)}")
    if code in codepoint2name:
        spelt.append(f"&(?:amp;)?{codepoint2name[code]};")
    return f"(?:{'|'.join(spelt)})"


def _in_base64(text: str, offset: int) -> str:
    """The digits that `text` alone decides, where so many bytes (of 3) stand before it."""
    digits = base64.b64encode(bytes(offset) + text.encode()).decode().rstrip("=")
    first = -(-offset * 8 // 6)
    return digits[first : (offset + len(text)) * 8 // 6]
