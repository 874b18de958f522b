"""The interpreter refuses what trn2 or the kernel language refuses, and computes what the documentation says.

Every function under `refused` is a kernel with exactly one mistake; the test asks for the message of that mistake.
"""

import ast
import enum
import inspect
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import nki_interpreter as nki  # noqa: E402 - after the path

nl, nisa = nki.language, nki.isa
BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
SBUF_BUDGET = 212_464

pytestmark = pytest.mark.timeout(60)


def sbuf(shape, dtype=nl.bfloat16):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def make_output(shape, dtype=nl.bfloat16):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def loaded(src):
    tile = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=src)
    return tile


def index(value):
    tile = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(tile, value, engine=nisa.engine.vector)
    return tile


# ------------------------------------------------------------------------------------------------------------------
# One mistake each. Arguments: x [128, 512] bf16, rows [4, 64] bf16.
# ------------------------------------------------------------------------------------------------------------------

REFUSED = []


def refused(message, error=nki.NkiValidationError, grid=1):
    def register(function):
        REFUSED.append(pytest.param(function, message, error, grid, id=function.__name__))
        return function

    return register


@refused("reads memory that nothing wrote")
def read_uninitialised(x, rows):
    nisa.tensor_copy(dst=sbuf((128, 4)), src=sbuf((128, 4)), engine=nisa.engine.vector)


@refused("accumulates onto PSUM that no matmul wrote")
def matmul_onto_memset(x, rows):
    out, t = psum((128, 512)), loaded(x)
    nisa.memset(out, 0.0, engine=nisa.engine.vector)
    nisa.nc_matmul(dst=out, stationary=t[:, 0:128], moving=t, accumulate=True)


@refused("pass accumulate=True or False")
def matmul_accumulate_left_open(x, rows):
    t = loaded(x)
    nisa.nc_matmul(dst=psum((128, 512)), stationary=t[:, 0:128], moving=t)


@refused("N = 513")
def matmul_too_wide(x, rows):
    t = sbuf((128, 513))
    nisa.memset(t, 0.0, engine=nisa.engine.vector)
    nisa.nc_matmul(dst=psum((128, 513)), stationary=t[:, 0:128], moving=t, accumulate=False)


@refused("contraction of 128 and 64")
def matmul_contraction_differs(x, rows):
    t = loaded(x)
    nisa.nc_matmul(dst=psum((128, 512)), stationary=t[:, 0:128], moving=t[0:64, :], accumulate=False)


@refused("M = 129")
def matmul_stationary_too_wide(x, rows):
    t = loaded(x)
    nisa.nc_matmul(dst=psum((128, 512)), stationary=t[:, 0:129], moving=t, accumulate=False)


@refused("several free dims")
def matmul_stationary_3d(x, rows):
    t = sbuf((128, 2, 64))
    nisa.memset(t, 0.0, engine=nisa.engine.vector)
    nisa.nc_matmul(dst=psum((128, 512)), stationary=t, moving=loaded(x), accumulate=False)


@refused("fp32 pairs with fp32 only")
def matmul_mixed_dtypes(x, rows):
    t, wide = loaded(x), sbuf((128, 512), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=t, engine=nisa.engine.vector)
    nisa.nc_matmul(dst=psum((128, 512)), stationary=t[:, 0:128], moving=wide, accumulate=False)


@refused("must be in SBUF")
def matmul_moving_from_psum(x, rows):
    t = loaded(x)
    moving = psum((128, 512), dtype=nl.bfloat16)
    nisa.tensor_copy(dst=moving, src=t, engine=nisa.engine.vector)
    nisa.nc_matmul(dst=psum((128, 512)), stationary=t[:, 0:128], moving=moving, accumulate=False)


@refused("dst must be float32")
def matmul_into_bf16(x, rows):
    t = loaded(x)
    nisa.nc_matmul(dst=psum((128, 512), dtype=nl.bfloat16), stationary=t[:, 0:128], moving=t, accumulate=False)


@refused("crosses a PSUM bank")
def matmul_across_banks(x, rows):
    t, out = loaded(x), psum((128, 1024))
    nisa.nc_matmul(dst=out[:, 256:768], stationary=t[:, 0:128], moving=t, accumulate=False)


