"""Hub data sets (`hub:owner/name[:split]`), read as a stream through `datasets`, which is installed on request."""

from collections.abc import Iterator

from mismatch_probe.errors import MissingExtra, UsageError, said
from mismatch_probe.tasks.rows import PromptRow

HUB_PREFIX = "hub:"


def read_hub(source: str, flag: str) -> Iterator[PromptRow]:
    """The rows of one split (`train` unless named); a local folder of data files works as well as a hub id.

    `flag` is what named it.

    Raises:
        MissingExtra: `datasets` is not installed.
        UsageError: the data set or the split cannot be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtra(
            f"prompt source {source} needs the package datasets, which is not installed; "
            "run pip install 'mismatch-probe[datasets]'"
        ) from error
    name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise UsageError(f"prompt source {source!r} names no data set; give {flag} {HUB_PREFIX}OWNER/NAME[:SPLIT]")
    try:
        data = load_dataset(name, split=split or "train", streaming=True)
        for number, columns in enumerate(data):
            yield PromptRow(f"row {number} of {source}", columns)
    except (ValueError, OSError, LookupError) as error:
        raise UsageError(
            f"prompt source {source} cannot be loaded ({said(error)}); "
            f"give {flag} {HUB_PREFIX}OWNER/NAME:SPLIT of a data set that can be reached"
        ) from error
