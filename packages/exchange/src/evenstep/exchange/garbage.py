"""Planning and joining without the garbage collector."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Hold the garbage collector off.

    A plan for a large group is tens of thousands of new tuples, none of them garbage, and joining a
    window thousands. They would have the collector look at all objects of the process again and
    again, which takes longer than the work itself. A program that switches the collector off for
    good must do so before: it would be switched on again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
