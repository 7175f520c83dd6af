"""Digests of what the numbers of a run rest on, so that a manifest or a table that was edited is detected.

Whoever edits may also compute the digest anew: it shows a slip, and no intent.
"""

import hashlib
import json
import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from mismatch_probe.errors import BrokenRecord
from mismatch_probe.reading import parse_json
from mismatch_probe.records.manifest import Model, read_document, write_document

_SEALED: Final = "sealed-"
_SEALED_WITH_PROMPTS: Final = f"{_SEALED}prompts-"
_DIGESTS: Final = b"mismatch_probe.digests"
_RESTS_ON: Final = frozenset(
    {
        *("settings", "model", "checkpoints", "checkpoint_differences", "content_keys", "run_key", "log", "stages"),
        *("left_out", "guards", "extended_from", "continued", "growing", "rounding_checks"),
    }
)
"""Entries of a manifest; the others say when and where a run was made."""


def new_run_key() -> str:
    """That of a run whose manifest and tables have digests, its prompts too."""
    return f"{_SEALED_WITH_PROMPTS}{secrets.token_hex(8)}"


def is_sealed(run_key: str) -> bool:
    return run_key.startswith(_SEALED)


def seals_prompts(run_key: str) -> bool:
    """Whether the prompts of the run have digests; those of a run made before there were any have none."""
    return run_key.startswith(_SEALED_WITH_PROMPTS)


def write_manifest(path: Path, manifest: BaseModel, run_key: str) -> None:
    """With its `digest`, where it is of a run that has them."""
    if is_sealed(run_key):
        manifest = manifest.model_copy(update={"digest": manifest_digest(parse_json(manifest.model_dump_json()))})
    write_document(path, manifest)


def read_manifest(path: Path, kind: type[Model], *, missing: str, fix: str) -> Model:
    """The manifest at `path`; arguments and errors are those of `read_document`.

    Raises:
        BrokenRecord: it was edited.
    """

    def require_own_digest(content: Mapping[str, Any]) -> None:
        if is_sealed(content.get("run_key", "")) and content.get("digest") != manifest_digest(content):
            raise BrokenRecord(
                f"{path} was edited: its digest is not that of its settings and stages, on which the numbers rest; put "
                "the run's own file back, or make the run again"
            )

    return read_document(path, kind, missing=missing, fix=fix, check=require_own_digest)


def manifest_digest(content: Mapping[str, Any]) -> str:
    """Of the JSON values of a manifest, whichever version of this tool wrote them."""
    text = json.dumps({name: content[name] for name in _RESTS_ON & content.keys()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def with_digests(table: pa.Table) -> pa.Table:
    """`table` with those of its columns, where it is `seal` or was when it was read."""
    if _DIGESTS not in (table.schema.metadata or {}):
        return table
    return table.replace_schema_metadata({**table.schema.metadata, _DIGESTS: json.dumps(_digests(table)).encode()})


def seal(table: pa.Table, identity: Mapping[bytes, bytes]) -> pa.Table:
    """A table with its run and leg in its metadata; `tables.write_table` adds the digests."""
    return table.replace_schema_metadata({**identity, _DIGESTS: b""})


def has_digests(table: pa.Table) -> bool:
    return _DIGESTS in (table.schema.metadata or {})


def require_own_digests(path: Path, table: pa.Table) -> None:
    """Those of the columns that were read from `path` are of what they hold, and of what the file says that it is.

    Raises:
        BrokenRecord: it was edited.
    """
    if not has_digests(table):
        return
    try:
        digests = json.loads(table.schema.metadata[_DIGESTS])
        is_own = all(digests[name] == digest for name, digest in _digests(table).items())
    except (ValueError, KeyError, TypeError):
        is_own = False
    if not is_own:
        raise BrokenRecord(
            f"{path} was edited: its digests are not those of its rows, or it says that it is another file than it "
            "was written as; put the run's own file back, or make the run again"
        )


def _digests(table: pa.Table) -> dict[str, str]:
    """Of each column with what the table says of itself; how it is cut into chunks is nothing to them."""
    identity = {key: value for key, value in (table.schema.metadata or {}).items() if key != _DIGESTS}
    whose = repr(sorted(identity.items())).encode()
    digests = {}
    for name in table.column_names:
        column = _Column()
        for chunk in table[name].chunks:
            column.add("", chunk)
        digests[name] = hashlib.sha256(whose + name.encode() + column.digest()).hexdigest()[:32]
    return digests


class _Column:
    """Lengths, values and places of nulls at each depth of nested lists, hashed as they come."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=32))
        self._counts: Counter[str] = Counter()

    def add(self, depth: str, values: pa.Array) -> None:
        if values.null_count:
            nulls = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) + self._counts[depth]
            self._update(f"{depth} nulls", nulls.astype("<i8"))
        self._counts[depth] += len(values)
        values = values.drop_null()
        kind = values.type
        if pa.types.is_list(kind):
            self._update(f"{depth} lengths", pc.list_value_length(values).to_numpy().astype("<i4"))
            self.add(f"{depth}.", values.flatten())
        elif pa.types.is_string(kind):
            self._update(f"{depth} lengths", pc.binary_length(values).to_numpy().astype("<i4"))
            if len(values):
                places = np.frombuffer(values.buffers()[1], dtype=np.int32)[values.offset :][: len(values) + 1]
                text = np.frombuffer(values.buffers()[2] or b"", dtype=np.uint8)[int(places[0]) : int(places[-1])]
                self._update(f"{depth} text", text)
        else:
            self._update(f"{depth} {kind}", values.to_numpy(zero_copy_only=False))

    def digest(self) -> bytes:
        parts = sorted((name, part.hexdigest()) for name, part in self._hashes.items())
        return repr((sorted(self._counts.items()), parts)).encode()

    def _update(self, name: str, values: npt.NDArray[Any]) -> None:
        if values.size:
            self._hashes[name].update(np.ascontiguousarray(values).data.cast("B"))
