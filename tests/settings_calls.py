"""A command called with its settings as a file holds them, and not with a command line."""

from collections.abc import Callable, Mapping
from typing import Any

from mismatch_probe.errors import ExitCode


def call(command: Callable[..., ExitCode], settings: Mapping[str, Any], **flags: Any) -> ExitCode:
    """Run `command` on these settings; `flags` are those that are no settings, such as `out`."""
    function: Callable[..., ExitCode] = command.__wrapped__  # type: ignore[attr-defined]
    return function(dict(settings), **flags)
