"""How a warpgroup sums up a tile's products: stage by stage, as a ring brings them.

Each is a device function (share, buffers, operands, slot, parity, thread, tile, e) → the sums of a tile over the block's share of
K, and the ring's slot and parity behind its last stage.

share         the stages of K that the block sums: the first one, and the one after the last
buffers       of the ring, whose stage `slot` comes next; operands: as `Accumulator.operands` gives them
thread, tile  as `parts.results` has them; e: the results' arguments
"""

from __future__ import annotations

from typing import Any

from tccompile.kernels.parts.accumulator import Accumulator, Overlapped, Promoted
from tccompile.kernels.parts.results import Results
from tccompile.kernels.parts.ring import Ring
from tccompile.kernels.ptx.core import i32, inline


def summing(ring: Ring, product: Accumulator, results: Results, added: bool, short: bool = False, shared: bool = False) -> Any:
    """The one for what is multiplied; `added`: whether something is added to the results, which is asked for meanwhile; `short`:
    whether the first stage counts in part; `shared`: whether stages are filled by several blocks of a cluster."""
    if isinstance(product, Overlapped):
        return _overlapped(ring, product, results, added, short)
    if not product.sparse and isinstance(product, Promoted) and product.in_pairs:
        return _in_pairs(ring, product, results, added, short)
    if not product.sparse:
        return _dense(ring, product, results, added, short)
    if isinstance(product, Promoted):
        return (_sparse_rough_in_turn if shared else _sparse_rough)(ring, product, results, added)
    return _sparse(ring, product, results, added)


def _dense(ring: Any, product: Any, results: Any, added: bool, short: bool) -> Any:
    at_once = product.at_once
    multiply_short = product.multiply_short if short else None

    @inline
    def sum_up(share, buffers, operands, slot, parity, thread, tile, e):
        tid = thread[3]
        first, end = share
        acc = product.zero()
        before, k = ring.none(buffers), first
        if short:
            ring.wait(buffers, slot, parity)
            acc = multiply_short(operands, slot)
            if added and not results.early:
                results.ask(thread, tile, i32(0), e)
            before = ring.hold(buffers, slot)
            if at_once and tid & 127 == 0:
                ring.release(before)
            slot, parity = ring.advance(slot, parity)
            k = i32(k + 1)
        while k < end:
            ring.wait(buffers, slot, parity)
            acc = product.multiply(acc, operands, slot, k, first)
            if added and not results.early and k == first:
                results.ask(thread, tile, i32(0), e)
            product.wait_last()
            if at_once:
                if tid & 127 == 0:
                    ring.release(ring.hold(buffers, slot))
            elif k > first and tid & 127 == 0:  # the multiplications before these are done: give their buffer back
                ring.release(before)
            before = ring.hold(buffers, slot)
            slot, parity = ring.advance(slot, parity)
            k = i32(k + 1)
        product.wait()
        if not at_once and tid & 127 == 0:
            ring.release(before)
        return acc, slot, parity

    return sum_up


def _in_pairs(ring: Any, product: Any, results: Any, added: bool, short: bool) -> Any:
    """Of rough sums: those of two stages are made by themselves, and then added to the others. Of an odd number of stages, the
    first one is by itself."""
    multiply_short = product.multiply_short if short else None

    @inline
    def sum_up(share, buffers, operands, slot, parity, thread, tile, e):
        leads = thread[3] & 127 == 0
        k, end = share
        acc = product.zero()
        if added and not results.early:
            results.ask(thread, tile, i32(0), e)
        if short:
            ring.wait(buffers, slot, parity)
            acc = multiply_short(operands, slot)
            if leads:
                ring.release(ring.hold(buffers, slot))
            slot, parity = ring.advance(slot, parity)
            k = i32(k + 1)
        if (end - k) & 1:
            ring.wait(buffers, slot, parity)
            acc = product.multiply(acc, operands, slot, k, k)
            if leads:
                ring.release(ring.hold(buffers, slot))
            slot, parity = ring.advance(slot, parity)
            k = i32(k + 1)
        while k < end:
            ring.wait(buffers, slot, parity)
            part, held = product.begin(operands, slot), ring.hold(buffers, slot)
            slot, parity = ring.advance(slot, parity)
            ring.wait(buffers, slot, parity)
            acc = product.end(acc, part, operands, slot)
            if leads:
                ring.release(held)
                ring.release(ring.hold(buffers, slot))
            slot, parity = ring.advance(slot, parity)
            k = i32(k + 2)
        return acc, slot, parity

    return sum_up


