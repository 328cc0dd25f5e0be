"""Python's collector of garbage, where it is held up."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from tccompile.garbage import no_garbage
with no_garbage():
    made = [[] for _ in range(100_000)]
seen = []
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
more = [[] for _ in range(2000)]
assert gc.isenabled() and seen, seen
assert any(o is made for o in gc.get_objects(generation=2)), "it is among the new ones"
gc.disable()
with no_garbage():
    pass
assert not gc.isenabled()
gc.freeze()
kept = gc.get_freeze_count()
gc.enable()
with no_garbage():
    pass
assert gc.get_freeze_count() == kept, "what a program has frozen stays so"
"""


def test_what_was_made_meanwhile_is_not_looked_through_at_once():
    subprocess.run([sys.executable, "-c", CODE], check=True)
