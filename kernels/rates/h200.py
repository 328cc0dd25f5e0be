"""An H200 (sm_90a); what was measured on an H100 of the same generation says so.

A date is that of the change which last wrote the number's line: where the number is older, it is later than the measurement.
Sources say what was recorded with the number, and `UNKNOWN` that nothing was: measure those anew before trusting them.
"""

from tccompile.kernels.rates.rate import (
    AttentionMma,
    AttentionSm90,
    ConvHalo,
    ConvPatch,
    ConvStem,
    Depthwise,
    DepthwiseMma,
    DepthwiseSm90,
    GemmMma,
    GemmSm90,
    Gemv,
    GemvPacked,
    Mlp,
    NormSplit,
    NormTeam,
    Rate,
    Rates,
    Rnn,
    Table,
)

# By what the constants of each kernel were measured.
CONV_HALO = "fitted to 531 times of 133 convolutions on an H200; estimates are 10 % off, choices 1 % slower than the best"
CONV_STEM = "fitted to 148 times of 30 convolutions on an H200; estimates are 10 % off, choices 4 % slower than the best"
CONV_PATCH = "fitted to 295 times of 66 layers on an H200"
DEPTHWISE = "fitted to times of depthwise layers on an H200, as are the numbers of the kernel's `cost`"
DEPTHWISE_BYTES = "fitted to 36 times of 9 depthwise layers on an H200"
DEPTHWISE_SM90 = "fitted to the times of 2,900 configs of 65 layers on an H200"
GEMV_PACKED = "fitted to 300 times of 45 products with weights of 4 and 8 bits on an H200"
GEMV = "products with few rows, many of them short, on an H200"
GEMM_SM90 = "fitted to 6100 times of 1120 convolutions and GEMMs, and with swapped operands 13600 of 1258, on an H200"
BYTES_SM90 = "fitted to 193 times of 17 convolutions on an H100"
GEMM_BYTES = "48 times of 1×1 convolutions of MobileNet at batch 32 on an H200"
UNKNOWN = "not recorded"
ATTENTION_MMA = "fitted to 30 times on an H200"
ATTENTION_SM90 = "fitted to 50 times in halves, and 10 in E4M3, on an H200"
NORM_SPLIT = "fitted to times of 25 to 140 µs on an H200"