def _overlapped(ring: Any, product: Any, results: Any, added: bool, short: bool) -> Any:
    """Of rough sums: those of two stages are in registers, in turn. One is added to the others while the next is made."""
    begin_first = product.multiply_short if short else product.begin

    @inline
    def sum_up(share, buffers, operands, slot, parity, thread, tile, e):
        leads = thread[3] & 127 == 0
        k, end = share
        ring.wait(buffers, slot, parity)
        acc, even, before = product.zero(), begin_first(operands, slot), ring.hold(buffers, slot)
        slot, parity = ring.advance(slot, parity)
        if added and not results.early:
            results.ask(thread, tile, i32(0), e)
        k = i32(k + 2)
        while k < end:
            ring.wait(buffers, slot, parity)
            odd, held = product.begin(operands, slot), ring.hold(buffers, slot)
            acc = product.add_before(acc, even)
            if leads:
                ring.release(before)
            slot, parity = ring.advance(slot, parity)
            ring.wait(buffers, slot, parity)
            even, before = product.begin(operands, slot), ring.hold(buffers, slot)
            acc = product.add_before(acc, odd)
            if leads:
                ring.release(held)
            slot, parity = ring.advance(slot, parity)
            k = i32(k + 2)
        if k == end:
            ring.wait(buffers, slot, parity)
            odd, held = product.begin(operands, slot), ring.hold(buffers, slot)
            acc = product.add_before(acc, even)
            if leads:
                ring.release(before)
            slot, parity = ring.advance(slot, parity)
            acc = product.add_last(acc, odd)
            before = held
        else:
            acc = product.add_last(acc, even)
        if leads:  # not in both branches: where they meet, the compiler would take `slot` for the thread's own
            ring.release(before)
        return acc, slot, parity

    return sum_up


def _sparse(ring: Any, product: Any, results: Any, added: bool) -> Any:
    """Of 2:4 weights. The places of two stages are in registers, in turn: those of one are loaded while the products of the other
    are made."""

    @inline
    def sum_up(share, buffers, operands, slot, parity, thread, tile, e):
        leads = thread[3] & 127 == 0
        first, end = share
        acc, even, odd = product.zero(), product.none(), product.none()
        before, k = ring.none(buffers), first
        while k < end:
            ring.wait(buffers, slot, parity)
            even = product.load(operands, slot)
            acc = product.multiply(acc, operands, slot, k, first, even)
            if added and not results.early and k == first:
                results.ask(thread, tile, i32(0), e)
            product.wait_last(odd, k)
            if k > first and leads:
                ring.release(before)
            before = ring.hold(buffers, slot)
            slot, parity = ring.advance(slot, parity)
            k = i32(k + 1)
            if k < end:
                ring.wait(buffers, slot, parity)
                odd = product.load(operands, slot)
                acc = product.multiply(acc, operands, slot, k, first, odd)
                product.wait_last(even, k)
                if leads:
                    ring.release(before)
                before = ring.hold(buffers, slot)
                slot, parity = ring.advance(slot, parity)
                k = i32(k + 1)
        product.wait(even, k)
        product.wait(odd, k)
        if leads:
            ring.release(before)
        return acc, slot, parity

    return sum_up


def _sparse_rough(ring: Any, product: Any, results: Any, added: bool) -> Any:
    """Of 2:4 weights where sums are rough: those of two stages are made by themselves, and then added to the others."""

    @inline
    def sum_up(share, buffers, operands, slot, parity, thread, tile, e):
        leads = thread[3] & 127 == 0
        first, end = share
        acc, odd, k = product.zero(), product.none(), first
        if added and not results.early and k < end:
            results.ask(thread, tile, i32(0), e)
        while k < end:
            ring.wait(buffers, slot, parity)
            even = product.load(operands, slot)
            part = product.multiply(product.nothing(), operands, slot, k, k, even)
            held, last = ring.hold(buffers, slot), k + 1 == end
            slot, parity = ring.advance(slot, parity)
            k = i32(k + 1)
            before = held
            if not last:
                ring.wait(buffers, slot, parity)
                odd = product.load(operands, slot)
                part = product.multiply(part, operands, slot, k, first, odd)
                before = ring.hold(buffers, slot)
                slot, parity = ring.advance(slot, parity)
                k = i32(k + 1)
            product.wait(even, k)
            product.wait(odd, k)
            if leads:
                ring.release(held)
                if not last:
                    ring.release(before)
            acc = product.add(acc, part)
        return acc, slot, parity

    return sum_up


def _sparse_rough_in_turn(ring: Any, product: Any, results: Any, added: bool) -> Any:
    """The same where other blocks wait for stages too, so that each is given back as soon as it has been read. Of two warpgroups
    the second one begins with a stage by itself, so that it multiplies while the other adds."""

    @inline
    def sum_up(share, buffers, operands, slot, parity, thread, tile, e):
        leads, second = thread[3] & 127 == 0, thread[1] >= 4
        first, end = share
        acc, odd, k = product.zero(), product.none(), first
        if added and not results.early and k < end:
            results.ask(thread, tile, i32(0), e)
        while k < end:
            ring.wait(buffers, slot, parity)
            even = product.load(operands, slot)
            part = product.multiply(product.nothing(), operands, slot, k, k, even)
            held, alone = ring.hold(buffers, slot), k + 1 == end or (second and k == first)
            slot, parity = ring.advance(slot, parity)
            k = i32(k + 1)
            if not alone:
                ring.wait(buffers, slot, parity)
                odd = product.load(operands, slot)
                part = product.multiply(part, operands, slot, k, first, odd)
                product.wait_last(even, k)
                if leads:
                    ring.release(held)
                held = ring.hold(buffers, slot)
                slot, parity = ring.advance(slot, parity)
                k = i32(k + 1)
            product.wait(even, k)
            product.wait(odd, k)
            if leads:
                ring.release(held)
            acc = product.add(acc, part)
        return acc, slot, parity

    return sum_up