@refused("dst must be float32, not bfloat16|dst must be bfloat16, not float32")
def transpose_changes_dtype(x, rows):
    nisa.nc_transpose(dst=psum((128, 128)), data=loaded(x)[:, 0:128])


@refused("at most 128 x 128")
def transpose_too_wide(x, rows):
    nisa.nc_transpose(dst=psum((128, 128), dtype=nl.bfloat16), data=loaded(x))


@refused("scale tile must be float32")
def scale_in_bf16(x, rows):
    t = loaded(x)
    nisa.activation(dst=t, op=nl.copy, data=t, scale=t[:, 0:1])


@refused(r"scale tile must be \[128, 1\]")
def scale_too_wide(x, rows):
    t, scale = loaded(x), sbuf((128, 2), dtype=nl.float32)
    nisa.memset(scale, 1.0, engine=nisa.engine.vector)
    nisa.activation(dst=t, op=nl.copy, data=t, scale=scale)


@refused("both inputs are in PSUM")
def two_psum_inputs(x, rows):
    a, b = psum((128, 8)), psum((128, 8))
    nisa.memset(a, 0.0, engine=nisa.engine.vector)
    nisa.memset(b, 0.0, engine=nisa.engine.vector)
    nisa.tensor_tensor(dst=sbuf((128, 8)), data1=a, data2=b, op=nl.add, engine=nisa.engine.vector)


@refused("does not broadcast")
def tensor_tensor_broadcast(x, rows):
    t = loaded(x)
    nisa.tensor_tensor(dst=sbuf((128, 512)), data1=t, data2=t[:, 0:1], op=nl.add, engine=nisa.engine.vector)


@refused("128 and 64 partitions|64 and 128 partitions")
def tensor_tensor_partitions(x, rows):
    t = loaded(x)
    nisa.tensor_copy(dst=sbuf((128, 512)), src=t[0:64, :], engine=nisa.engine.vector)


@refused("SBUF and PSUM only")
def compute_on_hbm(x, rows):
    nisa.tensor_copy(dst=sbuf((128, 512)), src=x, engine=nisa.engine.vector)


@refused("does not run on the Scalar engine")
def tensor_tensor_on_scalar(x, rows):
    t = loaded(x)
    nisa.tensor_tensor(dst=t, data1=t, data2=t, op=nl.add, engine=nisa.engine.scalar)


@refused("choose engine vector or scalar")
def psum_from_gpsimd(x, rows):
    nisa.memset(psum((128, 8)), 0.0, engine=nisa.engine.gpsimd)


@refused("last free dims")
def reduce_over_partitions(x, rows):
    nisa.tensor_reduce(dst=sbuf((128, 1), dtype=nl.float32), op=nl.add, data=loaded(x), axis=0)


@refused("types must match")
def memset_int_with_float(x, rows):
    nisa.memset(sbuf((128, 1), dtype=nl.int32), 0.0, engine=nisa.engine.vector)


@refused("copy it to SBUF first")
def dma_from_psum(x, rows):
    t = psum((128, 4))
    nisa.memset(t, 0.0, engine=nisa.engine.vector)
    nisa.dma_copy(dst=make_output((128, 4), dtype=nl.float32), src=t)


@refused("into")
def dma_of_other_size(x, rows):
    nisa.dma_copy(dst=sbuf((128, 256)), src=x)


@refused("outside")
def expert_out_of_range(x, rows):
    nisa.dma_copy(dst=sbuf((1, 64)), src=rows.ap([[64, 1], [1, 64]], offset=0, scalar_offset=index(4)))


