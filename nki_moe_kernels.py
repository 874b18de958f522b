"""The routed experts of Qwen3-MoE as NKI kernels for trn2: forward and backward, with a PyTorch reference of each.

    python nki_moe_kernels.py                # cost report for Qwen3-30B-A3B at TP 4, on any CPU
    python nki_moe_kernels.py --help         # every size of the report can be changed

One rank holds E experts at full width. For each of its T tokens it computes

    out[t] = sum over the token's local experts e of  weight * ((silu(x[t] @ w1[e].T) * (x[t] @ w3[e].T)) @ w2[e].T)

How it is done, with static shapes whatever the routing:

    build_slots           PyTorch  (token, expert) pairs -> blocks of B slots, every block owned by one expert
    experts_forward       kernel   each block: gather token rows, gate and up, SiLU, down, times the router weight
    experts_backward      kernel   each block: gradients of the rows, of gate and up, and of the router weights
    weight_gradients      kernel   each expert: dw1, dw2, dw3 summed over its blocks in fp32, rounded once
    combine               kernel   each token: the sum of its slot rows (forward output, and dX in the backward)
    expert_layer          all of it as one differentiable operator

One kernel source runs in three places: on Trainium, in the simulator of the official `nki` package, and, when that
package is absent, in `tools/nki_interpreter.py`. Nothing here has run on a device or in the official simulator yet. To
use the simulator where the package is installed (not run here):

    NKI_SIMULATOR=1 NEURON_PLATFORM_TARGET_OVERRIDE=trn2 pytest tests/test_nki_moe_kernels.py

`NKI_STAND_IN=1` forces the stand-in although the official package is there (the cost report needs the stand-in).

Legend of the shape suffixes (sizes of one rank; a digit is a literal size):
    T tokens    K experts per token (top-k)   R tokens rounded up to 256, so both cores combine whole tiles
    E experts   H hidden                      I expert width              F = E + 1      L = T * K pairs
    N blocks    B slots per block             S = N * B slots             P 128 partitions, J tiles of 128 slots
    C cores     W visits of both walks        V columns of a visit        M, D any row count and length
"""

import argparse
import importlib.util
import itertools
import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def _import_nki():
    """The official package if it is the real one, else the stand-in. PyPI's `nki` 0.0.1 is a placeholder."""
    if os.environ.get("NKI_STAND_IN") != "1":
        try:
            import nki
            import nki.isa
            import nki.language

            if hasattr(nki.isa, "nc_matmul"):
                return nki, True
        except Exception:  # absent, or a placeholder that raises what it likes: resolve_backend says so
            pass
    from tools import nki_interpreter

    return nki_interpreter, False


nki, NKI_IS_REAL = _import_nki()
nl, nisa = nki.language, nki.isa

P = 128  # partitions of SBUF and PSUM: rows of every tile
BANK = 512  # fp32 columns of one PSUM bank: the widest result of one matmul on trn2 (nl.tile_size.psum_bank_fmax)
CORES = 2  # physical cores of one logical core (LNC=2), the only setting on trn2 with 64 ranks per instance
BLOCK_TOKENS = (128, 256, 512, 1024)
SBUF_BYTES = 224 * 1024 - 16384 - 8 - 520  # usable per partition: what nkilib's blockwise MoE backward budgets
BACKENDS = ("nki", "simulate", "interpret", "reference")


# ------------------------------------------------------------------------------------------------------------------
# What may run, and where
# ------------------------------------------------------------------------------------------------------------------


