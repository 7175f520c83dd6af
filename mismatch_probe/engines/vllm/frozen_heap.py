"""What a process froze before it starts an engine stays frozen.

A job is forked from a process that froze all that imports made, a million objects. vLLM adds its engine to what is
frozen, and when the engine ends it thaws all of it and collects four times: most of a small engine's processor time,
since a collection writes to every object, and so to memory that the fork shared.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

KeepFrozen = Callable[[], AbstractContextManager[None]]


def frozen_heap() -> KeepFrozen:
    """Call before an engine starts, and enter what it returns around its start and around its end.

    The engine's own objects are not frozen then, so a collection finds them, and looks at nothing else. Where nothing
    is frozen vLLM does as it likes.
    """
    return _as_it_is if _is_frozen() else nullcontext


def _is_frozen() -> bool:
    """Whether the collector leaves out what is as old as the interpreter.

    `gc.get_freeze_count` would walk through all that is frozen, a quarter of a second at every start.
    """
    return not any(found is sys.modules for found in gc.get_objects())


@contextmanager
def _as_it_is() -> Iterator[None]:
    own = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = _nothing
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = own


def _nothing() -> None:
    pass
