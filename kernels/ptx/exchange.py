"""How blocks of one launch pass results on while they run: through memory, where a value that is not there yet is all ones.

Readers wait for the values themselves, so that neither fences nor flags lie between a result and who needs it. The place of
every value is written twice: all ones before `grid_barrier`, the value after it. All ones is a NaN that is never published.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tccompile.ir.types import DType
from tccompile.kernels.ptx.atomics import atomic_add
from tccompile.kernels.ptx.core import cuda, f32, i32, inline, instruction, types, u32, u64, void
from tccompile.kernels.ptx.memory import pack, unpack

i64 = types.int64

_peek = instruction("ld.volatile.global.u32 $0, [$1];", i32, i64)


_ordered = instruction("fence.acq_rel.gpu;", void)


@cache
def _fence(ordered: bool) -> Any:
    @inline
    def fence():
        if ordered:
            _ordered()
        else:
            cuda.threadfence()

    return fence


@cache
def arrive(ordered: bool) -> Any:
    """The device function (counters, tid): all threads of this block are here, after what they wrote before.

    counters  two numbers, zero before; each block calls `arrive`, `await_all` and `leave` once, and then they are zero again. The
              blocks must run at once
    ordered   by a fence that sm_70 and newer have, and that costs less
    """
    fence = _fence(ordered)

    @inline
    def arrived(counters, tid):
        cuda.syncthreads()
        if tid == 0:
            fence()
            atomic_add(counters, i32(1))

    return arrived


@cache
def await_all(ordered: bool) -> Any:
    """The device function (counters, blocks, tid): waits until `blocks` blocks have arrived; what they wrote before is then seen.

    ordered, counters  as of `arrive`
    """
    fence = _fence(ordered)

    @inline
    def awaited(counters, blocks, tid):
        if tid == 0:
            while _peek(counters) < blocks:
                pass
            fence()
        cuda.syncthreads()

    return awaited


_arrive, _await_all = arrive(False), await_all(False)


@inline
def leave(counters, blocks, tid):
    """Nobody of this block waits any more; the last block to say so clears the counters (see `arrive`)."""
    if tid == 0 and atomic_add(counters + 4, i32(1)) == blocks - 1:
        atomic_add(counters, i32(-blocks))
        atomic_add(counters + 4, i32(-blocks))


@inline
def grid_barrier(counters, blocks, tid):
    """Waits until all threads of all blocks are here; what they wrote before is then seen. All blocks must run at once.

    counters: two numbers, zero before and after.
    """
    _arrive(counters, tid)
    _await_all(counters, blocks, tid)
    leave(counters, blocks, tid)


@cache
def wait(dtype: DType, vectors: int, together: bool) -> Any:
    """The device function (address, inside, address, inside, …) → four words of each of so many vectors of 16 bytes.

    It returns when no element of them is all ones; vectors whose `inside` is 0 are not read, and zero. `together`: the lanes of
    a warp leave at the same time (sm_70 and newer).
    """
    words = [[f"${4 * v + k}" for k in range(4)] for v in range(vectors)]
    inputs = [(f"${4 * vectors + 2 * v}", f"${4 * vectors + 2 * v + 1}") for v in range(vectors)]
    lines = [f".reg .pred again, {', '.join(f'p{v}' for v in range(vectors))};", ".reg .b32 t, missing;"]
    for v, (_, inside) in enumerate(inputs):
        lines += [f"setp.ne.b32 p{v}, {inside}, 0;", *(f"mov.b32 {w}, 0;" for w in words[v])]
    lines.append("AGAIN_${:uid}:")
    load = "ld.relaxed.gpu.global" if together else "ld.volatile.global"
    lines += [f"@p{v} {load}.v4.b32 {{{', '.join(words[v])}}}, [{inputs[v][0]}];" for v in range(vectors)]
    lines.append("mov.b32 missing, 0;")
    for w in (w for of_one in words for w in of_one):
        if dtype.size == 2:  # the highest bit of a half is set where that half of ~w is zero, if it is the lowest such half
            lines += [f"not.b32 t, {w};", "add.u32 t, t, 0xfffeffff;", f"and.b32 t, t, {w};", "or.b32 missing, missing, t;"]
        else:
            lines.append(f"max.u32 missing, missing, {w};")
    if dtype.size == 2:
        lines += ["and.b32 missing, missing, 0x80008000;", "setp.ne.b32 again, missing, 0;"]
    else:
        lines.append("setp.eq.u32 again, missing, 0xffffffff;")
    lines += ["vote.sync.any.pred again, again, 0xffffffff;"] if together else []
    lines.append("@again bra AGAIN_${:uid};")
    return instruction("{ " + " ".join(lines) + " }", (u32,) * (4 * vectors), *(u64, i32) * vectors)


@cache
def publish(dtype: DType) -> Any:
    """The device function (address, value) that writes an element for `wait`."""
    kind = f"b{8 * dtype.size}"
    lines = [f".reg .{kind} w;", *pack(dtype, "w", ["$1"])]
    if dtype is DType.F32:  # a NaN may come from outside
        lines += [".reg .pred p;", "setp.nan.f32 p, $1, $1;", "selp.b32 w, 0x7fffffff, w, p;"]
    lines.append(f"st.volatile.global.{kind} [$0], w;")
    return instruction("{ " + " ".join(lines) + " }", void, u64, f32)


@cache
def withhold(dtype: DType) -> Any:
    """The device function (address) that writes all ones."""
    kind = f"b{8 * dtype.size}"
    ones = "0xffff" if dtype.size == 2 else "0xffffffff"
    return instruction(f"{{ .reg .{kind} w; mov.{kind} w, {ones}; st.global.{kind} [$0], w; }}", void, u64)


@cache
def values(dtype: DType) -> Any:
    """The device function of four words that gives the floats in them."""
    n = 16 // dtype.size
    each = n // 4
    lines = [".reg .b32 w0, w1, w2, w3;"]
    for k in range(4):
        lines += [f"mov.b32 w{k}, ${n + k};", *unpack(dtype, f"w{k}", [f"${each * k + j}" for j in range(each)])]
    return instruction("{ " + " ".join(lines) + " }", (f32,) * n, u32, u32, u32, u32, pure=True)