@refused("row index outside")
def gather_row_out_of_range(x, rows):
    rows_index = nl.ndarray((16, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(rows_index, 4, engine=nisa.engine.vector)
    nisa.dma_copy(dst=sbuf((16, 64)), src=rows.ap([[64, 16], [1, 64]], offset=0, vector_offset=rows_index))


@refused("index tiles are int32")
def gather_by_float(x, rows):
    rows_index = nl.ndarray((16, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(rows_index, 1.0, engine=nisa.engine.vector)
    rows.ap([[64, 16], [1, 64]], offset=0, vector_offset=rows_index)


@refused("reads memory that nothing wrote")
def index_uninitialised(x, rows):
    rows.ap([[64, 1], [1, 64]], offset=0, scalar_offset=sbuf((1, 1), dtype=nl.int32))


@refused("multiple of 16")
def gather_of_ten_rows(x, rows):
    rows_index = nl.ndarray((10, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(rows_index, 1, engine=nisa.engine.vector)
    rows.ap([[64, 10], [1, 64]], offset=0, vector_offset=rows_index)


@refused("exclude each other")
def two_dynamic_offsets(x, rows):
    rows.ap([[64, 1], [1, 64]], offset=0, scalar_offset=index(0), vector_offset=index(0))


@refused("cannot be indexed again")
def index_a_gather(x, rows):
    rows_index = nl.ndarray((16, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(rows_index, 1, engine=nisa.engine.vector)
    rows.ap([[64, 16], [1, 64]], offset=0, vector_offset=rows_index)[0:1, :]


@refused("call it on the tensor itself")
def pattern_on_a_slice(x, rows):
    x[0:64, :].ap([[512, 64], [1, 512]], offset=0)


@refused("leaves")
def pattern_too_long(x, rows):
    x.ap([[512, 128], [1, 512]], offset=1)


@refused("pass offset= explicitly")
def pattern_without_offset(x, rows):
    x.ap([[512, 128], [1, 512]])


@refused("first step on chip")
def pattern_steps_over_partitions(x, rows):
    loaded(x).ap([[1024, 64], [1, 512]], offset=0)


@refused("no step over partitions")
def slice_with_partition_step(x, rows):
    loaded(x)[0:128:2, :]


@refused("may start at")
def forty_partitions_from_32(x, rows):
    t = loaded(x)
    nisa.tensor_copy(dst=sbuf((40, 512)), src=t[32:72, :], engine=nisa.engine.vector)


@refused("outside or empty")
def slice_past_the_end(x, rows):
    loaded(x)[:, 0:513]


@refused("partitions <= 128")
def tile_of_129_partitions(x, rows):
    sbuf((129, 1))


@refused("psum_banks to 9")
def nine_psum_banks(x, rows):
    tiles = []
    for _ in range(9):
        tiles.append(psum((128, 512)))


@refused("sbuf_bytes to 212,466")
def sbuf_one_element_over(x, rows):
    tiles = [sbuf((128, SBUF_BUDGET // 4), dtype=nl.float32), sbuf((128, 1))]
    nisa.memset(tiles[0], 0.0, engine=nisa.engine.vector)


@refused("never write their inputs")
def write_an_input(x, rows):
    nisa.dma_copy(dst=x, src=loaded(x))


@refused("partly unwritten")
def output_half_written(x, rows):
    out = make_output((128, 512))
    nisa.dma_copy(dst=out[:, 0:256], src=loaded(x)[:, 0:256])
    return out


@refused("output not written")
def output_rows_missing(x, rows):
    out = make_output((128, 512))
    nisa.dma_copy(dst=out[0:64, :], src=loaded(x)[0:64, :])
    return out


@refused("outputs live in nl.shared_hbm")
def output_in_private_hbm(x, rows):
    out = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.private_hbm)
    nisa.dma_copy(dst=out, src=x)
    return out


@refused("not views")
def output_is_a_view(x, rows):
    out = make_output((128, 512))
    nisa.dma_copy(dst=out, src=x)
    return out[0:64, :]


@refused("__add__", TypeError)
def arithmetic_on_loop_variable(x, rows):
    def body(i):
        rows.ap([[64, 1], [1, 64]], offset=0, scalar_offset=i + 1)

    nl.fori_loop(0, 2, body)


@refused("__bool__", TypeError)
def branch_on_register(x, rows):
    def body(i):
        if i:
            loaded(x)

    nl.fori_loop(0, 2, body)


@refused("__index__", TypeError)
def range_over_register(x, rows):
    n = nisa.register_alloc(3)
    for _ in range(n):
        loaded(x)


@refused("__index__", TypeError)
def index_by_loop_variable(x, rows):
    def body(i):
        rows[i]

    nl.fori_loop(0, 2, body)


@refused("loop variable is read-only")
def write_loop_variable(x, rows):
    def body(i):
        nisa.register_load(i, index(0))

    nl.fori_loop(0, 2, body)


@refused("register read before it was loaded")
def loop_bound_never_loaded(x, rows):
    def body(i):
        loaded(x)

    nl.fori_loop(0, nisa.register_alloc(), body)


@refused("nested device loops")
def nested_loops(x, rows):
    def inner(i):
        loaded(x)

    def outer(i):
        nl.fori_loop(0, 2, inner)

    nl.fori_loop(0, 2, outer)


@refused("the body returns nothing")
def loop_body_returns(x, rows):
    def body(i):
        return loaded(x)

    nl.fori_loop(0, 2, body)


@refused("used after that iteration")
def tile_of_body_used_after_loop(x, rows):
    kept = []

    def body(i):
        kept.append(loaded(x))

    nl.fori_loop(0, 1, body)
    nisa.tensor_copy(dst=sbuf((128, 512)), src=kept[0], engine=nisa.engine.vector)


@refused("used after that iteration")
def tile_carried_to_next_trip(x, rows):
    kept = []

    def body(i):
        if len(kept) > 0:
            nisa.tensor_copy(dst=sbuf((128, 512)), src=kept[0], engine=nisa.engine.vector)
        kept.append(loaded(x))

    nl.fori_loop(0, 2, body)


@refused("PSUM may not cross the edge of a device loop")
def psum_from_outside_the_loop(x, rows):
    t, out = loaded(x), psum((128, 512))

    def body(i):
        nisa.nc_matmul(dst=out, stationary=t[:, 0:128], moving=t, accumulate=False)

    nl.fori_loop(0, 2, body)


@refused("both cores write the same rows", grid=2)
def two_cores_one_row(x, rows):
    out = make_output((128, 512))
    nisa.dma_copy(dst=out, src=x)
    return out


@refused("without a barrier", grid=2)
def read_from_the_other_core(x, rows):
    out = make_output((2, 512))
    p = nl.program_id(axis=0)
    nisa.dma_copy(dst=out[p : p + 1, :], src=x[0:1, :])
    loaded(out[0:1, :])
    return out


@refused("the two programs differ", grid=2)
def programs_differ(x, rows):
    out = make_output((2, 512))
    p = nl.program_id(axis=0)
    nisa.dma_copy(dst=out[p : p + 1, :], src=x[0:1, :])
    if p == 1:
        loaded(x)
    return out


@refused("the two programs differ", grid=2)
def trip_counts_differ(x, rows):
    def body(i):
        loaded(x)

    nl.fori_loop(0, 1 + nl.program_id(axis=0), body)


@refused("different shared_hbm tensors", grid=2)
def outputs_differ(x, rows):
    make_output((2 + nl.program_id(axis=0), 512))


@refused("Try is not in the kernel language")
def language_try(x, rows):
    try:
        loaded(x)
    except ValueError:
        loaded(rows)


@refused("ListComp is not in the kernel language")
def language_comprehension(x, rows):
    return [loaded(x) for _ in range(2)]


@refused("Lambda is not in the kernel language")
def language_lambda(x, rows):
    nl.fori_loop(0, 2, lambda i: None)


@refused("While is not in the kernel language")
def language_while(x, rows):
    while True:
        loaded(x)


@refused("With is not in the kernel language")
def language_with(x, rows):
    with nl.no_reorder():
        loaded(x)


@refused("Is is not in the kernel language")
def language_is(x, rows):
    if x is rows:
        loaded(x)


@refused("keyword-only")
def language_keyword_only(x, rows):
    def helper(*, t):
        loaded(t)

    helper(t=x)


@nki.jit
def jitted_helper(x):
    return loaded(x)


@refused("a helper has @nki.jit")
def language_jitted_helper(x, rows):
    jitted_helper(x)


def helper_with_lambda(x):
    return (lambda t: t)(x)


@refused("Lambda is not in the kernel language")
def language_of_helpers(x, rows):
    helper_with_lambda(x)


@pytest.mark.parametrize(("function", "message", "error", "grid"), REFUSED)
def test_refused(function, message, error, grid):
    x, rows = torch.zeros(128, 512, dtype=BF16), torch.zeros(4, 64, dtype=BF16)
    with pytest.raises(error, match=message):
        nki.jit(function)[grid](x, rows)
    with pytest.raises(nki.NkiValidationError, match="inside a kernel only"):  # and the failure left nothing behind
        nisa.register_alloc()


def test_unused_parts_do_not_exist():
    """What the kernels do not use is absent, so a kernel that starts using it stops here first."""
    for name in ("dma_compute", "dma_transpose", "iota", "sendrecv", "core_barrier"):
        assert not hasattr(nisa, name)
    for name in ("divide", "mod", "load", "store", "affine_range", "dynamic_range", "no_reorder"):
        assert not hasattr(nl, name)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.float64), "not torch.float64"),
        (torch.zeros(4, 4, dtype=torch.int64), "not torch.int64"),
        (torch.zeros(4, 4).T[:2], "contiguous"),
        ([1, 2], "kernel arguments"),
    ],
)
def test_arguments_refused(argument, message):
    with pytest.raises(nki.NkiValidationError, match=message):
        nki.jit(language_arguments)(argument)


def language_arguments(x):
    pass


def test_grid_is_one_or_two():
    with pytest.raises(nki.NkiValidationError, match="1 or 2 physical cores"):
        nki.jit(language_arguments)[3]


# ------------------------------------------------------------------------------------------------------------------
# What it computes
# ------------------------------------------------------------------------------------------------------------------


def eight_banks_and_full_sbuf(x):
    tiles = []
    for _ in range(8):
        tiles.append(psum((128, 512)))
    big = sbuf((128, SBUF_BUDGET // 4), dtype=nl.float32)
    nisa.memset(big, 0.0, engine=nisa.engine.vector)
    out = make_output((128, 1), dtype=nl.float32)
    nisa.dma_copy(dst=out, src=big[:, 0:1])
    return out


def test_capacity_is_usable_to_the_last_byte():
    with nki.record() as runs:
        nki.jit(eight_banks_and_full_sbuf)(torch.zeros(1))
    counts = runs[0].cores[0].counts
    assert (counts["peak_psum_banks"], counts["peak_sbuf_bytes"]) == (8, SBUF_BUDGET)


def matmul_twice(a, b):
    out = make_output((128, 96), dtype=nl.float32)
    ta, tb, total = loaded(a), loaded(b), psum((128, 96))
    nisa.nc_matmul(dst=total, stationary=ta, moving=tb, accumulate=False)
    nisa.nc_matmul(dst=total, stationary=ta, moving=tb, accumulate=True)
    result = sbuf((128, 96), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=total, engine=nisa.engine.scalar)
    nisa.dma_copy(dst=out, src=result)
    return out


def test_matmul_and_counts():
    a, b = torch.randn(64, 128).to(BF16), torch.randn(64, 96).to(BF16)
    with nki.record() as runs:
        out = nki.jit(matmul_twice)(a, b)
    torch.testing.assert_close(out, 2 * a.float().T @ b.float(), rtol=1e-5, atol=1e-5)
    core = runs[0].cores[0]
    assert core.counts["matmul_cycles"] == 2 * 96
    assert core.counts["hbm_bytes"] == 64 * (128 + 96) * 2 + 128 * 96 * 4
    assert core.counts["descriptors"] == 64 + 64 + 128  # one per partition
    assert core.counts["scalar_cycles"] == 96
    assert core.seconds()["tensor"] == pytest.approx(192 / 2.4e9)


def transpose_scale_reduce(x, scale):
    out, sums = make_output((48, 32)), make_output((32, 1), dtype=nl.float32)
    t, s = loaded(x), loaded(scale)
    flipped, flipped_sbuf = psum((48, 32), dtype=nl.bfloat16), sbuf((48, 32))
    nisa.nc_transpose(dst=flipped, data=t)
    nisa.tensor_copy(dst=flipped_sbuf, src=flipped, engine=nisa.engine.vector)
    nisa.dma_copy(dst=out, src=flipped_sbuf)
    wide, total = sbuf((32, 48), dtype=nl.float32), sbuf((32, 1), dtype=nl.float32)
    nisa.activation(dst=wide, op=nl.silu, data=t, scale=s)
    nisa.scalar_tensor_tensor(dst=wide, data=wide, op0=nl.multiply, operand0=s, op1=nl.add, operand1=t)
    nisa.tensor_reduce(dst=total, op=nl.add, data=wide, axis=1)
    nisa.dma_copy(dst=sums, src=total)
    return out, sums


def test_transpose_activation_and_reduction():
    x, scale = torch.randn(32, 48).to(BF16), torch.rand(32, 1)
    out, sums = nki.jit(transpose_scale_reduce)(x, scale)
    assert torch.equal(out, x.T)
    expected = torch.nn.functional.silu(x.float() * scale) * scale + x.float()
    torch.testing.assert_close(sums, expected.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)


def silu_slope(x):
    out = make_output((1, 64), dtype=nl.float32)
    t, slope = loaded(x), sbuf((1, 64), dtype=nl.float32)
    nisa.activation(dst=slope, op=nl.silu_dx, data=t)
    nisa.dma_copy(dst=out, src=slope)
    return out


def test_silu_dx_is_the_slope_of_silu():
    x = torch.linspace(-60, 60, 64).reshape(1, 64).requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(x).sum(), x)
    torch.testing.assert_close(nki.jit(silu_slope)(x), expected, rtol=1e-5, atol=1e-6)


def skip_and_gather(rows, picks, experts):
    """Rows by index into a tile of ones, -1 skipped; then the row of one expert id that is skipped, one that is not."""
    out, last = make_output((16, 8)), make_output((1, 8))
    chosen, t = loaded(picks), sbuf((16, 8))
    nisa.memset(t, 1.0, engine=nisa.engine.vector)
    src = rows.ap([[8, 16], [1, 8]], offset=0, vector_offset=chosen)
    nisa.dma_copy(dst=t, src=src, oob_mode=nisa.oob_mode.skip)
    nisa.dma_copy(dst=out, src=t)
    one, ids = sbuf((1, 8)), loaded(experts)
    for j in range(2):
        src = rows.ap([[8, 1], [1, 8]], offset=0, scalar_offset=ids[:, j : j + 1])
        nisa.dma_copy(dst=one, src=src, oob_mode=nisa.oob_mode.skip)
    nisa.dma_copy(dst=last, src=one)
    return out, last


def test_skip_leaves_the_destination_and_moves_no_bytes():
    rows = torch.arange(40.0).reshape(5, 8).to(BF16)
    picks = torch.tensor([4, -1, 0, 5] * 4, dtype=INT32).reshape(16, 1)
    experts = torch.tensor([[2, 5]], dtype=INT32)
    with nki.record() as runs:
        out, last = nki.jit(skip_and_gather)(rows, picks, experts)
    ones = torch.ones(8, dtype=BF16)
    assert torch.equal(out, torch.stack([rows[4], ones, rows[0], ones] * 4))
    assert torch.equal(last, rows[2:3])
    tables, stores = 16 * 4 + 2 * 4, (16 + 1) * 16
    assert runs[0].cores[0].counts["hbm_bytes"] == tables + stores + 8 * 16 + 1 * 16
    assert runs[0].cores[0].counts["gathers"] == 1


def cast_to_int(x):
    out, t = make_output((1, 6), dtype=nl.int32), sbuf((1, 6), dtype=nl.int32)
    nisa.dma_copy(dst=t, src=x)
    nisa.dma_copy(dst=out, src=t)
    return out


def test_float_to_int_rounds_half_even_and_saturates():
    x = torch.tensor([[0.5, 1.5, -2.5, 2.6, 3e10, -3e10]])
    assert nki.jit(cast_to_int)(x).tolist() == [[0, 2, -2, 3, 2**31 - 1, -(2**31)]]


def copy_used_rows(x, used):
    """Both cores copy rows 2 i + core, for i below a count that is data."""
    out = make_output((6, 8))
    n = nisa.register_alloc()
    nisa.register_load(n, loaded(used))
    core = nl.program_id(axis=0)

    def body(i):
        t = sbuf((1, 8))
        nisa.dma_copy(dst=t, src=x.ap([[8, 1], [1, 8]], offset=core * 8, scalar_offset=i, indirect_dim=0))
        nisa.dma_copy(dst=out.ap([[8, 1], [1, 8]], offset=core * 8, scalar_offset=i, indirect_dim=0), src=t)

    nl.fori_loop(0, n, body, step=2)
    return out


@pytest.mark.parametrize("used", [0, 2, 4, 6])
def test_dynamic_loop_over_two_cores(used):
    """The unwritten rows stay NaN, so whoever reads them finds out."""
    x = torch.randn(6, 8).to(BF16)
    out = nki.jit(copy_used_rows)[2](x, torch.tensor([[used]], dtype=INT32))
    assert torch.equal(out[:used], x[:used])
    assert out[used:].isnan().all()


def test_counting_mode_counts_the_same():
    x, used = torch.randn(6, 8).to(BF16), torch.tensor([[4]], dtype=INT32)
    with nki.record() as full:
        nki.jit(copy_used_rows)[2](x, used)
    with nki.record(numerics=False) as counted:
        nki.jit(copy_used_rows)[2](x, used)
    assert [c.counts for c in full[0].cores] == [c.counts for c in counted[0].cores]
    assert full[0].cores[0].counts["hbm_bytes"] == 4 + 2 * 2 * 16


# ------------------------------------------------------------------------------------------------------------------
# Signatures
# ------------------------------------------------------------------------------------------------------------------

TABLE = json.loads((Path(__file__).parent / "nki_api_signatures.json").read_text())


def spelled(parameter):
    """A parameter the way the table spells it."""
    prefix = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
    default = parameter.default
    if default is parameter.empty:
        return prefix + parameter.name
    if isinstance(default, enum.Enum):
        is_region = isinstance(default, nki.MemoryRegion)
        default = default.name if is_region else f"{type(default).__name__}.{default.name}"
    elif isinstance(default, (np.dtype, type)):
        default = np.dtype(default).name
    else:
        default = repr(default)
    return f"{parameter.name}={default}"


FUNCTIONS = [(module, name) for module in ("nki.isa", "nki.language") for name in TABLE[module]["functions"]]


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_signature_as_documented(module, name):
    function = getattr({"nki.isa": nisa, "nki.language": nl}[module], name)
    assert [spelled(p) for p in inspect.signature(function).parameters.values()] == TABLE[module]["functions"][name]


def test_methods_and_members_as_documented():
    for name, parameters in TABLE["NkiTensor"].items():
        assert [spelled(p) for p in inspect.signature(getattr(nki.NkiTensor, name)).parameters.values()] == parameters
    assert [spelled(p) for p in inspect.signature(nki.jit).parameters.values()] == TABLE["nki"]["functions"]["jit"]
    for name, members in TABLE["nki.isa"]["enums"].items():
        assert {m.name for m in getattr(nisa, name)} <= set(members)
    assert set(vars(nl)) <= set(TABLE["nki.language"]["functions"]) | set(TABLE["nki.language"]["values"])
    assert set(vars(nisa)) == set(TABLE["nki.isa"]["functions"]) | set(TABLE["nki.isa"]["enums"])


def test_kernels_call_only_what_is_documented():
    """Every nl.* and nisa.* in the kernel source, and every argument name, is in the table."""
    tree = ast.parse((ROOT / "nki_moe_kernels.py").read_text())
    modules = {"nl": TABLE["nki.language"], "nisa": TABLE["nki.isa"]}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            known = {*module["functions"], *module.get("enums", ()), *module.get("values", ())}
            assert node.attr in known, f"line {node.lineno}: {node.value.id}.{node.attr}"
            used.add((node.value.id, node.attr))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in modules:
                parameters = [p.split("=")[0] for p in modules[owner.id]["functions"][node.func.attr]]
            elif node.func.attr == "ap":
                parameters = [p.split("=")[0] for p in TABLE["NkiTensor"]["ap"]][1:]
            else:
                continue
            assert {k.arg for k in node.keywords} <= set(parameters), f"line {node.lineno}"
            assert len(node.args) + len(node.keywords) <= len(parameters), f"line {node.lineno}"
    everything = {("nl", n) for n in TABLE["nki.language"]["functions"]}
    everything |= {("nisa", n) for n in TABLE["nki.isa"]["functions"]}
    assert everything <= used, f"the table holds what no kernel uses: {everything - used}"
