"""Python's collector of garbage, which looks through all objects again and again while many are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """What is made inside is kept, in cycles too: nothing is looked for until then, nor there. It would take a third
    of the time where plans are read, a tenth where ranges are divided."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():  # as old as what was there before: else all of it is looked through at once
                gc.freeze()
                gc.unfreeze()
            gc.enable()
