"""Seeds of random graphs, each in a process of its own: some graphs end that of ONNX Runtime, or take it forever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

SECONDS = 120
"""How long a seed's process may take."""


def apart(seed: int, tried: Callable[[int], int]) -> int | None:
    """The exit code that a seed's process ends with; None if a signal ends it, which a line says."""
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        os._exit(tried(seed))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        print(f"{seed}: ended by {signal.Signals(os.WTERMSIG(status)).name}", flush=True)
        return None
    return os.WEXITSTATUS(status)
