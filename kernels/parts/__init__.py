"""What kernels are put together from: objects whose attributes are device functions, and descriptions that need no compiler.

layout       where things lie in a block's shared memory (no Numba)
operands     how an operand of a product lies in a stage of a ring (no Numba)
staging      how results lie in shared memory on their way out (no Numba)
maps         tensor maps of images, and which tensors may have one (no Numba)
tile_order   in which order blocks take the tiles of a product
ring         buffers that copies fill and warpgroups read, with their barriers: once, or in a ring
producers    what fills a stage: boxes of a matrix, or pixels by im2col
accumulator  what multiplies stages, and holds the sums
whole_rows   weights that stay in shared memory, and how 64 rows of their products get into boxes
sums         how the products of a tile's stages are summed up, as the ring brings them
results      how sums leave: as rows, in boxes, in boxes turned over, added up over a cluster

And for convolutions whose tiles are rectangles of an image:

image_order    in which order blocks take the tiles of images
halo           what fills a stage: a box of pixels and those around it; and weights that stay
image_results  how sums leave: in boxes, from registers, added up from taps' parts

For kernels of mma.sync and of CUDA-core products, whose threads copy for themselves:

blocks       which tile of which product a block computes, and its way through K
panels       the operands of a step: which chunks a thread copies, and where a lane reads fragments
chunks       16 bytes in shared memory: where they lie, and how they come there
async_ring   the ring of stages that they are copied to
fragments    how an instruction's operands lie over a warp's lanes, their loads, products of them
slabs        how accumulators are turned round on their way to the epilogue
split        who of several blocks comes last, and sums whose parts they make
"""
