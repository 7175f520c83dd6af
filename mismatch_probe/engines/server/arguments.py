"""What a server's side takes beside its address: how it is asked, and where its key is."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import Count
from mismatch_probe.errors import UsageError

KEY_VARIABLE: Final = "MISMATCH_PROBE_SERVER_KEY"

_NAME_OF_A_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]*")
_SECRETS: Final = frozenset({"api_key", "auth", "authorization", "headers", "key", "password", "token"})


def _as_name_of_a_variable(text: str) -> str:
    if not _NAME_OF_A_VARIABLE.fullmatch(text):
        raise ValueError("it is the name of an environment variable, in capitals; the key itself stays there")
    return text


class ServerArguments(BaseModel):
    """protocol: how it is asked, found out where it is not given. concurrency: requests in flight at once. tries: of a
    request, before the server is given up. longest_prefill: the longest sequence, in tokens, that is scored by prefill
    where that is asked for at all. key_variable: the environment variable that holds the key, if the server wants one.
    transfer: the backend of vLLM's weight transfer that `train` sends it weights through.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    model: Annotated[str, Field(min_length=1)] | None = None
    protocol: Literal["vllm", "completions", "sglang"] | None = None
    concurrency: Count = 16
    timeout_seconds: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 600.0
    tries: Count = 6
    longest_prefill: Count = 2048
    key_variable: Annotated[str, AfterValidator(_as_name_of_a_variable)] = KEY_VARIABLE
    transfer: Literal["gloo", "nccl"] | None = None


def known_arguments() -> dict[str, str]:
    """Every argument with its type as text."""
    fields = ServerArguments.model_fields.items()
    return {name: str(field.annotation) for name, field in fields if name != "url"}


def default_arguments() -> dict[str, Any]:
    """What those arguments are that are not given."""
    return {name: ServerArguments.model_fields[name].default for name in known_arguments()}


def engine_arguments(given: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """`given` with parsed values.

    Raises:
        UsageError: an argument is not among the `known` ones, is a secret, or has a value that it cannot have.
    """
    for name in given:
        if name in _SECRETS:
            raise UsageError(
                f"{name} cannot be given: a run directory keeps its command line, so a key belongs into the "
                f"environment ({KEY_VARIABLE}, or the variable that key_variable names)"
            )
    parsed = parse_settings(ServerArguments, {"url": "", **given})
    return {name: getattr(parsed, name) for name in given if name in known or name == "url"}
