"""What holds for every test of the reorder buffer: it leaves no worker behind."""

import gc
import threading
from collections.abc import Iterator

import pytest


def _workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "evenstep-reorder-buffer"}


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    """End the workers of buffers that only a reference cycle still holds, an error's for one."""
    before = _workers()
    yield
    if _workers() <= before:
        return
    gc.collect()
    for thread in _workers() - before:
        thread.join(10)
    assert _workers() <= before
