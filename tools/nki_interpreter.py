"""A small strict stand-in for the part of `nki` that `nki_moe_kernels.py` uses: the kernels in NumPy on any CPU.

    from tools import nki_interpreter as nki
    nl, nisa = nki.language, nki.isa          # then write and call kernels as with the official package

It exists to find mistakes, not to be fast or general. What it knows, it knows for trn2 and checks always:

    memory      every element remembers whether, and by whom, it was written; reading one that was not is an error
    capacity    live SBUF bytes per partition and live PSUM banks, at every allocation
    shapes      partitions, matmul and PSUM bank limits, access patterns, dtypes, which engine may touch which memory
    PSUM        `accumulate=True` only onto what a matmul wrote; no PSUM tile crosses the edge of a device loop
    offsets     every dynamic offset is compared with the tensor's bounds
    language    the kernel's source is compared with the documented Python subset; registers have no arithmetic
    two cores   both programs must issue the same instructions, and must not touch what the other one wrote
    outputs     in shared HBM, and fully written (after a loop with a dynamic trip count: whole rows of dim 0 may stay
                unwritten; they hold NaN)

What it cannot know: time, scheduling, races inside one program, and whether the compiler accepts the kernel. Facts are
from the public NKI documentation (SDK 2.32 / 2.33) and the public notes of people who ran kernels on trn2.

It also counts what a kernel issues, by the documented rates of each engine:

    with nki.record(numerics=False) as runs:      # False: shapes, tables and counts only, no floating-point work
        kernel[2](*tensors)
    runs[0].cores[0].seconds()                    # {"tensor": ..., "vector": ..., "dma": ..., ...}

Not thread-safe: one kernel runs at a time.
"""

import ast
import contextlib
import enum
import functools
import inspect
import itertools
import math
import textwrap
import types
import weakref
from collections import Counter
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import torch

PARTITIONS = 128  # this and the next lines: device_facts#nki-limits
SBUF_BYTES = 224 * 1024 - 16384 - 8 - 520  # usable per partition: what nkilib's MoE backward budgets
PSUM_BANKS, BANK_BYTES = 8, 2048  # per partition
MATMUL_K, MATMUL_M, MATMUL_N = 128, 128, 512
STEP_LIMIT = 2**16  # steps and sizes of on-chip access patterns are 16-bit fields

# Rates of one physical core: device_facts#nki-rates.
TENSOR_HZ, VECTOR_HZ, SCALAR_HZ = 2.4e9, 0.96e9, 1.2e9
SCALAR_FIXED_S, GATHER_FIXED_S = 0.2e-6, 1e-6  # per Scalar instruction; GpSimd time to describe one gather
HBM_BYTES_PER_S = 368e9
MATMUL_MIN_CYCLES = 64

UNWRITTEN, WRITTEN, BY_MATMUL = 0, 1, 2  # state of an on-chip element; in HBM: 0, or 1 + the program that wrote it
INT_POISON = -(2**30)


class NkiValidationError(Exception):
    """The kernel does what trn2, or the documented language, does not allow."""


def _require(condition: bool, message: str, storage: "Storage | None" = None) -> None:
    if not condition:
        raise NkiValidationError(message if storage is None else f"{message}: {storage}")


# ------------------------------------------------------------------------------------------------------------------
# Names of nki.language and nki.isa
# ------------------------------------------------------------------------------------------------------------------


MemoryRegion = enum.Enum("MemoryRegion", "sbuf psum private_hbm shared_hbm")
Engine = enum.Enum("engine", "unknown tensor vector scalar gpsimd dma sync")
DgeMode = enum.Enum("dge_mode", "unknown none swdge hwdge")
OobMode = enum.Enum("oob_mode", "error skip")
ReduceCmd = enum.Enum("reduce_cmd", "idle reset reduce reset_reduce load_reduce")
MatmulPerfMode = enum.Enum("matmul_perf_mode", "none double_row")
ON_CHIP = (MemoryRegion.sbuf, MemoryRegion.psum)
BFLOAT16, FLOAT32, INT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.int32)


# Operators. Instructions receive them as `op` and apply them to fp32 arrays.
def add(x, y, dtype=None):
    return x + y


def multiply(x, y, dtype=None):
    return x * y


def copy(x, dtype=None):
    return x


def silu(x, dtype=None):
    return x / (1 + np.exp(-x))


def silu_dx(x, dtype=None):
    sigmoid = 1 / (1 + np.exp(-x))
    return sigmoid * (1 + x * (1 - sigmoid))


# ------------------------------------------------------------------------------------------------------------------
# One program of one kernel call
# ------------------------------------------------------------------------------------------------------------------


