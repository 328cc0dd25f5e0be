"""Results of wgmma on their way to memory: the 16 rows that a warp has, through the epilogue, as fp16 in a box of shared memory.

The copy engine stores the box, whose rows are swizzled by as many bytes as they have, 32 to 128.
"""

from __future__ import annotations


def key(columns: int) -> str:
    """Text: which of a row's 16 bytes a lane writes first, by what the swizzle makes of the row."""
    alike = 7 - columns.bit_length()  # rows of which so many low bits are left out look alike
    return f"key = i32(((lane & i32(15)) >> i32({alike})) & i32({columns // 8 - 1}))"


def fill(acc: str, columns: int, added: bool = False) -> list[str]:
    """Text that fills the box at `box` with the results of the accumulators `acc`, of 16 rows of so many columns.

    added  whether the box holds what the epilogue adds to them, in the same places
    It names lane, key, c (the lane's first channel) and e, and calls `epilogue.build_results`' function and hopper's.
    """
    text = [f"at = i32(box + (lane & i32(15)) * i32({2 * columns}) + ((lane >> i32(4)) ^ key) * i32(16))"]
    for sixteen in range(columns // 16):
        if added:
            text.append(f"read = load_matrices(i32(at ^ i32({32 * sixteen})))")
        for half, name in enumerate("vu"):
            values = f"{acc}[{8 * sixteen + 4 * half}:{8 * sixteen + 4 * half + 4}]"
            more = f", read[{4 * half}:{4 * half + 4}]" if added else ""
            text.append(f"{name} = results({values}{more}, i32(c + i32({16 * sixteen + 8 * half})), e)")
        numbers = ", ".join(f"{name}[{k}]" for name in "vu" for k in range(4))
        text.append(f"store_matrices(i32(at ^ i32({32 * sixteen})), {numbers})")
    return [*text, "fence_copies()", "sync_warp()"]