def resolve_backend(kernels: str, device_type: str) -> str:
    """Turn `[nki] kernels` into one of BACKENDS, or say why it cannot run here. Never falls back silently.

    auto       the NKI kernels on a Neuron device (or an error), the PyTorch reference elsewhere
    nki        the NKI kernels; needs a Neuron device, the official `nki` and `torch_neuronx.nki_op`
    simulate   the official simulator on CPU; needs the official `nki` and two environment variables (see top of file)
    interpret  `tools/nki_interpreter.py` on CPU
    reference  plain PyTorch on CPU or CUDA (it reads block ranges on the host, so it cannot run on Neuron)
    """
    if kernels not in ("auto", *BACKENDS):
        raise ValueError(f"[nki] kernels = {kernels!r}: choose one of auto, {', '.join(BACKENDS)}")
    on_neuron = device_type == "neuron"
    if kernels == "auto":
        kernels = "nki" if on_neuron else "reference"
    if (kernels == "nki") != on_neuron:
        allowed = "auto or nki" if on_neuron else "auto, simulate, interpret or reference"
        raise RuntimeError(f"[nki] kernels = {kernels!r} cannot run on {device_type!r}: set it to {allowed}")
    if kernels in ("nki", "simulate") and not NKI_IS_REAL:
        raise RuntimeError(
            f"[nki] kernels = {kernels!r} needs the official nki package, and none can be imported "
            "(nki 0.0.1 on PyPI is an empty placeholder). Install it from the Neuron package repository: "
            'pip install "torch-neuronx==2.14.*" nki --extra-index-url https://pip.repos.neuron.amazonaws.com'
        )
    if kernels == "nki" and not OPERATORS_ARE_NKI:
        raise RuntimeError(
            "[nki] kernels = 'nki' needs torch_neuronx with nki_op (torch-neuronx 2.14.*): it is what makes a kernel "
            "a PyTorch operator. Upgrade torch-neuronx; the torch-xla era releases do not have it"
        )
    environment = {"NKI_SIMULATOR": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    if kernels == "simulate" and any(os.environ.get(name) != value for name, value in environment.items()):
        raise RuntimeError(
            "[nki] kernels = 'simulate': set NKI_SIMULATOR=1, so that kernels run in the simulator, and "
            "NEURON_PLATFORM_TARGET_OVERRIDE=trn2, or it checks the limits of another chip"
        )
    if kernels == "interpret" and NKI_IS_REAL:
        raise RuntimeError(
            "[nki] kernels = 'interpret': the official nki is installed and the kernels are bound to it. "
            "Use 'simulate', or set NKI_STAND_IN=1"
        )
    return kernels


def check_shapes(
    n_tokens: int, hidden: int, expert_width: int, n_experts: int, n_local_experts: int, top_k: int, block_tokens: int
) -> None:
    """Refuse, by name and before anything runs, what the kernels cannot do. Every backend has the same limits."""

    def refuse(what: str, allowed: str) -> None:
        raise ValueError(f"NKI expert kernels: {what}; {allowed}")

    sizes = {"n_tokens": n_tokens, "n_local_experts": n_local_experts, "top_k": top_k}
    for name, value in sizes.items():
        if value < 1:
            refuse(f"{name} = {value}", "it must be at least 1")
    for name, value in {"n_local_experts": n_local_experts, "top_k": top_k}.items():
        if value > n_experts:
            refuse(f"{name} = {value} with n_experts = {n_experts}", "it cannot exceed the number of experts")
    if block_tokens not in BLOCK_TOKENS:
        refuse(f"block_tokens = {block_tokens}", f"choose one of {', '.join(map(str, BLOCK_TOKENS))}")
    for name, value in {"hidden": hidden, "expert_width": expert_width}.items():
        if value < P or value % P:
            refuse(f"{name} = {value}", f"it must be a multiple of {P}, the partitions of the tensor engine")
    for kernel, needed in sbuf_bytes(hidden, expert_width, top_k, block_tokens).items():
        if needed > SBUF_BYTES:
            refuse(
                f"{kernel} with hidden = {hidden}, expert_width = {expert_width}, block_tokens = {block_tokens} needs "
                f"{needed:,} bytes of SBUF per partition",
                f"trn2 has {SBUF_BYTES:,}. Use smaller blocks if the sizes are yours to choose, else another path",
            )
    # Dynamic offsets inside one HBM tensor are 32-bit byte offsets (device_facts#nki-offsets).
    slots = num_blocks(n_tokens, top_k, n_local_experts, n_experts, block_tokens) * block_tokens
    largest = 2 * max(slots * max(hidden, expert_width), n_local_experts * hidden * expert_width)
    if largest >= 2**32:
        refuse(f"the largest tensor of one layer has {largest:,} bytes", "the limit is 4 GiB: fewer tokens or experts")


def sbuf_bytes(hidden: int, expert_width: int, top_k: int, block_tokens: int) -> dict[str, int]:
    """Most bytes of SBUF that each kernel holds at once, per partition (a test compares with what is measured)."""
    H, I, J = hidden, expert_width, block_tokens // P
    weights, tables = 3 * H * I // P * 2, 256 + 8 * J
    return {  # weights or sums; zero row; tensors of the block; tensors of the tile, the next one's included
        "experts_forward": weights + 2 * H + J * (6 * I + 2 * H) + max(6 * H + 4 * I, 4 * H + 8 * I) + tables,
        "experts_backward": weights + 2 * H + J * (10 * I + 2 * H) + max(6 * H + 18 * I, 4 * H + 28 * I) + tables,
        "weight_gradients": 2 * weights + 2 * H + J * (4 * H + 6 * I) + tables,
        "combine": 2 * H + (top_k + 1) * 2 * H + 2 * P + 4 * top_k + tables,
    }


def num_blocks(n_tokens: int, top_k: int, n_local_experts: int, n_experts: int, block_tokens: int) -> int:
    """Static number of blocks that any routing fits into.

    An expert with c pairs owns max(1, ceil(c / B)) <= c // B + 1 blocks, a token has at most min(K, E) local pairs,
    and one spare block of padding always remains, so that both cores can make the same number of visits.
    """
    assert n_local_experts <= n_experts
    pairs = n_tokens * min(top_k, n_local_experts)
    return pairs // block_tokens + n_local_experts + 1


def slot_bytes(
    n_tokens: int, hidden: int, expert_width: int, n_experts: int, n_local_experts: int, top_k: int, block_tokens: int
) -> dict[str, int]:
    """Bytes of one layer's slot tensors, in bf16, for the dry run. A dropless layer must reserve the worst routing.

    saved      gate and up of each slot, from the forward to the backward of the layer (with activation checkpointing:
               only while that layer runs backward)
    forward    on top of `saved` while the forward runs: the slot outputs before they are combined
    backward   while the backward runs: dX, dgate, dup and the weighted activation of each slot
    """
    slots = num_blocks(n_tokens, top_k, n_local_experts, n_experts, block_tokens) * block_tokens
    return {
        "saved": slots * 2 * expert_width * 2,
        "forward": slots * hidden * 2,
        "backward": slots * (hidden + 3 * expert_width) * 2,
    }


# ------------------------------------------------------------------------------------------------------------------
# Slots: static tables from the routing
# ------------------------------------------------------------------------------------------------------------------

# Columns of a visit: the block; the expert whose weights to load before it (E: keep what is there) and to prefetch
# after it; the expert whose gradients are complete after it (E: none); 0 if it starts an expert, else 1; and the
# number of visits each core makes. Two unused columns make a row 32 bytes.
BLOCK, LOAD, NEXT, STORE, KEEP, TRIPS = range(6)
VISIT = 8
BLOCK_WALK, EXPERT_WALK = range(2)


class Slots(NamedTuple):
    """Where each (token, expert) pair lives, and in which order the two cores visit the blocks. int32 but one."""

    token_NB: Tensor  # row of x in each slot; -1 in a pad slot, which the kernels never read
    weight_NB: Tensor  # router weight of each slot (fp32, or fp64 from fp64), 0 in a pad slot; differentiable
    pair_slot_RK: Tensor  # slot of each pair; -1 if its expert is not local, and in the pad rows
    first_block_F: Tensor  # expert e owns blocks first_block[e] .. first_block[e + 1]; the last entry is the used count
    visits_WV: Tensor  # [2 walks, 2 cores, N visits] flattened: what each core does, in order. The block walk halves
    # the used blocks between the cores; the expert walk (weight gradients) gives each core whole experts, so that
    # nobody adds across cores. Both cores make equally many visits: unequal device loops hang.


def build_slots(
    topk_ids_TK: Tensor, topk_weights_TK: Tensor, first_expert: int, n_local_experts: int, block_tokens: int
) -> Slots:
    """Give every pair of a local expert (first_expert, first_expert + 1, ...) a slot in a block of its expert.

    topk_ids_TK      [T, K] integers; the ids of one token are distinct; an id outside the local range (another rank's
                     expert, or negative for a masked token) takes no slot and contributes nothing
    topk_weights_TK  [T, K] float; gradients flow through `weight_NB` back to it

    No sort: a pair's place inside its expert is a running count over a one-hot table. int32 and fp32 throughout
    (fp64 stays fp64): the device has no 64-bit arithmetic (device_facts#no-64-bit). Shapes depend on sizes only.
    """
    (T, K), E, B = topk_ids_TK.shape, n_local_experts, block_tokens
    if B not in BLOCK_TOKENS:
        raise ValueError(f"block_tokens = {B}: choose one of {', '.join(map(str, BLOCK_TOKENS))}")
    N = num_blocks(T, K, E, E, B)
    int32 = {"dtype": torch.int32, "device": topk_ids_TK.device}

    # Blocks per expert. B is a power of two: a shift divides exactly, where `//` may go through floats on the device.
    local_TK = topk_ids_TK.to(torch.int32) - first_expert
    is_local_TK = (local_TK >= 0) & (local_TK < E)
    one_hot_LE = (local_TK.reshape(-1, 1) == torch.arange(E, **int32)).to(torch.int32)  # L = T * K pairs
    running_LE = one_hot_LE.cumsum(0, dtype=torch.int32)
    blocks_E = ((running_LE[-1] + (B - 1)) >> (B.bit_length() - 1)).clamp(min=1)
    first_block_F = F.pad(blocks_E.cumsum(0, dtype=torch.int32), (1, 0))

    # Slot of each pair. Pairs without one go to the extra slot S, which is cut off again.
    slot_L = (one_hot_LE * (first_block_F[:-1] * B + running_LE - 1)).sum(1, dtype=torch.int32)
    slot_L = torch.where(is_local_TK.reshape(-1), slot_L, N * B)
    token_L = torch.arange(T, **int32).unsqueeze(1).expand(T, K).reshape(-1)
    token_S = torch.zeros(N * B + 1, **int32).index_add(0, slot_L, token_L + 1)[:-1] - 1
    weight_L = topk_weights_TK.reshape(-1).to(torch.promote_types(topk_weights_TK.dtype, torch.float32))
    weight_L = torch.where(is_local_TK.reshape(-1), weight_L, 0)
    weight_S = torch.zeros(N * B + 1, dtype=weight_L.dtype, device=weight_L.device).index_add(0, slot_L, weight_L)[:-1]
    pair_slot_TK = torch.where(is_local_TK, slot_L.view(T, K), -1)
    pair_slot_RK = F.pad(pair_slot_TK, (0, 0, 0, -T % (CORES * P)), value=-1)

    # Visits. Halving by blocks balances the cores to one block (the spare one, if the count is odd); halving by
    # experts gives core 0 those whose middle lies in the first half.
    used, zero = first_block_F[-1:], 0 * first_block_F[-1:]
    half = (used + 1) >> 1
    on_core_0_E = first_block_F[1:] + first_block_F[:-1] <= used
    border = (blocks_E * on_core_0_E).sum(0, keepdim=True, dtype=torch.int32)
    expert_N = (torch.arange(N, **int32).unsqueeze(1) >= first_block_F[1:]).sum(1, dtype=torch.int32).clamp(max=E - 1)
    block_walk = _walk(torch.cat([zero, half]), torch.cat([half, 2 * half]), expert_N, E)
    expert_walk = _walk(torch.cat([zero, border]), torch.cat([border, used]), expert_N, E)
    visits_WV = torch.cat([block_walk, expert_walk])
    return Slots(token_S.view(N, B), weight_S.view(N, B), pair_slot_RK, first_block_F, visits_WV)


def _walk(start_C: Tensor, stop_C: Tensor, expert_N: Tensor, n_experts: int) -> Tensor:
    """Visits [C * N, V] of blocks start .. stop of each core. Later ones repeat the last block and store nothing."""
    trip_N = torch.arange(len(expert_N), dtype=torch.int32, device=expert_N.device)
    block_CN = torch.minimum(start_C[:, None] + trip_N, stop_C[:, None] - 1).clamp(min=0)
    is_visit_CN = trip_N < (stop_C - start_C)[:, None]
    has_next_CN = F.pad(is_visit_CN[:, 1:], (0, 1))
    expert_CN = expert_N[block_CN]
    is_new_CN = F.pad(expert_CN[:, 1:] != expert_CN[:, :-1], (1, 0), value=True)
    load_CN = torch.where(is_new_CN, expert_CN, n_experts)
    next_CN = torch.where(has_next_CN, F.pad(load_CN[:, 1:], (0, 1)), n_experts)
    is_last_CN = is_visit_CN & ~(has_next_CN & F.pad(~is_new_CN[:, 1:], (0, 1)))
    store_CN = torch.where(is_last_CN, expert_CN, n_experts)
    trips_CN = (stop_C - start_C).amax().expand_as(block_CN)
    visits_CNV = torch.stack([block_CN, load_CN, next_CN, store_CN, ~is_new_CN, trips_CN], dim=-1)
    return F.pad(visits_CNV, (0, VISIT - 6)).flatten(0, 1)


# ------------------------------------------------------------------------------------------------------------------
# Shared by the references
# ------------------------------------------------------------------------------------------------------------------
# The references take what the kernels take and round where the kernels round: to x's dtype. Sums are in fp32, so
# with fp32 (or fp64) inputs nothing is rounded at all. Blocks beyond the used ones stay NaN, as on the device they
# stay unwritten.


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _take_rows(rows_RD: Tensor, index_S: Tensor) -> Tensor:
    """Rows by index; zeros for index -1, whatever the rows hold."""
    taken_SD = rows_RD.index_select(0, index_S.clamp(min=0))
    return torch.where(index_S.unsqueeze(1) >= 0, taken_SD, 0)


def _expert_slots(first_block_F: Tensor, block_tokens: int) -> Iterator[tuple[int, slice]]:
    """Each local expert with the slots of its blocks."""
    first = (first_block_F * block_tokens).tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(first)):
        yield expert, slice(start, stop)