@dataclass
class Core:
    """What one program did: its instruction log, its counts, and what is live on its chip memories."""

    program: int
    programs: int
    numerics: bool
    log: list = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    live: Counter = field(default_factory=Counter)
    outputs: list = field(default_factory=list)  # Storage of each shared_hbm allocation, in order
    shared: list = field(default_factory=list)  # the same of program 0, if this is program 1
    loops: int = 0
    loop: int | None = None  # number of the device loop we are in
    born: list = field(default_factory=list)  # weak references to what the running loop body allocated
    dynamic_trips: bool = False

    def issue(self, name: str, *tensors: "NkiTensor", **counts: float) -> None:
        self.log.append((name, self.loop, tuple((t.shape, t.dtype, t.buffer) for t in tensors)))
        self.counts["instructions"] += 1
        self.counts.update(counts)

    def allocate(self, storage: "Storage") -> None:
        unit, amount, limit = "sbuf_bytes", storage.bytes_per_partition, SBUF_BYTES
        if storage.buffer is MemoryRegion.psum:
            unit, amount, limit = "psum_banks", -(-amount // BANK_BYTES), PSUM_BANKS
        self.live[unit] += amount
        peak = self.counts["peak_" + unit] = max(self.counts["peak_" + unit], self.live[unit])
        weakref.finalize(storage, self.live.subtract, {unit: amount})
        _require(peak <= limit, f"{storage} brings {unit} to {peak:,} live at once; trn2 has {limit:,}")

    def seconds(self) -> dict[str, float]:
        """Time of each engine if nothing ever waited, by the documented rates."""
        c = self.counts
        return {
            "tensor": (c["matmul_cycles"] + c["transpose_cycles"]) / TENSOR_HZ,
            "vector": c["vector_cycles"] / VECTOR_HZ,
            "scalar": c["scalar_cycles"] / SCALAR_HZ + c["scalar_instructions"] * SCALAR_FIXED_S,
            "gpsimd": c["gathers"] * GATHER_FIXED_S,
            "dma": c["hbm_bytes"] / HBM_BYTES_PER_S,
        }


@dataclass
class Run:
    """One recorded kernel call."""

    kernel: str
    cores: list[Core]


_core: Core | None = None
_records: list[Run] | None = None
_numerics = True


def _running() -> Core:
    _require(_core is not None, "NKI instructions run inside a kernel only")
    return _core


@contextlib.contextmanager
def record(numerics: bool = True):
    """Collect a Run for every kernel called inside. numerics=False: move integers only, count everything."""
    global _records, _numerics
    before = _records, _numerics
    _records, _numerics = [], numerics
    try:
        yield _records
    finally:
        _records, _numerics = before


# ------------------------------------------------------------------------------------------------------------------
# Tensors
# ------------------------------------------------------------------------------------------------------------------


class Storage:
    """One allocation. `state` has one int8 per element, or is None where everything counts as written."""

    def __init__(self, array: np.ndarray, state: np.ndarray | None, buffer: MemoryRegion, name: str, core: Core):
        self.array, self.state, self.buffer, self.name = array, state, buffer, name
        self.loop = core.loop
        self.dead = False
        self.read_only = False
        self.bytes_per_partition = math.prod(array.shape[1:]) * array.itemsize

    def __str__(self) -> str:
        return f"{self.buffer.name} tensor {self.name or '(unnamed)'} {list(self.array.shape)} {self.array.dtype}"


class NkiTensor:
    """A view of a Storage: NumPy views of its data and state, plus what a dynamic offset made of it."""

    def __init__(self, storage: Storage, data: np.ndarray, state: np.ndarray | None, start_partition: int = 0):
        self.storage, self.data, self.state = storage, data, state
        self.start_partition = start_partition
        self.rows: np.ndarray | None = None  # vector_offset: the row of `data` for each partition
        self.in_bounds: bool = True  # scalar_offset: False if it points outside

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape if self.rows is None else (len(self.rows), *self.data.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def buffer(self) -> MemoryRegion:
        return self.storage.buffer

    def _is_base(self) -> bool:
        return self.data.shape == self.storage.array.shape and self.rows is None

    def __getitem__(self, key):
        """Integers, slices and `...`. On chip, dim 0 is the partition dim and always stays."""
        _require(self.rows is None and self.in_bounds, "a dynamic view cannot be indexed again")
        key = key if isinstance(key, tuple) else (key,)
        if any(k is Ellipsis for k in key):
            at = key.index(Ellipsis)
            key = key[:at] + (slice(None),) * (len(self.shape) - len(key) + 1) + key[at + 1 :]
        _require(len(key) <= len(self.shape), f"{len(key)} indices", self.storage)
        start = self.start_partition
        for dim, (k, size) in enumerate(zip(key, self.shape, strict=False)):
            is_slice = isinstance(k, slice)
            first, last, step = k.indices(size) if is_slice else (k.__index__() % size, k.__index__() + 1, 1)
            inside = (k.stop is None or -size <= k.stop <= size) if is_slice else -size <= k.__index__() < size
            _require(inside and first < last, f"index {k} of dim {dim} is outside or empty", self.storage)
            if dim == 0 and self.buffer in ON_CHIP:
                _require(step == 1, "no step over partitions", self.storage)
                key = (slice(first, last if is_slice else first + 1), *key[1:])
                start += first
        state = None if self.state is None else self.state[key]
        view = NkiTensor(self.storage, self.data[key], state, start)
        _require(self.buffer not in ON_CHIP or view.data.ndim >= 2, "on-chip views keep 2 dims", self.storage)
        return view

    def ap(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None):
        """An access pattern [[step, num], ...] in elements over the whole tensor, optionally moved by a dynamic offset.

        scalar_offset  register or (1, 1) SBUF int32: start += value * elements right of `indirect_dim`
        vector_offset  (P, 1) SBUF int32 over an HBM tensor: row of each partition (the first step is ignored)
        """
        base = self.storage.array
        _require(self._is_base(), ".ap ignores views, so call it on the tensor itself", self.storage)
        _require(offset is not None, "pass offset= explicitly: the documentation disagrees about its default")
        _require(dtype is None, "dtype= of .ap is outside the supported part")
        _require(scalar_offset is None or vector_offset is None, "scalar_offset and vector_offset exclude each other")
        _require(1 <= len(pattern) <= 5 and all(len(pair) == 2 for pair in pattern), f"bad pattern {pattern}")
        _require(all(step >= 0 and num >= 1 for step, num in pattern), f"bad pattern {pattern}")
        if self.buffer in ON_CHIP:
            row = math.prod(base.shape[1:])
            _require(pattern[0][0] == row, f"first step on chip must be {row}, the partition's size", self.storage)
            _require(all(max(pair) < STEP_LIMIT for pair in pattern), f"16-bit steps and sizes on chip: {pattern}")
        last = offset + sum(step * (num - 1) for step, num in pattern)
        if vector_offset is not None:
            return self._gather(pattern, offset, vector_offset, indirect_dim)
        _require(offset >= 0 and last < base.size, f"pattern {pattern} at {offset} leaves the tensor", self.storage)
        moved, in_bounds = 0, True
        if scalar_offset is not None:
            value = _scalar(scalar_offset)
            moved = value * math.prod(base.shape[indirect_dim + 1 :])
            in_bounds = 0 <= value < base.shape[indirect_dim] and last + moved < base.size
            moved = moved if in_bounds else 0
        shape = [num for _, num in pattern]

        def view(array):
            strides = [step * array.itemsize for step, _ in pattern]
            return np.lib.stride_tricks.as_strided(array.reshape(-1)[offset + moved :], shape, strides)

        state = None if self.state is None else view(self.storage.state)
        tensor = NkiTensor(self.storage, view(base), state)
        tensor.in_bounds = in_bounds
        return tensor

    def _gather(self, pattern, offset, vector_offset, indirect_dim):
        base = self.storage.array
        width = math.prod(base.shape[1:])
        _require(self.buffer not in ON_CHIP and indirect_dim == 0, "vector_offset: rows (dim 0) of an HBM tensor")
        _require(len(pattern) == 2 and pattern[0][0] == width and pattern[1][0] == 1, f"gather whole rows: {pattern}")
        (_, n_rows), (_, n_columns) = pattern
        _require(offset + n_columns <= width, f"columns {offset}..{offset + n_columns} of rows of {width}")
        _require(vector_offset.shape == (n_rows, 1), f"{n_rows} rows need an index tile [{n_rows}, 1]")
        _require(n_rows == 1 or n_rows % 16 == 0, f"a gather takes 1 row or a multiple of 16, not {n_rows}")
        columns = np.s_[:, offset : offset + n_columns]
        state = None if self.state is None else self.storage.state.reshape(-1, width)[columns]
        tensor = NkiTensor(self.storage, base.reshape(-1, width)[columns], state)
        tensor.rows = _index_values(vector_offset).reshape(-1)
        return tensor


class VirtualRegister:
    """A 32-bit register. Its value exists on the device only, so Python may not compute or decide with it."""

    def __init__(self, state=None, frozen=False):
        self._value, self._frozen = state, frozen


def _no_python_value(name):
    def method(self, *_):
        raise TypeError(f"a device register has no {name} while the kernel is traced: use it as scalar_offset or bound")

    return method


_ARITHMETIC = "int index bool float add radd sub rsub mul rmul floordiv mod neg eq ne lt le gt ge hash iter"
for _name in _ARITHMETIC.split():
    setattr(VirtualRegister, f"__{_name}__", _no_python_value(f"__{_name}__"))


def _index_values(tile: NkiTensor) -> np.ndarray:
    _require(tile.buffer is MemoryRegion.sbuf and tile.dtype == INT32, "index tiles are int32 in SBUF")
    return _read(tile)


def _scalar(source) -> int:
    """The value of a register or of a one-element int32 tile."""
    if isinstance(source, VirtualRegister):
        _require(source._value is not None, "register read before it was loaded")
        return source._value
    _require(source.shape == (1, 1), f"a scalar offset is a register or a (1, 1) tile, not {source.shape}")
    return int(_index_values(source)[0, 0])


def _check_use(t: NkiTensor) -> None:
    _require(not t.storage.dead, "allocated in a loop body and used after that iteration", t.storage)
    if t.buffer is MemoryRegion.psum:
        same = t.storage.loop == _running().loop
        _require(same, "PSUM may not cross the edge of a device loop, allocate it inside the body", t.storage)
    if t.buffer in ON_CHIP:
        n, start = t.shape[0], t.start_partition
        allowed = (0,) if n > 64 else (0, 64) if n > 32 else (0, 32, 64, 96)
        _require(start in allowed, f"{n} partitions may start at {allowed}, not {start}", t.storage)


def _read(t: NkiTensor) -> np.ndarray:
    """The data of a tensor that is about to be used: it must have been written, in HBM by this same program."""
    _check_use(t)
    if t.state is not None:
        _require(bool((t.state != UNWRITTEN).all()), "reads memory that nothing wrote", t.storage)
        mine = t.buffer in ON_CHIP or bool((t.state == 1 + _running().program).all())
        _require(mine, "reads what the other core wrote, without a barrier", t.storage)
    return t.data


def _write(t: NkiTensor, values: np.ndarray | None, by: int = WRITTEN) -> None:
    """Store values (None: counting only), converted as the engines do: floats by rounding, ints saturating."""
    _check_use(t)
    _require(not t.storage.read_only, "kernels here never write their inputs", t.storage)
    if t.state is not None:
        if t.buffer not in ON_CHIP:
            by = 1 + _running().program
            mine = bool(((t.state == UNWRITTEN) | (t.state == by)).all())
            _require(mine, "both cores write the same rows", t.storage)
        t.state[...] = by
    if values is not None:
        t.data[...] = _cast(values, t.dtype)


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if values.dtype == dtype:
        return values
    values = values.astype(np.float32)
    if dtype.kind in "iu":
        values = np.clip(np.rint(values.astype(np.float64)), np.iinfo(dtype).min, np.iinfo(dtype).max)
    return values.astype(dtype)


def ndarray(shape, dtype, buffer=MemoryRegion.sbuf, name="", address=None):
    """Uninitialised memory: NaN in floats, a huge negative number in ints, and every element marked unwritten."""
    core, shape, dtype = _running(), tuple(shape), np.dtype(dtype)
    _require(isinstance(buffer, MemoryRegion), f"buffer must be one of nl.sbuf, psum, shared_hbm..., not {buffer!r}")
    _require(address is None, "leave address= to the compiler")
    _require(len(shape) >= 1 and all(isinstance(n, int) and n > 0 for n in shape), f"bad shape {shape}")
    if buffer in ON_CHIP:
        _require(len(shape) >= 2 and shape[0] <= PARTITIONS, f"on chip: [partitions <= 128, ...], not {list(shape)}")
    if buffer is MemoryRegion.shared_hbm and core.program > 0:
        return _same_output(core, shape, dtype)
    tracked = core.numerics or dtype.kind in "iu"
    poison = np.nan if dtype.kind not in "iu" else INT_POISON
    array = np.full(shape, poison, dtype) if tracked else np.empty(shape, dtype)
    storage = Storage(array, np.zeros(shape, np.int8) if tracked else None, buffer, name, core)
    if buffer in ON_CHIP:
        core.allocate(storage)
        core.born.append(weakref.ref(storage))
    elif buffer is MemoryRegion.shared_hbm:
        core.outputs.append(storage)
    return NkiTensor(storage, storage.array, storage.state)


def _same_output(core: Core, shape, dtype) -> NkiTensor:
    """Shared HBM is one memory: the second program gets what the first one allocated at this point."""
    _require(len(core.outputs) < len(core.shared), "the programs allocate different shared_hbm tensors")
    storage = core.shared[len(core.outputs)]
    same = (storage.array.shape, storage.array.dtype) == (shape, dtype)
    _require(same, f"the programs allocate different shared_hbm tensors: {list(shape)} against {storage}")
    core.outputs.append(storage)
    return NkiTensor(storage, storage.array, storage.state)


# ------------------------------------------------------------------------------------------------------------------
# Instructions
# ------------------------------------------------------------------------------------------------------------------


def _elements(t: NkiTensor) -> int:
    """Elements per partition: what one lane of an engine walks through."""
    return math.prod(t.shape[1:])


def _check_lanes(name: str, dst: NkiTensor, *sources: NkiTensor) -> None:
    for t in (dst, *sources):
        _require(isinstance(t, NkiTensor) and t.buffer in ON_CHIP, f"{name} works on SBUF and PSUM only, not {t}")
        _require(t.shape[0] == dst.shape[0], f"{name}: {t.shape[0]} and {dst.shape[0]} partitions")
        _require(_elements(t) == _elements(dst), f"{name} does not broadcast: {t.shape} and {dst.shape}")


def _check_scale(name: str, operand, partitions: int) -> None:
    """A scalar operand is a Python number or an fp32 column; the compiler refuses other dtypes."""
    if isinstance(operand, NkiTensor):
        _require(operand.shape == (partitions, 1), f"{name}: the scale tile must be [{partitions}, 1]")
        _require(operand.dtype == FLOAT32, f"{name}: the scale tile must be float32, not {operand.dtype}")
        _require(operand.buffer in ON_CHIP, f"{name}: the scale tile must be on chip")
    else:
        _require(isinstance(operand, (int, float)), f"{name}: scale must be a number or a tile, not {operand!r}")


def _f32(operand) -> np.ndarray | float:
    """fp32 values of a tensor as [P, F], or the number itself."""
    if not isinstance(operand, NkiTensor):
        return operand
    return _read(operand).astype(np.float32).reshape(operand.shape[0], -1)


def _compute(name: str, dst: NkiTensor, sources: tuple, function, **counts) -> None:
    """Every Vector and Scalar instruction: check the sources, compute in fp32, round once at the write."""
    core = _running()
    core.issue(name, dst, *(s for s in sources if isinstance(s, NkiTensor)), **counts)
    if core.numerics or dst.dtype.kind in "iu":
        with np.errstate(over="ignore", invalid="ignore"):
            _write(dst, function(*(_f32(s) for s in sources)).astype(np.float32).reshape(dst.shape))
    else:
        _write(dst, None)


def _vector_cycles(dst: NkiTensor, *tiles: NkiTensor) -> float:
    """Cycles per the trn2 guide: bf16 in SBUF runs faster, two fp32 inputs from SBUF run at half speed."""
    all_bf16 = all(t.dtype == BFLOAT16 for t in (dst, *tiles))
    in_psum = any(t.buffer is MemoryRegion.psum for t in (dst, *tiles))
    if len(tiles) == 2:
        per_element = 0.5 if all_bf16 and not in_psum else 1 if in_psum else 2
    else:
        per_element = (0.5 if in_psum else 0.25) if all_bf16 else 1
    return per_element * _elements(tiles[0] if tiles else dst)


def _engine_counts(name: str, which: Engine, dst: NkiTensor, *tiles: NkiTensor) -> dict[str, float]:
    if which is Engine.scalar:
        return {"scalar_cycles": _elements(dst), "scalar_instructions": 1}
    _require(which is Engine.vector, f"{name}: choose engine vector or scalar here, not {which}")
    return {"vector_cycles": _vector_cycles(dst, *tiles)}


def memset(dst, value, engine=Engine.unknown, name=None):
    _check_lanes("memset", dst)
    is_int = dst.dtype.kind in "iu"
    _require(isinstance(value, int if is_int else float), f"memset of {dst.dtype} with {value!r}: types must match")
    _compute("memset", dst, (), lambda: np.full(dst.shape, value, np.float32), **_engine_counts("memset", engine, dst))


def tensor_copy(dst, src, engine=Engine.unknown, name=None):
    _check_lanes("tensor_copy", dst, src)
    _compute("tensor_copy", dst, (src,), lambda a: a, **_engine_counts("tensor_copy", engine, dst, src))


def activation(
    dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=ReduceCmd.idle, name=None
):
    _check_lanes("activation", dst, data)
    _require(op in (copy, silu, silu_dx), f"activation: {op} is not supported here")
    unused = bias is None and reduce_op is None and reduce_res is None
    _require(unused, "activation: bias and reduction are outside the supported part")
    _check_scale("activation", scale, dst.shape[0])
    counts = _engine_counts("activation", Engine.scalar, dst)
    _compute("activation", dst, (data, scale), lambda a, s: op(a * s), **counts)


def tensor_tensor(dst, data1, data2, op, engine=Engine.unknown, name=None):
    _check_lanes("tensor_tensor", dst, data1, data2)
    _check_not_both_psum("tensor_tensor", data1, data2)
    counts = _engine_counts("tensor_tensor", engine, dst, data1, data2)
    _require("vector_cycles" in counts, "tensor_tensor does not run on the Scalar engine")
    _compute("tensor_tensor", dst, (data1, data2), op, **counts)


def _check_not_both_psum(name: str, a: NkiTensor, b: NkiTensor) -> None:
    both = a.buffer is MemoryRegion.psum and b.buffer is MemoryRegion.psum
    _require(not both, f"{name}: both inputs are in PSUM, at most one may be")


def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    _check_lanes("scalar_tensor_tensor", dst, data, operand1)
    _require(not reverse0 and not reverse1, "scalar_tensor_tensor: reversed operands are outside the supported part")
    _check_not_both_psum("scalar_tensor_tensor", data, operand1)
    _check_scale("scalar_tensor_tensor", operand0, dst.shape[0])
    counts = {"vector_cycles": _vector_cycles(dst, data, operand1)}
    _compute("scalar_tensor_tensor", dst, (data, operand0, operand1), lambda a, s, b: op1(op0(a, s), b), **counts)


def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    _require(dst.buffer in ON_CHIP and data.buffer in ON_CHIP, "tensor_reduce works on SBUF and PSUM only")
    _require(op is add and not negate, "tensor_reduce: only nl.add is supported here")
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    n_dims = len(data.shape)
    trailing = axes == tuple(range(n_dims - len(axes), n_dims)) and 0 not in axes
    _require(trailing, f"tensor_reduce: axis {axis} must be the last free dims of {data.shape}")
    kept = math.prod(data.shape[1 : n_dims - len(axes)])
    _require(dst.shape[0] == data.shape[0] and _elements(dst) == kept, f"tensor_reduce: {data.shape} into {dst.shape}")
    counts = {"vector_cycles": _elements(data)}
    _compute("tensor_reduce", dst, (data,), lambda a: a.reshape(a.shape[0], kept, -1).sum(2), **counts)


def nc_matmul(
    dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False, is_transpose=False,
    accumulate=None, tile_position=(), tile_size=(), perf_mode=MatmulPerfMode.none, name=None,
):  # fmt: skip
    """dst[M, N] = (accumulate: +=) stationary[K, M].T @ moving[K, N], in fp32."""
    core = _running()
    special = is_stationary_onezero or is_moving_onezero or is_transpose or tile_position or tile_size
    _require(
        not special and perf_mode is MatmulPerfMode.none, "nc_matmul: special modes are outside the supported part"
    )
    for t, role in ((stationary, "stationary"), (moving, "moving")):
        _require(t.buffer is MemoryRegion.sbuf, f"nc_matmul: {role} must be in SBUF")
        _require(t.dtype in (BFLOAT16, FLOAT32), f"nc_matmul: {role} must be bf16 or fp32", t.storage)
    _require(stationary.dtype == moving.dtype, "nc_matmul: fp32 pairs with fp32 only")
    _require(len(stationary.shape) == 2, "nc_matmul: stationary with several free dims gives wrong products on trn2")
    (K, M), N = stationary.shape, _elements(moving)
    _require(moving.shape[0] == K <= MATMUL_K, f"nc_matmul: contraction of {K} and {moving.shape[0]}, at most 128")
    _require(M <= MATMUL_M and N <= MATMUL_N, f"nc_matmul: M = {M}, N = {N}; at most {MATMUL_M} and {MATMUL_N} on trn2")
    _check_psum_result("nc_matmul", dst, (M, N), FLOAT32)
    _require(isinstance(accumulate, bool), "nc_matmul: pass accumulate=True or False; None adds onto reused tiles")
    if accumulate and dst.state is not None:
        _require(bool((dst.state == BY_MATMUL).all()), "nc_matmul: accumulates onto PSUM that no matmul wrote")
    slow = 1 if stationary.dtype == BFLOAT16 else 4
    core.issue("nc_matmul", dst, stationary, moving, matmul_cycles=max(N, MATMUL_MIN_CYCLES) * slow)
    core.log[-1] += (accumulate,)
    product = _f32(stationary).T @ _f32(moving) if core.numerics else None
    _write(dst, dst.data + product if accumulate and core.numerics else product, by=BY_MATMUL)


def _check_psum_result(name: str, dst: NkiTensor, shape: tuple[int, int], dtype: np.dtype) -> None:
    _require(dst.buffer is MemoryRegion.psum, f"{name}: dst must be in PSUM")
    if dst.dtype != dtype:
        raise NkiValidationError(f"{name}: dst must be {dtype}, not {dst.dtype}")
    _require((dst.shape[0], _elements(dst)) == shape, f"{name}: dst is {dst.shape}, the result {shape}")
    # A tile starts at a bank; the first partition of the view gives its byte range inside the tile.
    begin = dst.data.__array_interface__["data"][0] - dst.storage.array.__array_interface__["data"][0]
    begin %= dst.storage.bytes_per_partition
    size = sum((n - 1) * s for n, s in zip(dst.data.shape[1:], dst.data.strides[1:], strict=True)) + dst.data.itemsize
    inside = begin // BANK_BYTES == (begin + size - 1) // BANK_BYTES
    _require(inside, f"{name}: the result crosses a PSUM bank (2 KiB per partition)")


def nc_transpose(dst, data, engine=Engine.unknown, name=None):
    core = _running()
    _require(engine in (Engine.unknown, Engine.tensor), "nc_transpose: Tensor engine only here")
    _require(data.buffer is MemoryRegion.sbuf and len(data.shape) == 2, "nc_transpose: data is 2-D in SBUF")
    rows, columns = data.shape
    _require(rows <= 128 and columns <= 128, f"nc_transpose: at most 128 x 128, not {data.shape}")
    _check_psum_result("nc_transpose", dst, (columns, rows), data.dtype)
    core.issue("nc_transpose", dst, data, transpose_cycles=max(rows, MATMUL_MIN_CYCLES))
    _write(dst, _read(data).T if core.numerics else None)


def dma_copy(
    dst, src, priority=None, oob_mode=OobMode.error, dge_mode=DgeMode.unknown, engine=Engine.unknown, name=None
):
    """Move, converting dtypes; src may gather rows. Out of bounds is an error, or skipped: dst keeps what it had."""
    core, skip = _running(), oob_mode is OobMode.skip
    for t, role in ((dst, "dst"), (src, "src")):
        _require(t.buffer is not MemoryRegion.psum, f"dma_copy: {role} is in PSUM, copy it to SBUF first")
    _require(priority is None and engine is Engine.unknown, "dma_copy: priority and engine are outside the part here")
    _require(dge_mode is DgeMode.unknown, "dma_copy: leave dge_mode to the compiler")
    _require(math.prod(dst.shape) == math.prod(src.shape), f"dma_copy: {src.shape} into {dst.shape}")
    _require(dst.rows is None, "dma_copy: scatter is outside the supported part")
    in_bounds = dst.in_bounds and src.in_bounds
    _require(in_bounds or skip, f"dma_copy: scalar_offset outside {src.storage if dst.in_bounds else dst.storage}")
    moved = math.prod(dst.shape) if in_bounds else 0
    if src.rows is not None:
        moved = _gather_rows(dst, src, skip) * math.prod(src.shape[1:])
    elif in_bounds:
        integers = dst.dtype.kind in "iu"
        _write(dst, _read(src).reshape(dst.shape) if core.numerics or integers else None)
    hbm = [t for t in (dst, src) if t.buffer not in ON_CHIP]
    core.issue(
        "dma_copy",
        dst,
        src,
        dma_copies=1,
        gathers=int(src.rows is not None),
        hbm_bytes=moved * sum(t.dtype.itemsize for t in hbm),
        descriptors=moved // max(1, min(_contiguous(t) for t in (dst, src))),
    )


def _gather_rows(dst: NkiTensor, src: NkiTensor, skip: bool) -> int:
    """Copy the rows that exist, leave dst alone for the others; returns how many were copied."""
    exists = (src.rows >= 0) & (src.rows < src.data.shape[0])
    _require(skip or bool(exists.all()), f"dma_copy: row index outside {src.storage}")
    _require(dst.buffer is MemoryRegion.sbuf, "dma_copy: a gather goes to SBUF")
    if _running().numerics:
        rows = src.rows[exists]
        values = _read(NkiTensor(src.storage, src.data[rows], None if src.state is None else src.state[rows]))
        _check_use(dst)
        dst.state[exists] = WRITTEN
        dst.data[exists] = _cast(values, dst.dtype)
    return int(exists.sum())


def _contiguous(t: NkiTensor) -> int:
    """Elements in one contiguous run, inside one partition: what one DMA descriptor can move."""
    run, first_dim = 1, int(t.buffer in ON_CHIP or t.rows is not None)
    for n, stride in reversed(list(zip(t.data.shape, t.data.strides, strict=True))[first_dim:]):
        if n > 1 and stride != run * t.data.itemsize:
            break
        run *= n
    return run


# ------------------------------------------------------------------------------------------------------------------
# Registers, loops, programs
# ------------------------------------------------------------------------------------------------------------------


def register_alloc(x=None):
    _running().issue("register_alloc")
    return VirtualRegister(x)


def register_load(dst, src):
    _require(not dst._frozen, "a loop variable is read-only")
    dst._value = _scalar(src)
    _running().issue("register_load", src)


def fori_loop(lower, upper, body_fun, step=1):
    """Call body_fun(register) for lower, lower + step, ... < upper. What the body allocates dies with each trip."""
    core = _running()
    _require(core.loop is None, "nested device loops are not safe on any known release")
    _require(isinstance(step, int) and step > 0, "fori_loop: step is a positive Python int")
    core.dynamic_trips |= any(isinstance(bound, VirtualRegister) for bound in (lower, upper))
    trips = range(*(_scalar(b) if isinstance(b, VirtualRegister) else b for b in (lower, upper)), step)
    core.loops += 1
    core.log.append(("fori_loop", len(trips)))
    for trip in trips:
        core.loop, core.born = core.loops, []
        _require(body_fun(VirtualRegister(trip, frozen=True)) is None, "fori_loop: the body returns nothing")
        for storage in filter(None, (reference() for reference in core.born)):
            storage.dead = True
    core.loop = None


def program_id(axis=0):
    return _running().program


def num_programs(axes=0):
    return _running().programs


def shared_identity_matrix(n, dtype=np.uint8, dst=None):
    _require(dst is None, "shared_identity_matrix: dst is outside the supported part")
    identity = ndarray((n, n), dtype)
    _write(identity, np.eye(n, dtype=np.float32))
    return identity


# ------------------------------------------------------------------------------------------------------------------
# Kernels
# ------------------------------------------------------------------------------------------------------------------

# The statements and expressions of the documented kernel language (NKI language guide): no try, with, while, lambda,
# comprehensions, generators, `is`, `in`, sets or dicts, and plain positional parameters.
_LANGUAGE = (
    *(ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For, ast.If, ast.Expr),
    *(ast.Assert, ast.Pass, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Slice),
    *(ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.JoinedStr),
    *(ast.FormattedValue, ast.operator, ast.unaryop, ast.boolop, ast.expr_context),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


@functools.cache
def check_language(function: types.FunctionType) -> None:
    """Compare the source of a kernel, and of the helpers it names, with the documented subset of Python."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    for node in ast.walk(definition):
        where = f"{function.__name__}, line {getattr(node, 'lineno', '?')}"
        _require(isinstance(node, _LANGUAGE), f"{where}: {type(node).__name__} is not in the kernel language")
        if isinstance(node, ast.FunctionDef):
            extra = node.args.kwonlyargs or node.args.vararg or node.args.kwarg
            _require(not extra, f"{where}: keyword-only and variadic parameters do not compile")
            _require(node is definition or not node.decorator_list, f"{where}: no decorators inside a kernel")
        if isinstance(node, ast.Name):
            helper = function.__globals__.get(node.id)
            _require(not isinstance(helper, Kernel) or node.id == function.__name__, f"{where}: a helper has @nki.jit")
            if isinstance(helper, types.FunctionType) and helper.__module__ == function.__module__:
                check_language(helper) if helper is not function else None


_DTYPES = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32, torch.int32: INT32}


def _from_torch(argument):
    """A tensor becomes a read-only HBM tensor without a copy; numbers, strings and tuples are constants."""
    if not isinstance(argument, torch.Tensor):
        _require(not isinstance(argument, (list, dict, set)), "kernel arguments: tensors, numbers, strings, tuples")
        return argument
    _require(argument.dtype in _DTYPES, f"kernel arguments are bfloat16, float32 or int32, not {argument.dtype}")
    _require(argument.is_contiguous() and argument.device.type == "cpu", "kernel arguments are contiguous CPU tensors")
    dtype = _DTYPES[argument.dtype]
    bits = argument.detach().view({2: torch.int16, 4: torch.int32}[dtype.itemsize]).numpy()
    storage = Storage(bits.view(dtype), None, MemoryRegion.shared_hbm, "(input)", _running())
    storage.read_only = True
    return NkiTensor(storage, storage.array, None)


def _to_torch(t: NkiTensor) -> torch.Tensor:
    dtype = next(key for key, value in _DTYPES.items() if value == t.dtype)
    return torch.from_numpy(t.data.view({2: np.int16, 4: np.int32}[t.dtype.itemsize])).view(dtype)


def _check_output(t: NkiTensor, core: Core) -> None:
    _require(isinstance(t, NkiTensor) and t._is_base(), "a kernel returns tensors it allocated, not views")
    _require(t.buffer is MemoryRegion.shared_hbm, "outputs live in nl.shared_hbm", t.storage)
    if t.state is not None:
        is_written = (t.state != UNWRITTEN).reshape(t.shape[0], -1)
        whole, untouched = is_written.all(1), ~is_written.any(1)
        _require(bool((whole | untouched).all()), "output partly unwritten", t.storage)
        _require(bool(whole.all()) or core.dynamic_trips, "output not written", t.storage)


class Kernel:
    """A jitted kernel. `kernel[2](*tensors)` runs both programs of LNC=2, one after the other."""

    def __init__(self, function, grid: int = 1):
        self.function, self.grid = function, grid
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: int) -> "Kernel":
        _require(grid in (1, 2), f"a logical core of trn2 has 1 or 2 physical cores, not {grid}")
        return Kernel(self.function, grid)

    def __call__(self, *args):
        global _core
        check_language(self.function)
        _require(_core is None, "a kernel does not call a kernel")
        cores = []
        try:
            for program in range(self.grid):
                _core = Core(program, self.grid, _numerics, shared=cores[0].outputs if cores else [])
                returned = self.function(*(_from_torch(a) for a in args))
                cores.append(_core)
        finally:
            _core = None
        for a, b in itertools.zip_longest(cores[0].log, cores[-1].log):
            if a != b:
                raise NkiValidationError(f"the two programs differ: {a} against {b}")
        outputs = returned if isinstance(returned, tuple) else (returned,)
        for t in outputs:
            _check_output(t, cores[0])
        if _records is not None:
            _records.append(Run(self.function.__name__, cores))
        outputs = tuple(_to_torch(t) for t in outputs)
        return outputs if isinstance(returned, tuple) else outputs[0]


def jit(fn=None, **kwargs):
    _require(not kwargs, f"nki.jit options are not used here: {kwargs}")
    return Kernel(fn) if fn is not None else jit


language = types.SimpleNamespace(
    **{region.name: region for region in MemoryRegion},
    **{"bfloat16": BFLOAT16, "float32": FLOAT32, "int32": INT32},
    **{f.__name__: f for f in (ndarray, fori_loop, program_id, num_programs, shared_identity_matrix)},
    **{f.__name__: f for f in (add, multiply, copy, silu, silu_dx)},
)
isa = types.SimpleNamespace(
    **{e.__name__: e for e in (Engine, DgeMode, OobMode, ReduceCmd, MatmulPerfMode)},
    **{f.__name__: f for f in (dma_copy, memset, tensor_copy, activation, tensor_tensor)},
    **{f.__name__: f for f in (scalar_tensor_tensor, tensor_reduce, nc_matmul, nc_transpose)},
    **{f.__name__: f for f in (register_alloc, register_load)},
)
