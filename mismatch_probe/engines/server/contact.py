"""Who answers at an address: the model that is served there, how long its context is, how it can be asked."""

from dataclasses import dataclass
from typing import Any

from mismatch_probe.engines.server.answers import NoAnswer, Protocol, member
from mismatch_probe.engines.server.arguments import ServerArguments
from mismatch_probe.engines.server.connection import Connection, Refused, Request, Unserved, WantsKey
from mismatch_probe.engines.server.protocols import PROTOCOLS
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.inert import plain


@dataclass(frozen=True)
class Contact:
    """model: the name that it is asked by; root: the path or hub id behind it. max_model_len: tokens. software: as it
    calls itself. dtype: that it computes in. What it does not say is None.
    """

    model: str
    root: str | None
    max_model_len: int | None
    software: str | None
    dtype: str | None
    protocol: Protocol


def contact(connection: Connection, arguments: ServerArguments, *, tries: int | None = None) -> Contact:
    """
    Raises:
        UsageError: what answers is no server that can be asked, wants a key, or serves another model.
        EngineError: nothing answers.
    """
    try:
        listed = connection.ask(Request("/v1/models"), tries=tries)
        models: list[Any] = member(listed, "data", list)
        names = [str(member(model, "id", str)) for model in models]
    except Unserved as error:
        raise UsageError(f"{_no_server(connection)}: it has no /v1/models ({error})") from error
    except NoAnswer as error:
        raise UsageError(f"{_no_server(connection)}: what it gives for /v1/models is no list of models") from error
    chosen = models[names.index(_model(connection, arguments, names, models))]
    longest, root = chosen.get("max_model_len"), chosen.get("root")
    told = _told(connection, "/model_info") or _told(connection, "/get_model_info")
    details = _told(connection, "/server_info") or {}
    return Contact(
        model=chosen["id"],
        root=told.get("model_path") or (root if isinstance(root, str) else None),
        max_model_len=longest if type(longest) is int and longest > 0 else None,
        software=_software(connection, is_sglang="model_path" in told),
        dtype=_dtype(details),
        protocol=_protocol(connection, arguments, chosen["id"], is_sglang="model_path" in told),
    )


def _no_server(connection: Connection) -> str:
    return f"what answers at {connection.url} is no server of vLLM's, SGLang's or OpenAI's kind"


def _model(connection: Connection, arguments: ServerArguments, names: list[str], models: list[Any]) -> str:
    served = ", ".join(map(plain, names)) or "nothing"
    if arguments.model is not None:
        if arguments.model not in names:
            raise UsageError(
                f"the server at {connection.url} serves {served}, and not {arguments.model}; give one of these"
            )
        return arguments.model
    own = [name for name, model in zip(names, models, strict=True) if model.get("parent") is None]
    if len(own) != 1:
        raise UsageError(f"the server at {connection.url} serves {served}; say which with model=NAME")
    return own[0]


def _told(connection: Connection, path: str) -> dict[str, Any]:
    """What a server says of itself at a path that not all have."""
    try:
        content = connection.ask(Request(path), tries=1)
    except (Unserved, EngineError, UsageError):
        return {}
    return content if isinstance(content, dict) else {}


def _software(connection: Connection, *, is_sglang: bool) -> str | None:
    version = _told(connection, "/version").get("version")
    if isinstance(version, str):
        return plain(f"vLLM {version}")
    return "SGLang" if is_sglang else None


def _dtype(details: dict[str, Any]) -> str | None:
    """From vLLM's and SGLang's accounts of themselves, which are theirs to write as they like."""
    config = details.get("vllm_config")
    if isinstance(config, str) and "dtype=torch." in config:
        return config.partition("dtype=torch.")[2].partition(",")[0]
    named = details.get("dtype")
    return named if isinstance(named, str) and named != "auto" else None


def _protocol(connection: Connection, arguments: ServerArguments, model: str, *, is_sglang: bool) -> Protocol:
    """The one that was asked for, or the first that is served; an empty request tells without any work."""
    for protocol in PROTOCOLS:
        fits = (
            protocol.name != "sglang" or is_sglang
            if arguments.protocol is None
            else protocol.name == arguments.protocol
        )
        if not fits:
            continue
        try:
            connection.ask(Request(protocol.path, {"model": model}))
        except (Unserved, WantsKey):  # with a key, vLLM forbids what it does not serve
            continue
        except Refused:
            pass
        return protocol
    wanted = "takes token ids" if arguments.protocol is None else f"is asked as {arguments.protocol}"
    raise UsageError(
        f"the server at {connection.url} has no endpoint that {wanted}; start vLLM with --enable-scale-out, or see "
        "docs/servers.md"
    )