H200 = Rates(
    gpu="NVIDIA H200",
    conv_halo=ConvHalo(
        multiplying=Rate(0.44, "cycles", CONV_HALO, "2026-11-23"),
        narrow=Rate(48, "channels", CONV_HALO, "2026-11-23"),
        narrow_stored=Rate(30, "channels", "fitted to 46 times of 10 convolutions on an H200", "2026-11-23"),
        copying=Rate(1.33, "cycles", CONV_HALO, "2026-11-23"),
        beyond=Rate(3.6, "cycles", CONV_HALO, "2026-11-23"),
        storing=Rate(12, "cycles", CONV_HALO, "2026-11-23"),
        shuffling=Rate(26, "cycles", CONV_HALO, "2026-11-23"),
        weights=Rate(185000, "bytes/µs", CONV_HALO, "2026-11-23"),
        start_us=Rate(1.7, "µs", CONV_HALO, "2026-11-23"),
    ),
    conv_stem=ConvStem(
        multiplying=Rate(19.0, "cycles", CONV_STEM, "2026-11-23"),
        more=Rate(0.3, "cycles", CONV_STEM, "2026-11-23"),
        putting=Rate(17.5, "instructions", CONV_STEM, "2026-11-23"),
        storing=Rate(1.7, "instructions", CONV_STEM, "2026-11-23"),
        weight_us=Rate(0.028, "µs", CONV_STEM, "2026-11-23"),
        parts=Rate(0.38, "of the traffic", CONV_STEM, "2026-11-23"),
        start_us=Rate(0.3, "µs", CONV_STEM, "2026-11-23"),
        least_us=Rate(0.25, "µs", CONV_STEM, "2026-11-23"),
        launching_us=Rate(1.6, "µs", CONV_STEM, "2026-11-23"),
    ),
    conv_patch=ConvPatch(
        start_us=Rate(0.4, "µs", CONV_PATCH, "2026-11-22"),
        tile_us=Rate(0.5, "µs", CONV_PATCH, "2026-11-22"),
        step_us=Rate(0.03, "µs", CONV_PATCH, "2026-11-22"),
        weight_us=Rate(0.27, "µs", CONV_PATCH, "2026-11-22"),
    ),
    depthwise=Depthwise(
        busy=Table({4: 0.8, 3: 0.68, 2: 0.62}, "of the cycles", DEPTHWISE, "2026-11-22"),
        from_l2=Rate(0.75, "of the time", DEPTHWISE, "2026-11-23"),
        early_start_us=Rate(1.2, "µs", DEPTHWISE, "2026-11-23"),
        l1_bytes=Rate(115000, "bytes/µs", DEPTHWISE, "2026-11-22"),
        of_byte=Rate(1.5, "instructions", DEPTHWISE_BYTES, "2026-11-26"),
        to_byte=Rate(5, "instructions", DEPTHWISE_BYTES, "2026-11-26"),
    ),
    depthwise_mma=DepthwiseMma(
        mma_sync=Rate(0.6, "of the rate", UNKNOWN, "2026-11-21"),
    ),
    depthwise_sm90=DepthwiseSm90(
        product=Table({4: 10.7, 2: 8.4}, "cycles", "mma.sp of 8 warps of a multiprocessor of an H200", "2026-11-25"),
        slab_us=Rate(0.04, "µs", DEPTHWISE_SM90, "2026-11-25"),
        partly=Rate(0.3, "of the products", DEPTHWISE_SM90, "2026-11-25"),
        pixel=Rate(1.5, "cycles", DEPTHWISE_SM90, "2026-11-25"),
        moving=Rate(0.61, "of the time", DEPTHWISE_SM90, "2026-11-25"),
        straddling=Rate(0.2, "of the time", DEPTHWISE_SM90, "2026-11-25"),
        again=Rate(0.2, "of the time", DEPTHWISE_SM90, "2026-11-25"),
        start_us=Rate(1.6, "µs", DEPTHWISE_SM90, "2026-11-25"),
        first=Rate(0.3, "of the time", DEPTHWISE_SM90, "2026-11-25"),
        refill_us=Rate(0.6, "µs", DEPTHWISE_SM90, "2026-11-25"),
    ),
    gemv=Gemv(
        latency_us=Rate(0.9, "µs", GEMV, "2026-11-21"),
        start_us=Rate(1.1, "µs", GEMV, "2026-11-22"),
    ),
    gemv_packed=GemvPacked(
        start_us=Rate(0.5, "µs", GEMV_PACKED, "2026-11-26"),
        crowded_us=Rate(0.42, "µs", GEMV_PACKED, "2026-11-26"),
        alone_us=Rate(0.61, "µs", GEMV_PACKED, "2026-11-26"),
        two_stages=Rate(1.2, "of the time", GEMV_PACKED, "2026-11-26"),
        next_us=Rate(0.8, "µs", GEMV_PACKED, "2026-11-26"),
    ),
    gemm_mma=GemmMma(
        latency_us=Rate(0.9, "µs", UNKNOWN, "2026-11-21"),
        few_streams=Rate(
            0.9, "of the time", "0.83 to 0.9 in three products of 16 rows and weights of 0.2 to 1 GB on an H200", "2026-11-22"
        ),
        tiles=Table(
            {16: (5500000.0, 0.3), 8: (3000000.0, 0.16), 4: (3500000.0, 0.18), 2: (2200000.0, 0.14), 1: (2000000.0, 0.1)},
            "FLOP/µs, µs",
            "fitted to times on an H100",
            "2026-11-21",
        ),
        memory_us=Rate(0.8, "µs", "fitted to times on an H100", "2026-11-21"),
        float_tiles=Table(
            {8: (950000.0, 0.25), 4: (900000.0, 0.25), 2: (1100000.0, 0.3), 1: (1150000.0, 0.3)},
            "FLOP/µs, µs",
            "fitted to 246 times of 12 products on an H200, 7 % off these",
            "2026-11-25",
        ),
    ),
    gemm_sm90=GemmSm90(
        start_us=Rate(1.3, "µs", GEMM_SM90, "2026-11-25"),
        start_swapped_us=Rate(1.25, "µs", GEMM_SM90, "2026-11-25"),
        late_us=Rate(0.26, "µs", GEMM_SM90, "2026-11-25"),
        crowded_us=Rate(0.07, "µs", GEMM_SM90, "2026-11-25"),
        biased_us=Rate(0.11, "µs", GEMM_SM90, "2026-11-25"),
        gathering=Rate(0.855, "of the cycles", GEMM_SM90, "2026-11-25"),
        copy_cycles_us=Rate(1370, "cycles/µs", GEMM_SM90, "2026-11-25"),
        share_cycles_us=Rate(1960, "cycles/µs", GEMM_SM90, "2026-11-25"),
        power=Rate(0.4, "of the time", GEMM_SM90, "2026-11-25"),
        alone=Rate(1.1, "of the time", GEMM_SM90, "2026-11-25"),
        latency_us=Rate(0.8, "µs", GEMM_SM90, "2026-11-25"),
        queue=Rate(3, "copies", GEMM_SM90, "2026-11-25"),
        ahead=Rate(0.42, "of the stages", GEMM_SM90, "2026-11-25"),
        room=Rate(2.4, "of the multiprocessors", GEMM_SM90, "2026-11-25"),
        full=Rate(0.6, "of the blocks", GEMM_SM90, "2026-11-25"),
        sums=Rate(155, "rows", GEMM_SM90, "2026-11-25"),
        sums_swapped=Rate(85, "rows", GEMM_SM90, "2026-11-25"),
        row_us=Rate(0.56, "µs", GEMM_SM90, "2026-11-25"),
        row_load_us=Rate(0.45, "µs", GEMM_SM90, "2026-11-25"),
        box_us=Rate(0.61, "µs", GEMM_SM90, "2026-11-25"),
        box_biased_us=Rate(0.2, "µs", GEMM_SM90, "2026-11-25"),
        box_load_us=Rate(0.25, "µs", GEMM_SM90, "2026-11-25"),
        box_swapped_us=Rate(0.6, "µs", GEMM_SM90, "2026-11-25"),
        box_swapped_load_us=Rate(0.4, "µs", GEMM_SM90, "2026-11-25"),
        byte_us=Rate(0.6, "µs", BYTES_SM90, "2026-11-25"),
        byte_load_us=Rate(0.2, "µs", BYTES_SM90, "2026-11-25"),
        split_us=Rate(0.48, "µs", GEMM_SM90, "2026-11-25"),
        split_sums_us=Rate(0.36, "µs", GEMM_SM90, "2026-11-25"),
        split_load_us=Rate(0.4, "µs", GEMM_SM90, "2026-11-25"),
        split_tile_us=Rate(0.21, "µs", GEMM_SM90, "2026-11-25"),
        split_inside_us=Rate(2.05, "µs", GEMM_SM90, "2026-11-25"),
        split_swapped_us=Rate(0.6, "µs", GEMM_SM90, "2026-11-25"),
        split_swapped_sums_us=Rate(2, "µs", GEMM_SM90, "2026-11-25"),
        tiled_cycles=Rate(1.4, "cycles", GEMM_SM90, "2026-11-25"),
        narrow_cycles=Rate(2.5, "cycles", GEMM_SM90, "2026-11-25"),
        byte_cycles=Rate(8, "cycles", GEMM_BYTES, "2026-11-26"),
        box_cycles=Rate(80, "cycles", GEMM_SM90, "2026-11-25"),
        beyond_cycles=Rate(4, "cycles", GEMM_SM90, "2026-11-25"),
        few_cycles=Rate(12, "cycles", GEMM_BYTES, "2026-11-26"),
        together=Table({1: 132, 2: 132, 4: 120, 8: 112}, "multiprocessors", UNKNOWN, "2026-11-25"),
        rough_us=Rate(0.055, "µs", "6 products of 128 and 197 rows on an H200", "2026-11-26"),
        erf=Rate(27, "instructions", "4 products of 128 rows on an H200", "2026-11-26"),
    ),
    attention_mma=AttentionMma(
        rate=Rate(0.37, "of the rate", ATTENTION_MMA, "2026-11-22"),
        masked_us=Rate(0.012, "µs", ATTENTION_MMA, "2026-11-22"),
        masked_alike_us=Rate(0.001, "µs", ATTENTION_MMA, "2026-11-22"),
        item_us=Rate(0.75, "µs", ATTENTION_MMA, "2026-11-22"),
        join_us=Rate(0.4, "µs", ATTENTION_MMA, "2026-11-22"),
        step_us=Rate(0.7, "µs", ATTENTION_MMA, "2026-11-22"),
    ),
    attention_sm90=AttentionSm90(
        start_us=Rate(1.55, "µs", ATTENTION_SM90, "2026-11-22"),
        results_us=Rate(15500, "elements/µs", ATTENTION_SM90, "2026-11-22"),
        exchange_us=Rate(0.2, "µs", ATTENTION_SM90, "2026-11-22"),
        clock=Rate(1700, "cycles/µs", ATTENTION_SM90, "2026-11-22"),
        masked=Rate(3, "cycles", ATTENTION_SM90, "2026-11-22"),
        masked_alike=Rate(1.6, "cycles", ATTENTION_SM90, "2026-11-22"),
        softmax=Rate(4.9, "cycles", ATTENTION_SM90, "2026-11-22"),
        scaling=Rate(2.25, "cycles", ATTENTION_SM90, "2026-11-22"),
        exposed=Rate(0.33, "of the time", ATTENTION_SM90, "2026-11-22"),
        single=Rate(120, "cycles", ATTENTION_SM90, "2026-11-22"),
        several=Rate(46, "cycles", ATTENTION_SM90, "2026-11-22"),
        byte_step=Rate(148, "cycles", ATTENTION_SM90, "2026-11-22"),
        byte_softmax=Rate(1.87, "cycles", ATTENTION_SM90, "2026-11-22"),
        byte_products=Rate(1.02, "cycles", ATTENTION_SM90, "2026-11-22"),
        byte_step_few=Rate(114, "cycles", ATTENTION_SM90, "2026-11-22"),
        byte_softmax_few=Rate(3.5, "cycles", ATTENTION_SM90, "2026-11-22"),
        byte_products_few=Rate(0.74, "cycles", ATTENTION_SM90, "2026-11-22"),
        byte_alone=Rate(1.4, "of the time", ATTENTION_SM90, "2026-11-22"),
        early_us=Rate(2.0, "µs", ATTENTION_SM90, "2026-11-22"),
        again=Rate(0.5, "of the time", ATTENTION_SM90, "2026-11-22"),
    ),
    norm_split=NormSplit(
        start_us=Rate(8.0, "µs", NORM_SPLIT, "2026-11-21"),
        moving=Rate(1.13, "of the time", NORM_SPLIT, "2026-11-21"),
        item_us=Rate(1.0, "µs", NORM_SPLIT, "2026-11-21"),
        step_us=Rate(0.2, "µs", NORM_SPLIT, "2026-11-21"),
        read_bytes=Rate(900, "bytes/µs for each GB/s", NORM_SPLIT, "2026-11-21"),
    ),
    norm_team=NormTeam(
        cluster_us=Rate(2.1, "µs", UNKNOWN, "2026-11-22"),
        cluster_more_us=Rate(1.75, "µs", UNKNOWN, "2026-11-22"),
        pixel_us=Rate(0.05, "µs", UNKNOWN, "2026-11-22"),
        costly_us=Rate(0.11, "µs", UNKNOWN, "2026-11-22"),
        cluster_moving=Rate(1.2, "of the time", UNKNOWN, "2026-11-22"),
        rereading=Rate(0.55, "of the time", UNKNOWN, "2026-11-22"),
        moving=Rate(0.85, "of the time", UNKNOWN, "2026-11-22"),
        pieces=Rate(0.16, "of the time", UNKNOWN, "2026-11-22"),
        pieces_memory=Rate(1.15, "of the time", UNKNOWN, "2026-11-22"),
        in_turn=Rate(1.06, "of the time", UNKNOWN, "2026-11-22"),
        team_us=Rate(4.9, "µs", UNKNOWN, "2026-11-22"),
        team_more_us=Rate(0.9, "µs", UNKNOWN, "2026-11-22"),
        team_pixel_us=Rate(0.06, "µs", UNKNOWN, "2026-11-22"),
        team_costly_us=Rate(0.17, "µs", UNKNOWN, "2026-11-22"),
    ),
    rnn=Rnn(
        start_us=Rate(5.0, "µs", UNKNOWN, "2026-11-21"),
        step_us=Rate(0.8, "µs", UNKNOWN, "2026-11-21"),
        turn_us=Rate(0.2, "µs", UNKNOWN, "2026-11-21"),
        wait_us=Rate(0.25, "µs", UNKNOWN, "2026-11-21"),
        streaming=Rate(1300.0, "bytes/µs for each GB/s", UNKNOWN, "2026-11-21"),
        shared_cycles_us=Rate(1500.0, "cycles/µs", UNKNOWN, "2026-11-21"),
    ),
    mlp=Mlp(
        start_us=Rate(0.7, "µs", UNKNOWN, "2026-11-22"),
        l2_bytes=Rate(100000.0, "bytes/µs", UNKNOWN, "2026-11-22"),
    ),
    launch_us=Rate(2.0, "µs", UNKNOWN, "2026-11-21"),
    cycles_us=Rate(
        1660,
        "cycles/µs",
        "the clock under load of an H200, in the times that conv_halo and conv_stem are fitted to",
        "2026-11-23",
    ),
    reduce_us=Rate(1.7, "µs", "fitted to products on an H100 and an H200", "2026-11-21"),
    branch_us=Rate(0.45, "µs", UNKNOWN, "2026-11-24"),
    loss=Rate(0.5, "of the time", "GoogLeNet on an H200: 107, 108 and 109 µs with 0.25, 0.5 and 1, 121 with 0", "2026-11-21"),
)
