"""Program → Program: fewer and larger ops, and views instead of copies.

Each pass is an equation that leaves every remaining tensor's values as they were (to rounding):

    unfold_inputs, unfold_outputs                            taps become channels where channels are few: unfold.py
    uniform               f(x, c), c the same everywhere =>  f(x, number)
    canonical             x[i] where only i = 0 occurs   =>  x[0]
    flatten_into_weights  gemm(flatten(x), w)            =>  gemm(view(x), permuted w)
    split_pads            pad(x)                         =>  concat(border of x, x), for large images
    leave_gaps            conv(concat(x, y), w)          =>  conv(z, w'), z with zeros after x: a part fills vectors
    into_parts            f(concat(x, y), z)             =>  concat(f(x, z), f(y, z))
    finish_sums           s · product(x, w) + b          =>  product(x, w) with that epilogue, where the product is of bytes
    read_bytes            conv(s · x, w)                 =>  s · conv(x, w), x bytes, w a filter for each channel
    read_integers         f(dequantize(x))               =>  (f ∘ dequantize)(x), for each of several f, and for reductions
    compose               f(g(x))                        =>  (f ∘ g)(x), one Pointwise
    gather_rows           scatter(x, at = rows i, u)     =>  the rows of u where i has them, and else those of x
    masks_once            attention(…, mask = f(x))      =>  f(x) for one row, if it is the same for all
    epilogues             f(op(x), y)                    =>  op(x) with epilogue f(acc, y)
                          f(transpose(op(x)), y)         =>  transpose(op(x) with epilogue f(acc, y')), as a view
                          depth_to_space(conv(x, w))     =>  conv(x, permuted w) with a shuffled store; a part of it is a view
                          shuffle_channels(conv(x, w))   =>  conv(x, permuted w)
    in_steps              round((s · acc + b) / k)       =>  round(s/k · acc + b/k), where a product or a norm is stored in bytes
    two_products          conv(f(conv(x, w) + b), v)     =>  mlp(x, w, b, v), for images of one pixel
    alias                 y = copy(x)                    =>  y is a view of x
    gather_channels       conv(some channels of x, w)    =>  conv(x, w'), with zeros for the channels that are left out
    join_products         gemm(x, w), gemm(x, v)         =>  parts of gemm(x, [w v]), where one attention reads both
    elide_concat          concat(f(x), g(y))             =>  f and g write into slices of one tensor
    write_outputs         y = copy(custom(x))            =>  custom writes y, an output of the model
    lay_as_asked          custom(x)                      =>  custom(copy(x)), if x does not lie as it is asked for
"""

from __future__ import annotations

from tccompile.fuse.alias import alias
from tccompile.fuse.bytes import read_bytes
from tccompile.fuse.compose import compose
from tccompile.fuse.concat import elide_concat, into_parts
from tccompile.fuse.editor import canonical, without_dead_code
from tccompile.fuse.epilogues import epilogues, finish_sums
from tccompile.fuse.flatten import flatten_into_weights
from tccompile.fuse.gaps import leave_gaps
from tccompile.fuse.gather import gather_channels
from tccompile.fuse.integers import read_integers
from tccompile.fuse.joined import join_products
from tccompile.fuse.masks import masks_once
from tccompile.fuse.own import lay_as_asked, write_outputs
from tccompile.fuse.pad import split_pads
from tccompile.fuse.rows import gather_rows
from tccompile.fuse.steps import in_steps
from tccompile.fuse.two_products import two_products
from tccompile.fuse.unfold import unfold_inputs, unfold_outputs
from tccompile.fuse.uniform import uniform
from tccompile.ir.program import Program


def fuse(program: Program) -> Program:
    clean = None  # the program, once it has no dead code
    for equation in (
        unfold_inputs,
        unfold_outputs,
        uniform,
        canonical,
        flatten_into_weights,
        split_pads,
        leave_gaps,
        into_parts,
        finish_sums,
        read_bytes,
        read_integers,
        compose,
        gather_rows,
        masks_once,
        epilogues,
        in_steps,
        two_products,
        alias,
        gather_channels,
        join_products,
        elide_concat,
        write_outputs,
        lay_as_asked,
    ):
        made = equation(program)
        program = clean = made if made is clean else without_dead_code(made)
    return program
