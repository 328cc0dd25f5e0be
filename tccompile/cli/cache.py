"""`tccompile cache`: what is kept for other builds, and how to be rid of it."""

from __future__ import annotations

import click

from tccompile.cli.command import Command, need_compiler
from tccompile.errors import UsageError
from tccompile.terminal import say


@click.command("tccompile cache", cls=Command)
@click.option("--size", is_flag=True, help="Say where it is, and how much it holds of how much it may.")
@click.option("--clear", is_flag=True, help="Delete what it holds, and say how much that was.")
def cache(size: bool, clear: bool) -> int:
    """Look at the cache of compiled kernels and models, or clear it. TCCOMPILE_CACHE_DIR says where it is.

    A model whose file is called cache is compiled by tccompile ./cache.
    """
    if size == clear:
        raise UsageError("give --size, which says where the cache is and how much it holds, or --clear, which deletes that")
    need_compiler("the cache of compiled kernels")
    from tccompile.cli.report import size_text
    from tccompile.emit import cache as kept

    count, held = kept.size()
    if clear:
        kept.evict(0)
        left, bytes_left = kept.size()
        say(f"{kept.folder()}: {count - left} entries deleted, {size_text(held - bytes_left)}")
    else:
        say(f"{kept.folder()}: {count} entries, {size_text(held)} of {size_text(kept.LIMIT)} (TCCOMPILE_CACHE_DIR says where)")
    return 0