def _unwritten(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


# ------------------------------------------------------------------------------------------------------------------
# Shared by the kernels
# ------------------------------------------------------------------------------------------------------------------
# Device rules that shape all four (device_facts#nki-loops, device_facts#nki-offsets):
#   - a device loop over visits, whose trip count is data; no arithmetic on its variable, so every table is shaped
#     such that `scalar_offset` times a row is the place wanted;
#   - what outlives a visit (weights, sums) is in SBUF outside the loop; PSUM tiles are allocated inside it;
#   - both cores make the same number of trips and differ only in the rows of `visits_WV` they read;
#   - tokens are the stationary operand and weights the moving one, so even a tile of 128 tokens streams 512 columns.
# Slot s of a block sits on partition s // J as tile s % J: a whole block moves in one DMA with J rows per partition.


def sbuf(shape, dtype):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def output(shape, dtype):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def this_core():
    assert nl.num_programs(axes=0) == CORES, "launch the kernels on both cores of LNC=2: kernel[2](...)"
    return nl.program_id(axis=0)


def column(tile, j):
    return tile[:, j : j + 1]


def banks(n):
    """Columns 0 .. n in pieces (start, width) that fit one PSUM bank each."""
    pieces = []
    for start in range(0, n, BANK):
        pieces.append((start, min(BANK, n - start)))
    return pieces


def multiply(dst, a, b):
    nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=nl.multiply, engine=nisa.engine.vector)


def start_walk(visits_WV, walk):
    """Offset of this core's first visit in one of the walks, and its trip count in a register."""
    n_visits = visits_WV.shape[0] // (2 * CORES)
    first_visit = (walk * CORES + this_core()) * n_visits * VISIT
    trips = sbuf((1, 1), nl.int32)
    nisa.dma_copy(dst=trips, src=visits_WV.ap([[1, 1], [1, 1]], offset=first_visit + TRIPS))
    n_trips = nisa.register_alloc()
    nisa.register_load(n_trips, trips)
    return first_visit, n_trips


def load_visit(visits_WV, first_visit, i):
    """Row i (None: the first) of this core's walk: a [1, V] tile whose columns serve as scalar offsets."""
    visit = sbuf((1, VISIT), nl.int32)
    nisa.dma_copy(dst=visit, src=visits_WV.ap([[VISIT, 1], [1, VISIT]], offset=first_visit, scalar_offset=i))
    return visit


