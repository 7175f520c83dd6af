"""What installed packages bring besides what is built in: engines, server protocols, log formats, guard rules.

A package names what it brings in its entry points, one group a kind. A plug-in is code that the user installed; it is
imported when it is named, or when all of its kind are looked at, and never for another kind.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Generic, TypeVar

from mismatch_probe.errors import PluginError, UsageError, message_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONTRACTS: Final = "docs/extending.md"
"""Where each contract is written down."""


class ContractError(Exception):
    """An object is not what a plug-in of its kind must be; the text says what it lacks, as the end of a sentence."""


@dataclass(frozen=True)
class Plugin:
    """One entry point of an installed package."""

    kind: str
    """What it brings, such as `engine`."""
    name: str
    """The name that settings and flags call it by."""
    package: str
    """The distribution that brings it."""
    version: str
    problem: str | None = None
    """Why it cannot be used, as a sentence; None where it can."""


class Registry(Generic[T]):
    """Everything of one kind by its name: what is built in first, then what installed packages bring."""

    def __init__(
        self, kind: str, group: str, built_in: Mapping[str, T], require_contract: Callable[[str, object], T]
    ) -> None:
        """
        Args:
            kind: what one of them is called in a sentence.
            group: the name of the entry points.
            built_in: those of this package. No plug-in can take one of their names.
            require_contract: the object of a plug-in with this name; raises ContractError where it keeps no contract.
        """
        self.kind = kind
        self.group = group
        self.built_in = built_in
        self._require_contract = require_contract

    def get(self, name: str) -> T | None:
        """The one of this name; None where nothing has it. A plug-in is imported now.

        Raises:
            PluginError: the plug-in of this name cannot be used.
        """
        if name in self.built_in:
            return self.built_in[name]
        entries = [entry for entry in self._entries() if entry.name == name]
        return self._load(entries[0]) if entries else None

    def require(self, name: str, setting: str) -> T:
        """As `get`, of a name that a setting or a flag gives.

        Args:
            name: what was given.
            setting: the setting with its value, with which the sentence begins.

        Raises:
            UsageError: nothing has this name.
            PluginError: the plug-in of this name cannot be used.
        """
        value = self.get(name)
        if value is None:
            raise UsageError(f"{setting} is none of the known {self.kind}s; give one of {', '.join(self.names())}")
        return value

    def packages(self, names: Iterable[str]) -> dict[str, str]:
        """The packages that bring these, each with its version; none of what is built in."""
        return dict(_package(entry) for entry in self._entries() if entry.name in {*names} - {*self.built_in})

    def names(self) -> list[str]:
        """Every name that can be given. Imports no plug-in."""
        return list(dict.fromkeys([*self.built_in, *(entry.name for entry in self._entries())]))

    def usable(self) -> dict[str, T]:
        """What is built in, and every plug-in of this kind; one that cannot be used is a warning, and is left out."""
        usable = dict(self.built_in)
        for entry, value in self._load_each():
            if isinstance(value, PluginError):
                logger.warning("%s", value)
            else:
                usable[entry.name] = value
        return usable

    def plugins(self) -> list[Plugin]:
        """Every plug-in of this kind, imported to see whether it can be used."""
        return [
            Plugin(self.kind, entry.name, *_package(entry), str(value) if isinstance(value, PluginError) else None)
            for entry, value in self._load_each()
        ]

    def _load_each(self) -> Iterator[tuple[EntryPoint, T | PluginError]]:
        for entry in self._entries():
            try:
                yield entry, self._load(entry)
            except PluginError as error:
                yield entry, error

    def _entries(self) -> list[EntryPoint]:
        return sorted(entry_points(group=self.group), key=lambda entry: (entry.name, entry.value))

    def _load(self, entry: EntryPoint) -> T:
        """
        Raises:
            PluginError: its name is taken, its import fails, or it keeps no contract.
        """
        name, (package, version) = entry.name, _package(entry)
        whose = f"the {self.kind} {name!r} of the package {package} {version}"
        if name in self.built_in:
            raise PluginError(f"{whose} is refused: {name} is built in; uninstall the package, or rename it there")
        if others := [other for other in self._entries() if other.name == name and other != entry]:
            raise PluginError(
                f"{whose} is refused: {_package(others[0])[0]} brings one of this name too; uninstall one of them"
            )
        try:
            value: Any = entry.load()
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{whose} cannot be imported ({type(error).__name__}: {message_of(error)}); fix or uninstall the "
                "package"
            ) from error
        try:
            return self._require_contract(name, value)
        except ContractError as error:
            raise PluginError(f"{whose} cannot be used: {error} ({CONTRACTS}); fix or uninstall the package") from error


def require_members(value: object, contract: str, *names: str) -> None:
    """
    Raises:
        ContractError: the object lacks a member of its contract.
    """
    if absent := [name for name in names if not hasattr(value, name)]:
        raise ContractError(f"it lacks {' and '.join(f'`{name}`' for name in absent)} of {contract}")


def _package(entry: EntryPoint) -> tuple[str, str]:
    """Name and version of the package that brings it."""
    return ("unknown", "unknown") if entry.dist is None else (entry.dist.name, entry.dist.version)
