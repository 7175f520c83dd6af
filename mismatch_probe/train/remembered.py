"""`trainer.json` of a checkpoint: all that a run goes on with beside weights and moments, checked as it is read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from mismatch_probe.errors import BrokenRecord, UsageError, said
from mismatch_probe.reading import Unreadable, as_object, parse_json
from mismatch_probe.records.documents import first_problem
from mismatch_probe.records.regular_files import read_regular_text
from mismatch_probe.train.state import Adjustments

_ADJUSTMENTS = TypeAdapter(Adjustments)


class _Remembered(BaseModel):
    """Its fields; the parts check theirs as they are restored."""

    model_config = ConfigDict(strict=True)

    adjustments: dict[str, Any]
    recent_reward: float | None = None
    earned: dict[str, list[float]] | None = None
    optimizers: dict[str, Any]
    sync: dict[str, Any]
    guards: dict[str, Any]


def read_remembered(path: Path) -> dict[str, Any]:
    """The document as it was written.

    Raises:
        OSError: it is not there, or cannot be read.
        Unreadable: it is damaged, or lacks something.
    """
    rest = as_object(parse_json(read_regular_text(path), constants=True))
    try:
        _Remembered.model_validate(rest)
        adjustments_of(rest)
    except ValidationError as error:
        raise Unreadable(first_problem(error)) from error
    return rest


def adjustments_of(rest: dict[str, Any]) -> Adjustments:
    """What guards had changed, out of the document; a ValidationError says what is wrong with it."""
    return _ADJUSTMENTS.validate_json(json.dumps(rest["adjustments"]))


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """While parts take back what a checkpoint remembers of them.

    Raises:
        BrokenRecord: that is not what they wrote.
    """
    try:
        yield
    except UsageError:
        raise
    except (BrokenRecord, LookupError, TypeError, ValueError, AttributeError) as error:
        raise BrokenRecord(
            f"the checkpoint {path} does not hold what a run goes on with ({type(error).__name__}: {said(error)}); "
            "remove it to resume from the one before"
        ) from error
