"""The environment of this process, kept from what a test or an engine sets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment_as_it_was() -> Iterator[None]:
    """Servers of jobs serve on after the body: where a variable that libraries read has changed they are made anew."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
