"""What a process froze before it starts an engine stays frozen.

A job is forked from a process that froze all that imports made, a million objects. vLLM adds its engine to what is
frozen, and when the engine ends it thaws all of it and collects four times: most of a small engine's processor time,
since a collection writes to every object, and so to memory that the fork shared.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

KeepFrozen = Callable[[], AbstractContextManager[None]]


def frozen_heap() -> KeepFrozen:
    """Call before an engine starts, and enter what it returns around its start and around its end.

    The engine's own objects are not frozen then, so a collection finds them, and looks at nothing else. Where nothing
    is frozen vLLM does as it likes.
    """
    return _as_it_is if gc.get_freeze_count() else nullcontext


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