def resident(w_EMD):
    """Room for one expert's weight [M, D] in SBUF, for the whole kernel: row m on partition m % 128."""
    return sbuf((P, w_EMD.shape[1] // P, w_EMD.shape[2]), nl.bfloat16)


def load_weights(pairs, expert):
    """Fill (resident tile, w_EMD) pairs from one expert. An expert out of range keeps what is there: the reuse."""
    for w, w_EMD in pairs:
        _, M, D = w_EMD.shape
        src = w_EMD.ap([[D, P], [P * D, M // P], [1, D]], offset=0, scalar_offset=expert)
        nisa.dma_copy(dst=w, src=src, oob_mode=nisa.oob_mode.skip)


def block_of(table, block):
    """View of one block of a slot table [N, B] or slot tensor [N, B, D] as [P, J] or [P, J, D]."""
    J = table.shape[1] // P
    if len(table.shape) == 2:
        return table.ap([[J, P], [1, J]], offset=0, scalar_offset=block)
    D = table.shape[2]
    return table.ap([[J * D, P], [D, J], [1, D]], offset=0, scalar_offset=block)


def load_block(table, block):
    view = block_of(table, block)
    tile = sbuf(view.shape, table.dtype)
    nisa.dma_copy(dst=tile, src=view)
    return tile


def store_block(table, block, tile):
    nisa.dma_copy(dst=block_of(table, block), src=tile)


def zeros(width):
    tile = sbuf((P, width), nl.bfloat16)
    nisa.memset(tile, 0.0, engine=nisa.engine.vector)
    return tile


def gather_rows(dst, rows_TH, index_P1, zeros_PH):
    """dst [P, H] = the rows by index; zeros for index -1, which no DMA touches: pads cost nothing and hold no NaN."""
    H = rows_TH.shape[1]
    nisa.tensor_copy(dst=dst, src=zeros_PH, engine=nisa.engine.vector)
    src = rows_TH.ap([[H, P], [1, H]], offset=0, vector_offset=index_P1)
    nisa.dma_copy(dst=dst, src=src, oob_mode=nisa.oob_mode.skip)


def transposed(src_PD):
    """[P, D] -> [128, D / 128, P] in bf16 through the tensor engine, 8 blocks to a PSUM bank."""
    n = src_PD.shape[1] // P
    out = sbuf((P, n, P), nl.bfloat16)
    for first in range(0, n, 8):
        count = min(8, n - first)
        bank = nl.ndarray((P, count, P), dtype=nl.bfloat16, buffer=nl.psum)
        for j in range(count):
            start = (first + j) * P
            nisa.nc_transpose(dst=bank[:, j, :], data=src_PD[:, start : start + P])
        nisa.tensor_copy(dst=out[:, first : first + count, :], src=bank, engine=nisa.engine.vector)
    return out


def product(terms, start, width):
    """PSUM [P, width] fp32 = sum over terms (a_T [128, M / 128, P], w [128, M / 128, D]) of a @ w[:, start ...]."""
    out = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
    started = False
    for a_T, w in terms:
        for m in range(w.shape[1]):
            moving = w[:, m, start : start + width]
            nisa.nc_matmul(dst=out, stationary=a_T[:, m, :], moving=moving, accumulate=started)
            started = True
    return out


# ------------------------------------------------------------------------------------------------------------------
# experts_forward
# ------------------------------------------------------------------------------------------------------------------


def experts_forward_reference(
    x_TH: Tensor, w1_EHI: Tensor, w3_EHI: Tensor, w2_EIH: Tensor, slots: Slots
) -> tuple[Tensor, Tensor, Tensor]:
    """y, gate and up of every slot: [N, B, H], [N, B, I], [N, B, I], in x's dtype; y already times the weight."""
    (N, B), I = slots.token_NB.shape, w1_EHI.shape[2]
    y_SH, g_SI, u_SI = (_unwritten(x_TH, N * B, width) for width in (x_TH.shape[1], I, I))
    for e, at in _expert_slots(slots.first_block_F, B):
        x_SH = _wide(_take_rows(x_TH, slots.token_NB.view(-1)[at]))
        g_SI[at] = (x_SH @ _wide(w1_EHI[e])).to(x_TH.dtype)
        u_SI[at] = (x_SH @ _wide(w3_EHI[e])).to(x_TH.dtype)
        act_SI = (F.silu(_wide(g_SI[at])) * _wide(u_SI[at])).to(x_TH.dtype)
        weight_S1 = slots.weight_NB.view(-1, 1)[at]
        y_SH[at] = (_wide(act_SI) @ _wide(w2_EIH[e]) * weight_S1).to(x_TH.dtype)
    return y_SH.view(N, B, -1), g_SI.view(N, B, I), u_SI.view(N, B, I)


@nki.jit
def experts_forward_kernel(x_TH, w1_EHI, w3_EHI, w2_EIH, token_NB, weight_NB, visits_WV):
    """y [N, B, H] (times the router weight), gate and up [N, B, I]; bf16; blocks no core visits stay unwritten.

    x_TH bf16 [T, H]; w1, w3 bf16 [E, H, I]; w2 bf16 [E, I, H]; token_NB int32; weight_NB fp32; visits int32.
    Limits: `check_shapes`. SBUF: `sbuf_bytes` (108 KiB for Qwen3-30B-A3B, B = 256). PSUM: at most 2 of 8 banks.

    load the first expert
    for each visit of this core:
        for each tile of 128 slots: x = rows or zeros; gate, up = x @ w1, x @ w3; act = bf16(silu(gate) * up)
        prefetch w1, w3 of the next visit, if its expert differs
        for each tile: y = weight * (act @ w2)
        prefetch w2 likewise; store gate, up, y
    """
    _, H, I = w1_EHI.shape
    N, B = token_NB.shape
    J, bf16 = B // P, nl.bfloat16
    y_NBH, g_NBI, u_NBI = output((N, B, H), bf16), output((N, B, I), bf16), output((N, B, I), bf16)
    w1, w3, w2 = resident(w1_EHI), resident(w3_EHI), resident(w2_EIH)
    gate_up, down = ((w1, w1_EHI), (w3, w3_EHI)), ((w2, w2_EIH),)
    zeros_PH = zeros(H)
    first_visit, n_trips = start_walk(visits_WV, BLOCK_WALK)
    first_expert = column(load_visit(visits_WV, first_visit, None), LOAD)
    load_weights(gate_up + down, first_expert)

    def visit_block(i):
        visit = load_visit(visits_WV, first_visit, i)
        block, next_expert = column(visit, BLOCK), column(visit, NEXT)
        token, weight = load_block(token_NB, block), load_block(weight_NB, block)
        g, u, act = sbuf((P, J, I), bf16), sbuf((P, J, I), bf16), sbuf((P, J, I), bf16)
        y = sbuf((P, J, H), bf16)
        for j in range(J):
            x = sbuf((P, H), bf16)
            gather_rows(x, x_TH, column(token, j), zeros_PH)
            x_T = transposed(x)
            for c, width in banks(I):
                nisa.activation(dst=g[:, j, c : c + width], op=nl.copy, data=product(((x_T, w1),), c, width))
                nisa.activation(dst=u[:, j, c : c + width], op=nl.copy, data=product(((x_T, w3),), c, width))
            silu = sbuf((P, I), nl.float32)  # of the rounded gate, as backward sees it
            nisa.activation(dst=silu, op=nl.silu, data=g[:, j, :])
            multiply(act[:, j, :], silu, u[:, j, :])
        load_weights(gate_up, next_expert)
        for j in range(J):
            act_T = transposed(act[:, j, :])
            for c, width in banks(H):
                y_c = product(((act_T, w2),), c, width)
                nisa.activation(dst=y[:, j, c : c + width], op=nl.copy, data=y_c, scale=column(weight, j))
        load_weights(down, next_expert)
        store_block(g_NBI, block, g)
        store_block(u_NBI, block, u)
        store_block(y_NBH, block, y)

    nl.fori_loop(0, n_trips, visit_block)
    return y_NBH, g_NBI, u_NBI


# ------------------------------------------------------------------------------------------------------------------
# experts_backward
# ------------------------------------------------------------------------------------------------------------------


def experts_backward_reference(
    dout_RH: Tensor, g_NBI: Tensor, u_NBI: Tensor, w1_EIH: Tensor, w3_EIH: Tensor, w2_EHI: Tensor, slots: Slots
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dgate, dup, weight * act and dweight of every slot: [N, B, H], three [N, B, I], [N, B] wide."""
    (N, B), (H, I) = slots.token_NB.shape, w2_EHI.shape[1:]
    dx_SH, dg_SI, du_SI, a_SI = (_unwritten(dout_RH, N * B, width) for width in (H, I, I, I))
    dweight_S = _unwritten(slots.weight_NB, N * B)
    for e, at in _expert_slots(slots.first_block_F, B):
        d_SI = _wide(_take_rows(dout_RH, slots.token_NB.view(-1)[at])) @ _wide(w2_EHI[e])
        g, u, weight_S1 = _wide(g_NBI.view(-1, I)[at]), _wide(u_NBI.view(-1, I)[at]), slots.weight_NB.view(-1, 1)[at]
        sigmoid = torch.sigmoid(g)
        silu, silu_dx = g * sigmoid, sigmoid * (1 + g * (1 - sigmoid))
        act = _wide((silu * u).to(dout_RH.dtype))
        dweight_S[at] = (d_SI * act).sum(1)
        d_SI = d_SI * weight_S1
        dg_SI[at] = (d_SI * u * silu_dx).to(dout_RH.dtype)
        du_SI[at] = (d_SI * silu).to(dout_RH.dtype)
        a_SI[at] = (act * weight_S1).to(dout_RH.dtype)
        dx_SH[at] = (_wide(dg_SI[at]) @ _wide(w1_EIH[e]) + _wide(du_SI[at]) @ _wide(w3_EIH[e])).to(dout_RH.dtype)
    return dx_SH.view(N, B, H), *(t.view(N, B, I) for t in (dg_SI, du_SI, a_SI)), dweight_S.view(N, B)


@nki.jit
def experts_backward_kernel(dout_RH, g_NBI, u_NBI, w1_EIH, w3_EIH, w2_EHI, token_NB, weight_NB, visits_WV):
    """dx [N, B, H], dgate, dup, weight * act [N, B, I] in bf16, dweight [N, B] fp32; unvisited blocks stay unwritten.

    dout_RH bf16 [R, H]; gate, up bf16 [N, B, I]; w1, w3 [E, I, H] and w2 [E, H, I] bf16, the parameter layout: no copy.
    Limits: `check_shapes`. SBUF: `sbuf_bytes` (128 KiB for Qwen3-30B-A3B, B = 256). PSUM: at most 3 of 8 banks.

    load the first expert
    for each visit of this core:
        for each tile of 128 slots:
            d = (rows of dout or zeros) @ w2;  act = bf16(silu(gate) * up)
            dweight = sum(d * act);  d = weight * d        (so no down projection has to be saved or redone)
            dup = bf16(d * silu(gate));  dgate = bf16(d * up * silu'(gate));  a = bf16(weight * act)
        prefetch w2 of the next visit, if its expert differs
        for each tile: dx = dgate @ w1 + dup @ w3
        prefetch w1, w3 likewise; store all five
    """
    _, H, I = w2_EHI.shape
    N, B = token_NB.shape
    J, bf16, fp32 = B // P, nl.bfloat16, nl.float32
    dx_NBH, dweight_NB = output((N, B, H), bf16), output((N, B), fp32)
    dg_NBI, du_NBI, a_NBI = output((N, B, I), bf16), output((N, B, I), bf16), output((N, B, I), bf16)
    w1, w3, w2 = resident(w1_EIH), resident(w3_EIH), resident(w2_EHI)
    gate_up, down = ((w1, w1_EIH), (w3, w3_EIH)), ((w2, w2_EHI),)
    zeros_PH = zeros(H)
    first_visit, n_trips = start_walk(visits_WV, BLOCK_WALK)
    first_expert = column(load_visit(visits_WV, first_visit, None), LOAD)
    load_weights(down + gate_up, first_expert)

    def visit_block(i):
        visit = load_visit(visits_WV, first_visit, i)
        block, next_expert = column(visit, BLOCK), column(visit, NEXT)
        token, weight = load_block(token_NB, block), load_block(weight_NB, block)
        g, u = load_block(g_NBI, block), load_block(u_NBI, block)
        dg, du, a = sbuf((P, J, I), bf16), sbuf((P, J, I), bf16), sbuf((P, J, I), bf16)
        dx, dweight = sbuf((P, J, H), bf16), sbuf((P, J), fp32)
        for j in range(J):
            weight_P1 = column(weight, j)
            dout = sbuf((P, H), bf16)
            gather_rows(dout, dout_RH, column(token, j), zeros_PH)
            dout_T = transposed(dout)
            silu, silu_dx, act = sbuf((P, I), fp32), sbuf((P, I), fp32), sbuf((P, I), bf16)
            nisa.activation(dst=silu, op=nl.silu, data=g[:, j, :])
            nisa.activation(dst=silu_dx, op=nl.silu_dx, data=g[:, j, :])
            multiply(act, silu, u[:, j, :])
            nisa.activation(dst=a[:, j, :], op=nl.copy, data=act, scale=weight_P1)
            d, d_act = sbuf((P, I), fp32), sbuf((P, I), fp32)
            for c, width in banks(I):
                d_c = product(((dout_T, w2),), c, width)
                multiply(d_act[:, c : c + width], d_c, act[:, c : c + width])
                nisa.activation(dst=d[:, c : c + width], op=nl.copy, data=d_c, scale=weight_P1)
            nisa.tensor_reduce(dst=column(dweight, j), op=nl.add, data=d_act, axis=(1,))
            multiply(du[:, j, :], d, silu)
            multiply(d, d, u[:, j, :])
            multiply(dg[:, j, :], d, silu_dx)
        load_weights(down, next_expert)
        for j in range(J):
            terms = ((transposed(dg[:, j, :]), w1), (transposed(du[:, j, :]), w3))
            for c, width in banks(H):
                nisa.activation(dst=dx[:, j, c : c + width], op=nl.copy, data=product(terms, c, width))
        load_weights(gate_up, next_expert)
        store_block(dx_NBH, block, dx)
        store_block(dg_NBI, block, dg)
        store_block(du_NBI, block, du)
        store_block(a_NBI, block, a)
        store_block(dweight_NB, block, dweight)

    nl.fori_loop(0, n_trips, visit_block)
    return dx_NBH, dg_NBI, du_NBI, a_NBI, dweight_NB


# ------------------------------------------------------------------------------------------------------------------
# weight_gradients
# ------------------------------------------------------------------------------------------------------------------


def weight_gradients_reference(
    x_TH: Tensor, dout_RH: Tensor, dg_NBI: Tensor, du_NBI: Tensor, a_NBI: Tensor, slots: Slots
) -> tuple[Tensor, Tensor, Tensor]:
    """dw1 [E, I, H], dw2 [E, H, I], dw3 [E, I, H]: fp32 sums over the slots of each expert, rounded once."""
    E, B, H, I = len(slots.first_block_F) - 1, slots.token_NB.shape[1], x_TH.shape[1], dg_NBI.shape[2]
    dw1_EIH, dw2_EHI, dw3_EIH = x_TH.new_empty(E, I, H), x_TH.new_empty(E, H, I), x_TH.new_empty(E, I, H)
    for e, at in _expert_slots(slots.first_block_F, B):
        token_S = slots.token_NB.view(-1)[at]
        x_SH, dout_SH = _wide(_take_rows(x_TH, token_S)), _wide(_take_rows(dout_RH, token_S))
        dg_SI, du_SI, a_SI = (_wide(t.view(-1, I)[at]) for t in (dg_NBI, du_NBI, a_NBI))
        dw1_EIH[e], dw3_EIH[e], dw2_EHI[e] = dg_SI.T @ x_SH, du_SI.T @ x_SH, dout_SH.T @ a_SI
    return dw1_EIH, dw2_EHI, dw3_EIH


@nki.jit
def weight_gradients_kernel(x_TH, dout_RH, dg_NBI, du_NBI, a_NBI, token_NB, visits_WV, n_experts):
    """dw1 [E, I, H], dw2 [E, H, I], dw3 [E, I, H] in bf16, all written (an idle expert owns an empty block).

    x_TH, dout_RH bf16 rows; dgate, dup, weight * act bf16 [N, B, I] of `experts_backward`; walk: by whole experts.
    Limits: `check_shapes`. SBUF: `sbuf_bytes` (173 KiB for Qwen3-30B-A3B, B = 256; most of it the fp32 sums). PSUM: at
    most 2 of 8 banks. A NaN or Inf reaches the experts after it on the same core (keep = 0 does not erase it), so
    training must stop at a gradient norm that is not finite, as it should anyway.

    sums = 0
    for each visit of this core:
        x, dout = rows or zeros of the whole block
        for each sum: sum = keep * sum + (left.T @ right of the block, in PSUM)     keep = 0 starts an expert
                      store it as bf16, if this is the last block of its expert
    """
    _, B, I = dg_NBI.shape
    H, J, bf16 = x_TH.shape[1], B // P, nl.bfloat16
    dw1_EIH, dw3_EIH = output((n_experts, I, H), bf16), output((n_experts, I, H), bf16)
    dw2_EHI = output((n_experts, H, I), bf16)
    sums1, sums2, sums3 = zero_sums(I, H), zero_sums(H, I), zero_sums(I, H)
    zeros_PH = zeros(H)
    first_visit, n_trips = start_walk(visits_WV, EXPERT_WALK)

    def visit_block(i):
        visit = load_visit(visits_WV, first_visit, i)
        block, store_expert = column(visit, BLOCK), column(visit, STORE)
        keep = sbuf((P, 1), nl.float32)  # the same 0 or 1 on every partition
        nisa.dma_copy(dst=keep, src=visits_WV.ap([[0, P], [1, 1]], offset=first_visit + KEEP, scalar_offset=i))
        token = load_block(token_NB, block)
        x, dout = sbuf((P, J, H), bf16), sbuf((P, J, H), bf16)
        for j in range(J):
            gather_rows(x[:, j, :], x_TH, column(token, j), zeros_PH)
            gather_rows(dout[:, j, :], dout_RH, column(token, j), zeros_PH)
        dg, du, a = load_block(dg_NBI, block), load_block(du_NBI, block), load_block(a_NBI, block)
        add_block(sums1, dg, x, keep, dw1_EIH, store_expert)
        add_block(sums3, du, x, keep, dw3_EIH, store_expert)
        add_block(sums2, dout, a, keep, dw2_EHI, store_expert)

    nl.fori_loop(0, n_trips, visit_block)
    return dw1_EIH, dw2_EHI, dw3_EIH


def zero_sums(M, D):
    """fp32 sums [M, D] as a list of [P, D] tiles; zeros, because keep = 0 would not erase a NaN."""
    sums = []
    for _ in range(M // P):
        tile = sbuf((P, D), nl.float32)
        nisa.memset(tile, 0.0, engine=nisa.engine.vector)
        sums.append(tile)
    return sums


def add_block(sums, left_PJM, right_PJD, keep_P1, dw_EMD, store_expert):
    """sums = keep * sums + left.T @ right over the block; then to dw[store_expert], skipped if that is out of range."""
    D = right_PJD.shape[2]
    for m in range(len(sums)):
        for c, width in banks(D):
            part = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
            for j in range(right_PJD.shape[1]):
                left = left_PJM[:, j, m * P : m * P + P]
                nisa.nc_matmul(dst=part, stationary=left, moving=right_PJD[:, j, c : c + width], accumulate=j > 0)
            sum_m = sums[m][:, c : c + width]
            nisa.scalar_tensor_tensor(
                dst=sum_m, data=sum_m, op0=nl.multiply, operand0=keep_P1, op1=nl.add, operand1=part
            )
        # The DMA rounds to bf16: the only rounding of a weight gradient.
        dst = dw_EMD.ap([[D, P], [1, D]], offset=m * P * D, scalar_offset=store_expert)
        nisa.dma_copy(dst=dst, src=sums[m], oob_mode=nisa.oob_mode.skip)


# ------------------------------------------------------------------------------------------------------------------
# combine
# ------------------------------------------------------------------------------------------------------------------


def combine_reference(rows_NBH: Tensor, slots: Slots) -> Tensor:
    """out [R, H]: the fp32 sum of each token's slot rows, rounded once."""
    rows_SH, pair_slot_RK = rows_NBH.flatten(0, 1), slots.pair_slot_RK
    return sum(_wide(_take_rows(rows_SH, pair_slot_R)) for pair_slot_R in pair_slot_RK.T).to(rows_NBH.dtype)


@nki.jit
def combine_kernel(rows_SH, pair_slot_GQK):
    """out [G, Q, H] bf16 = the sum over k of rows[pair_slot[g, q, k]], skipping -1; fp32 sums in PSUM, rounded once.

    rows_SH bf16 [S, H], a slot tensor seen as rows; pair_slot_GQK int32 [G, 256, K]: in each group of Q = 256 tokens
    core 0 takes the first 128. A gather-sum needs no scatter and no atomics, and always adds in the same order.
    Limits: `check_shapes`. SBUF: `sbuf_bytes` (40 KiB for Qwen3-30B-A3B). PSUM: at most 2 of 8 banks. A row that is
    NaN or Inf spreads over its tile of 128 tokens (0 * NaN in the product with the identity).

    for each group: for each k: rows_k = slot rows or zeros
                    out = sum of identity @ rows_k      (the tensor engine is idle here, and adds into PSUM)
    """
    G, Q, K = pair_slot_GQK.shape
    H = rows_SH.shape[1]
    out_GQH = output((G, Q, H), nl.bfloat16)
    first_row = this_core() * P
    identity = nl.shared_identity_matrix(P, dtype=nl.bfloat16)
    zeros_PH = zeros(H)

    def sum_tile(i):
        slot = sbuf((P, K), nl.int32)
        nisa.dma_copy(dst=slot, src=pair_slot_GQK.ap([[K, P], [1, K]], offset=first_row * K, scalar_offset=i))
        rows = sbuf((P, K, H), nl.bfloat16)
        for k in range(K):
            gather_rows(rows[:, k, :], rows_SH, column(slot, k), zeros_PH)
        out = sbuf((P, H), nl.bfloat16)
        for c, width in banks(H):
            total = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
            for k in range(K):
                nisa.nc_matmul(dst=total, stationary=identity, moving=rows[:, k, c : c + width], accumulate=k > 0)
            nisa.activation(dst=out[:, c : c + width], op=nl.copy, data=total)
        nisa.dma_copy(dst=out_GQH.ap([[H, P], [1, H]], offset=first_row * H, scalar_offset=i), src=out)

    nl.fori_loop(0, G, sum_tile)
    return out_GQH


# ------------------------------------------------------------------------------------------------------------------
# The operator
# ------------------------------------------------------------------------------------------------------------------


def kernel_weights(w1_EIH: Tensor, w2_EHI: Tensor, w3_EIH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The orientation that the forward kernel needs: w1 and w3 as [E, H, I], w2 as [E, I, H], without gradient.

    The tensor engine contracts over the partition dim, so each pass wants the contracted dim outermost. Backward
    wants the parameter layout itself; forward wants the transposes. Cost: one more copy of the experts in memory
    and every weight read and written once: for Qwen3-30B-A3B at TP 4, 302 MB per layer and about 0.83 ms at the
    725 GB/s of a logical core, more than the forward of 4096 tokens. So make it once per weight update and hand it to
    `expert_layer(..., forward_weights=...)`, as train_nki_moe.py does; otherwise `expert_layer` makes it on every call.
    """
    return tuple(w.detach().transpose(1, 2).contiguous() for w in (w1_EIH, w2_EHI, w3_EIH))


def _check_bound(backend: str) -> None:
    """The kernels are bound to one `nki` when this file is imported: never run them under the name of the other."""
    if (backend == "interpret") == NKI_IS_REAL:
        raise RuntimeError(f"backend = {backend!r}, but the kernels are bound to {nki.__name__}: see resolve_backend")


def _combine(rows_NBH: Tensor, slots: Slots) -> Tensor:
    R, K = slots.pair_slot_RK.shape
    groups_GQK = slots.pair_slot_RK.view(-1, CORES * P, K)
    return combine_kernel[CORES](rows_NBH.flatten(0, 1), groups_GQK).view(R, -1)


def _experts_forward(
    x_TH: Tensor, w1_EIH: Tensor, w2_EHI: Tensor, w3_EIH: Tensor, w1_EHI: Tensor, w2_EIH: Tensor, w3_EHI: Tensor,
    weight_NB: Tensor, token_NB: Tensor, pair_slot_RK: Tensor, first_block_F: Tensor, visits_WV: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out [R, H], and gate and up [N, B, I], which are outputs because backward needs them."""
    slots = Slots(token_NB, weight_NB, pair_slot_RK, first_block_F, visits_WV)
    if backend == "reference":
        y_NBH, g_NBI, u_NBI = experts_forward_reference(x_TH, w1_EHI, w3_EHI, w2_EIH, slots)
        return combine_reference(y_NBH, slots), g_NBI, u_NBI
    _check_bound(backend)
    weights = (w1_EHI, w3_EHI, w2_EIH)
    y_NBH, g_NBI, u_NBI = experts_forward_kernel[CORES](x_TH, *weights, token_NB, weight_NB, visits_WV)
    return _combine(y_NBH, slots), g_NBI, u_NBI


def _experts_backward(
    dout_RH: Tensor, x_TH: Tensor, g_NBI: Tensor, u_NBI: Tensor, w1_EIH: Tensor, w2_EHI: Tensor, w3_EIH: Tensor,
    weight_NB: Tensor, token_NB: Tensor, pair_slot_RK: Tensor, first_block_F: Tensor, visits_WV: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx [R, H], dweight [N, B], dw1, dw2, dw3 in the parameter layout."""
    slots = Slots(token_NB, weight_NB, pair_slot_RK, first_block_F, visits_WV)
    weights = (w1_EIH, w3_EIH, w2_EHI)
    if backend == "reference":
        dx_NBH, *slot_grads, dweight_NB = experts_backward_reference(dout_RH, g_NBI, u_NBI, *weights, slots)
        dw1_EIH, dw2_EHI, dw3_EIH = weight_gradients_reference(x_TH, dout_RH, *slot_grads, slots)
        return combine_reference(dx_NBH, slots), dweight_NB, dw1_EIH, dw2_EHI, dw3_EIH
    _check_bound(backend)
    tables = (token_NB, weight_NB, visits_WV)
    dx_NBH, *slot_grads, dweight_NB = experts_backward_kernel[CORES](dout_RH, g_NBI, u_NBI, *weights, *tables)
    tables = (token_NB, visits_WV, len(w1_EIH))
    dw1_EIH, dw2_EHI, dw3_EIH = weight_gradients_kernel[CORES](x_TH, dout_RH, *slot_grads, *tables)
    return _combine(dx_NBH, slots), dweight_NB, dw1_EIH, dw2_EHI, dw3_EIH


def _forward_shapes(x_TH, w1_EIH, w2_EHI, w3_EIH, w1_EHI, w2_EIH, w3_EHI, weight_NB, token_NB, pair_slot_RK, *_):
    slot_shape = (*token_NB.shape, w1_EIH.shape[1])
    out_shape = (pair_slot_RK.shape[0], x_TH.shape[1])
    return x_TH.new_empty(out_shape), x_TH.new_empty(slot_shape), x_TH.new_empty(slot_shape)


def _backward_shapes(dout_RH, x_TH, g_NBI, u_NBI, w1_EIH, w2_EHI, w3_EIH, weight_NB, *_):
    return tuple(torch.empty_like(t) for t in (dout_RH, weight_NB, w1_EIH, w2_EHI, w3_EIH))


def _save_for_backward(ctx, inputs, output) -> None:
    x_TH, w1_EIH, w2_EHI, w3_EIH, _, _, _, *tables, backend = inputs
    _, g_NBI, u_NBI = output
    ctx.set_materialize_grads(False)  # gate and up get no gradient: do not fill zeros for them
    ctx.save_for_backward(x_TH, g_NBI, u_NBI, w1_EIH, w2_EHI, w3_EIH, *tables)
    ctx.backend = backend


def _backward(ctx, dout_RH, _dg, _du):
    if dout_RH is None:  # nothing downstream used the output
        return (None,) * 13
    x_TH, *rest = ctx.saved_tensors
    token_NB = rest[6]
    dx_RH, dweight_NB, dw1_EIH, dw2_EHI, dw3_EIH = experts_backward_op(dout_RH.contiguous(), x_TH, *rest, ctx.backend)
    dweight_NB = torch.where(token_NB >= 0, dweight_NB, 0)  # blocks beyond the used ones are unwritten memory
    no_grad_inputs = (None,) * 5  # tables and backend
    return dx_RH[: len(x_TH)], dw1_EIH, dw2_EHI, dw3_EIH, None, None, None, dweight_NB, *no_grad_inputs


def _make_operators():
    """The two operators under one name: through `nki_op` on a Neuron machine, else through torch.library.

    `nki_op` (torch_neuronx 2.14) infers schema, fake and eager implementation from the function itself.
    """
    if NKI_IS_REAL and importlib.util.find_spec("torch_neuronx") is not None:
        try:
            from torch_neuronx import nki_op
        except Exception:  # the PyPI placeholder, or the torch-xla era package: resolve_backend says so
            pass
        else:
            forward = nki_op("qwen3_moe::experts_forward", mutates_args={})(_experts_forward)
            backward = nki_op("qwen3_moe::experts_backward", mutates_args={})(_experts_backward)
            return forward, backward, True
    forward = torch.library.custom_op("qwen3_moe::experts_forward", _experts_forward, mutates_args=())
    backward = torch.library.custom_op("qwen3_moe::experts_backward", _experts_backward, mutates_args=())
    forward.register_fake(_forward_shapes)
    backward.register_fake(_backward_shapes)
    return forward, backward, False


experts_forward_op, experts_backward_op, OPERATORS_ARE_NKI = _make_operators()
experts_forward_op.register_autograd(_backward, setup_context=_save_for_backward)


def expert_layer(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    w1_EIH: Tensor,
    w2_EHI: Tensor,
    w3_EIH: Tensor,
    *,
    first_expert: int,
    block_tokens: int,
    backend: str,
    forward_weights: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """The sum over this rank's experts, for all T tokens: [T, H] in x's dtype. Differentiable.

    x_TH             [T, H] bf16; the reference also takes fp32 and fp64 and then rounds nothing
    topk_ids_TK      [T, K] integers, global expert ids, distinct per token; negative: masked
    topk_weights_TK  [T, K] float
    w1, w2, w3       gate [E, I, H], down [E, H, I], up [E, I, H] of the local experts, in x's dtype
    forward_weights  `kernel_weights(w1, w2, w3)` if the caller keeps it; made here otherwise
    backend          what `resolve_backend` returned

    Gradients reach x, topk_weights, w1, w2 and w3; an idle expert gets zeros. Rows of x that no local expert uses are
    never read, even if they hold NaN. Saved for backward: x, the weights, gate and up of each slot, and int32 tables.
    Raises ValueError for sizes outside `check_shapes` and for tensors that do not fit together.
    """
    _check_tensors(x_TH, topk_ids_TK, topk_weights_TK, w1_EIH, w2_EHI, w3_EIH, backend)
    (T, H), (E, I, _), K = x_TH.shape, w1_EIH.shape, topk_ids_TK.shape[1]
    check_shapes(T, H, I, max(first_expert + E, K), E, K, block_tokens)

    slots = build_slots(topk_ids_TK, topk_weights_TK, first_expert, E, block_tokens)
    if forward_weights is None:
        if backend == "reference":  # strides do as well as copies
            forward_weights = tuple(w.detach().transpose(1, 2) for w in (w1_EIH, w2_EHI, w3_EIH))
        else:
            forward_weights = kernel_weights(w1_EIH, w2_EHI, w3_EIH)
    weights = (w1_EIH, w2_EHI, w3_EIH, *forward_weights)
    tables = (slots.weight_NB, slots.token_NB, slots.pair_slot_RK, slots.first_block_F, slots.visits_WV)
    out_RH, _, _ = experts_forward_op(x_TH.contiguous(), *weights, *tables, backend)
    return out_RH[:T]


def _check_tensors(x_TH, topk_ids_TK, topk_weights_TK, w1_EIH, w2_EHI, w3_EIH, backend: str) -> None:
    """Shapes that fit together, one dtype, and a backend that takes it."""
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: choose one of {', '.join(BACKENDS)} (resolve_backend returns it)")
    for name, t, n_dims in (("x", x_TH, 2), ("topk_ids", topk_ids_TK, 2), ("w1", w1_EIH, 3)):
        if t.dim() != n_dims:
            raise ValueError(f"expert_layer: {name} has shape {tuple(t.shape)}; it must have {n_dims} dims")
    (T, H), (E, I, _), K = x_TH.shape, w1_EIH.shape, topk_ids_TK.shape[1]
    weights = {"w1": (w1_EIH, (E, I, H)), "w2": (w2_EHI, (E, H, I)), "w3": (w3_EIH, (E, I, H))}
    routing = {"topk_ids": (topk_ids_TK, (T, K)), "topk_weights": (topk_weights_TK, (T, K))}
    for name, (t, shape) in (routing | weights).items():
        if tuple(t.shape) != shape:
            raise ValueError(f"expert_layer: {name} has shape {tuple(t.shape)}; x and w1 ask for {shape}")
    dtypes = ["bfloat16", "float32", "float64"] if backend == "reference" else ["bfloat16"]
    for name, t in {"x": x_TH, **{name: w for name, (w, _) in weights.items()}}.items():
        if t.dtype != x_TH.dtype or str(t.dtype).removeprefix("torch.") not in dtypes:
            given = f"{name} is {t.dtype} and x is {x_TH.dtype}"
            raise ValueError(f"expert_layer: {given}; {backend} takes one of {', '.join(dtypes)}")


# ------------------------------------------------------------------------------------------------------------------
# Cost report: python nki_moe_kernels.py
# ------------------------------------------------------------------------------------------------------------------


class KernelCost(NamedTuple):
    """What one kernel issues, counted by the interpreter while it runs the kernel's own source on both cores."""

    kernel: str
    seconds: dict[str, float]  # busy time of each engine on the busier core
    matmul_ratio: float  # tensor engine cycles, transposes included, over those of the products of the used blocks
    bytes_ratio: float  # HBM bytes moved, over every needed byte moved once
    hbm_bytes: int
    bytes_per_descriptor: float
    peak_sbuf_bytes: int
    peak_psum_banks: int


def cost_report(
    n_tokens: int, hidden: int, expert_width: int, n_experts: int, n_local_experts: int, top_k: int, block_tokens: int
) -> list[KernelCost]:
    """Costs of the four kernels under a balanced routing. Every visit of the real shape runs; only floats are skipped.

    Raises ValueError outside `check_shapes`, RuntimeError if the kernels are bound to the official nki.
    """
    if NKI_IS_REAL:
        raise RuntimeError("the cost report counts in tools/nki_interpreter.py: set NKI_STAND_IN=1")
    T, H, I, E, K, B = n_tokens, hidden, expert_width, n_local_experts, top_k, block_tokens
    check_shapes(T, H, I, n_experts, E, K, B)
    ids_TK = (torch.arange(T)[:, None] + torch.arange(K) * (n_experts // K)) % n_experts
    token_NB, weight_NB, pair_slot_RK, first_block_F, visits_WV = build_slots(ids_TK, torch.ones(T, K), 0, E, B)
    N, R = len(token_NB), len(pair_slot_RK)

    def empty(*shape):  # uninitialised: no page of it is ever touched
        return torch.empty(shape, dtype=torch.bfloat16)

    x_TH, dout_RH, w_EIH, w_EHI = empty(T, H), empty(R, H), empty(E, I, H), empty(E, H, I)
    slot_H, slot_I, tables = empty(N, B, H), empty(N, B, I), (token_NB, weight_NB, visits_WV)
    pairs = int((token_NB >= 0).sum())
    rows = token_NB[token_NB >= 0].unique().numel()
    weights = 3 * E * H * I
    products = int(first_block_F[-1]) * B // P * 3 * H * I // P  # cycles: 128 tokens x 128 rows x 1 column each
    # Kernel, arguments, and what it would take if nothing were done or moved twice: matmul cycles, bf16 elements.
    plan = [
        (experts_forward_kernel, (x_TH, w_EHI, w_EHI, w_EIH, *tables)),
        (experts_backward_kernel, (dout_RH, slot_I, slot_I, w_EIH, w_EIH, w_EHI, *tables)),
        (weight_gradients_kernel, (x_TH, dout_RH, slot_I, slot_I, slot_I, token_NB, visits_WV, E)),
        (combine_kernel, (slot_H.flatten(0, 1), pair_slot_RK.view(-1, CORES * P, K))),
    ]
    needed = [
        (products, rows * H + weights + pairs * (2 * I + H)),
        (products, rows * H + weights + pairs * (5 * I + H)),
        (products, 2 * rows * H + weights + pairs * 3 * I),
        (float("nan"), pairs * H + R * H),  # adding is not what the tensor engine is for
    ]
    with nki.record(numerics=False) as runs:
        for kernel, args in plan:
            kernel[CORES](*args)
    return [_kernel_cost(run, *ideal) for run, ideal in zip(runs, needed, strict=True)]


def _kernel_cost(run, needed_cycles: float, needed_elements: int) -> KernelCost:
    counts, seconds = [core.counts for core in run.cores], [core.seconds() for core in run.cores]
    hbm_bytes = sum(c["hbm_bytes"] for c in counts)
    return KernelCost(
        kernel=run.kernel.removesuffix("_kernel"),
        seconds={engine: max(s[engine] for s in seconds) for engine in seconds[0]},
        matmul_ratio=sum(c["matmul_cycles"] + c["transpose_cycles"] for c in counts) / needed_cycles,
        bytes_ratio=hbm_bytes / (2 * needed_elements),
        hbm_bytes=hbm_bytes,
        bytes_per_descriptor=hbm_bytes / sum(c["descriptors"] for c in counts),
        peak_sbuf_bytes=max(c["peak_sbuf_bytes"] for c in counts),
        peak_psum_banks=max(c["peak_psum_banks"] for c in counts),
    )


def print_report(n_tokens: int, sizes: dict[str, int]) -> None:
    costs = cost_report(n_tokens, **sizes)
    routed = n_tokens * sizes["top_k"] / sizes["n_experts"]
    print(f"\n{n_tokens} tokens, {routed:g} routed tokens per expert;", ", ".join(f"{k} {v}" for k, v in sizes.items()))
    engines = list(costs[0].seconds)
    columns = [*(f"{engine} us" for engine in engines), "matmul x", "bytes x", "HBM MB", "B/descr", "SBUF KiB", "PSUM"]
    print(f"{'kernel':18}{'bound':>8}" + "".join(f"{column:>11}" for column in columns))
    for c in costs:
        bound = max(c.seconds, key=c.seconds.get)
        times = "".join(f"{c.seconds[engine] * 1e6:11.0f}" for engine in engines)
        matmul = "-" if math.isnan(c.matmul_ratio) else f"{c.matmul_ratio:.3f}"
        ratios = f"{matmul:>11}{c.bytes_ratio:11.3f}{c.hbm_bytes / 1e6:11.1f}{c.bytes_per_descriptor:11.0f}"
        print(f"{c.kernel:18}{bound:>8}{times}{ratios}{c.peak_sbuf_bytes / 1024:11.1f}{c.peak_psum_banks:11}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the expert kernels on one logical core (LNC=2) of trn2")
    defaults = {"tokens": 4096, "hidden": 2048, "expert_width": 768, "experts": 128, "local_experts": 32, "top_k": 8}
    for name, value in {**defaults, "block_tokens": 256}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    a = parser.parse_args()
    sizes = {"hidden": a.hidden, "expert_width": a.expert_width, "n_experts": a.experts}
    sizes |= {"n_local_experts": a.local_experts, "top_k": a.top_k, "block_tokens": a.block_tokens}
    print("Busy time of each engine on the busier physical core, by documented rates and as if nothing ever waited.")
    print(
        "x: over the ideal (the products of used blocks only; each needed byte once). Every visit of both cores runs."
    )
    for n_tokens in dict.fromkeys((a.tokens, 512 * a.experts // a.top_k)):  # as asked, and at 512 tokens per expert
        print_report(n_tokens, sizes)
    copied = 2 * 3 * a.local_experts * a.hidden * a.expert_width * 2
    print(
        f"\nkernel_weights, on each call without forward_weights: {copied / 1e6:.0f} MB, {copied / 725e9 * 1e6:.0f} us "
        f"at 725 GB/s"
    )


if __name__ == "__main__":
    main()
