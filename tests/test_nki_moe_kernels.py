"""The expert layer against a dense fp32 loop, each kernel against its reference, the operator against PyTorch's rules.

The kernels run in `nki_interpreter.py`, or, where the official nki is installed, in its simulator (not run here):

    NKI_SIMULATOR=1 NEURON_PLATFORM_TARGET_OVERRIDE=trn2 pytest tests/test_nki_moe_kernels.py
"""

import gc
import itertools
import sys
import textwrap
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import nki_moe_kernels as moe
from tools import nki_interpreter

KERNELS = moe.resolve_backend("simulate" if moe.NKI_IS_REAL else "interpret", "cpu")
needs_stand_in = pytest.mark.skipif(moe.NKI_IS_REAL, reason="counts come from the stand-in: set NKI_STAND_IN=1")
pytestmark = pytest.mark.timeout(120)

COUNTS = (1, 2, 127, 128, 129, 255, 257, 1000)
ROUTINGS = ("uniform", "all_to_one", "half_idle", "one_block_each", "one_over")
NAMES = ("out", "dx", "drouter", "dw1", "dw2", "dw3")
N_EXPERTS, LOCAL = 8, 4  # the local range is experts 0..3 ("low") or 4..7 ("high")


def route(routing: str, n_tokens: int, block_tokens: int, first_expert: int) -> torch.Tensor:
    """Expert ids [T, 2], distinct per token. The named pattern holds for the experts of the local range."""
    token = torch.arange(n_tokens)
    if routing == "uniform":
        return torch.rand(n_tokens, N_EXPERTS).topk(2).indices
    if routing == "half_idle":  # only even experts
        return 2 * torch.rand(n_tokens, N_EXPERTS // 2).topk(2).indices
    if routing == "all_to_one":
        local = torch.full_like(token, first_expert + 1)
    else:  # chunk c of exactly one block, or of one token more, goes to local expert c; the rest is masked
        chunk = token // (block_tokens + (routing == "one_over"))
        local = torch.where(chunk < LOCAL, first_expert + chunk, -1)
    elsewhere = (first_expert + LOCAL) % N_EXPERTS + token % 2
    return torch.stack([elsewhere, local], dim=1)


class Case:
    """Inputs of one layer, with values that are exact in bf16."""

    def __init__(
        self, n_tokens, routing="uniform", end="low", dims=(256, 128), block_tokens=128, dtype=torch.bfloat16, seed=0
    ):
        torch.manual_seed(seed)
        (H, I), self.block_tokens = dims, block_tokens
        self.first_expert = 0 if end == "low" else N_EXPERTS - LOCAL
        self.ids = route(routing, n_tokens, block_tokens, self.first_expert)
        x, dout = torch.randn(n_tokens, H), torch.randn(n_tokens, H)
        weights = [torch.randn(LOCAL, I, H), torch.randn(LOCAL, H, I), torch.randn(LOCAL, I, H)]
        weights = [w * w.shape[2] ** -0.5 for w in weights]
        x, self.dout, *weights = (t.to(torch.bfloat16).to(dtype) for t in (x, dout, *weights))
        router = torch.rand(n_tokens, 2, dtype=torch.promote_types(dtype, torch.float32))
        self.inputs = [t.requires_grad_() for t in (x, router, *weights)]  # x, topk_weights, w1, w2, w3
        local = (self.ids >= self.first_expert) & (self.ids < self.first_expert + LOCAL)
        self.used_rows = local.any(dim=1)

    def layer(self, backend, x=None):
        inputs = self.inputs if x is None else [x, *self.inputs[1:]]
        x, router, *weights = inputs
        options = {"first_expert": self.first_expert, "block_tokens": self.block_tokens, "backend": backend}
        return moe.expert_layer(x, self.ids, router, *weights, **options)

    def run(self, backend):
        """[out, dx, drouter, dw1, dw2, dw3]"""
        out = self.layer(backend)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.dout)]

    def oracle(self):
        """The same from a dense loop over the local experts, in at least fp32."""
        wide = [t.detach().to(torch.promote_types(t.dtype, torch.float32)).requires_grad_() for t in self.inputs]
        x, router, w1, w2, w3 = wide
        out = torch.zeros_like(x)
        for e in range(LOCAL):
            gate = (router * (self.ids == self.first_expert + e)).sum(1, keepdim=True)
            out = out + gate * ((torch.nn.functional.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T)
        return [out.detach(), *torch.autograd.grad(out, wide, self.dout.to(out.dtype))]


def assert_rows_close(actual, expected, tolerance, what):
    """Every row within tolerance of its own norm; rows that should be zero must be exactly zero."""
    error = (actual.to(expected.dtype) - expected).flatten(1).norm(dim=1)
    norm = expected.flatten(1).norm(dim=1)
    worst = (error / norm.clamp(min=1e-30)).masked_fill(error == 0, 0).max()
    assert worst <= tolerance, f"{what}: {worst:.2e} of the row norm"


def assert_layer_equals_oracle(case, backend, forward, gradient):
    for name, actual, expected in zip(NAMES, case.run(backend), case.oracle(), strict=True):
        if name == "drouter":  # one number per pair: compare as one vector
            actual, expected = actual.reshape(1, -1), expected.reshape(1, -1)
        assert_rows_close(actual, expected, forward if name == "out" else gradient, f"{backend} {name}")


# ------------------------------------------------------------------------------------------------------------------
# The layer
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("n_tokens", COUNTS)
def test_reference_equals_dense_loop_in_fp32(n_tokens, routing):
    """FR-24: every count with every routing, both ends of the expert range, at 1e-5."""
    for end in ("low", "high"):
        assert_layer_equals_oracle(Case(n_tokens, routing, end, dtype=torch.float32), "reference", 1e-5, 1e-5)


AWKWARD = [  # every count, every routing with several counts, both ends, widths that are no powers of two
    (1, "uniform", "high", (256, 128), 128),
    (1, "all_to_one", "low", (384, 256), 256),
    (2, "half_idle", "low", (256, 128), 128),
    (2, "one_block_each", "high", (256, 640), 128),
    (127, "all_to_one", "high", (384, 128), 128),
    (127, "half_idle", "high", (128, 384), 128),
    (128, "one_block_each", "low", (256, 128), 128),
    (128, "uniform", "low", (128, 256), 256),
    (129, "one_over", "high", (256, 128), 128),
    (129, "all_to_one", "low", (640, 128), 128),
    (255, "uniform", "high", (384, 256), 128),
    (255, "half_idle", "low", (256, 384), 256),
    (257, "one_over", "low", (128, 640), 256),
    (257, "uniform", "high", (640, 384), 128),
    (1000, "one_block_each", "high", (256, 128), 128),
    (1000, "one_over", "low", (384, 256), 128),
    (1000, "uniform", "low", (256, 640), 256),
    (1000, "all_to_one", "high", (256, 128), 512),
]


@pytest.mark.parametrize(("n_tokens", "routing", "end", "dims", "block_tokens"), AWKWARD)
@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_layer_equals_oracle_in_bf16(backend, n_tokens, routing, end, dims, block_tokens):
    case = Case(n_tokens, routing, end, dims, block_tokens)
    assert_layer_equals_oracle(case, backend, forward=1e-2, gradient=2e-2)


@pytest.mark.parametrize("backend", ["reference", KERNELS])
@pytest.mark.parametrize(("n_tokens", "routing"), [(129, "half_idle"), (257, "uniform")])
def test_all_experts_on_one_rank(backend, n_tokens, routing, monkeypatch):
    monkeypatch.setitem(globals(), "LOCAL", N_EXPERTS)
    assert_layer_equals_oracle(Case(n_tokens, routing), backend, forward=1e-2, gradient=2e-2)


@pytest.mark.parametrize("backend", ["reference", KERNELS])
@pytest.mark.parametrize(("n_tokens", "routing"), [(129, "half_idle"), (257, "uniform"), (600, "one_block_each")])
def test_rows_no_local_expert_uses_may_be_nan(backend, n_tokens, routing):
    """Pad slots read nothing: NaN in the unused rows of x and of the incoming gradient changes not one bit."""
    case = Case(n_tokens, routing, "high")
    assert not case.used_rows.all()
    clean = case.run(backend)
    with torch.no_grad():
        case.inputs[0][~case.used_rows] = float("nan")
        case.dout[~case.used_rows] = float("nan")
    for name, before, after in zip(NAMES, clean, case.run(backend), strict=True):
        assert torch.equal(before, after), name


@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_idle_experts_get_zeros_on_dirty_memory(backend):
    """FR-21: gradients of idle experts are zero tensors, also when the allocator hands out memory full of NaN."""
    case = Case(130, "all_to_one", "low")
    for _ in range(2):
        dirty = [torch.full((1 << n,), float("nan"), dtype=torch.bfloat16) for n in range(8, 20)]
        del dirty
        out, dx, drouter, *dweights = case.run(backend)
        for dw in dweights:
            assert dw[1].abs().sum() > 0
            assert all((dw[e] == 0).all() for e in (0, 2, 3))
        assert all(t.isfinite().all() for t in (out, dx, drouter))


def test_no_local_pair_at_all():
    case = Case(5, "all_to_one", "low")
    case.ids += LOCAL  # every expert is another rank's
    case.ids[0] = -1
    for backend in ("reference", KERNELS):
        assert all((t == 0).all() for t in case.run(backend))


# ------------------------------------------------------------------------------------------------------------------
# Each kernel against its reference
# ------------------------------------------------------------------------------------------------------------------


def assert_equal_up_to_rounding(actual, expected, what):
    """Same values, rounded at the same points: only the order of fp32 sums may differ, so few roundings flip."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: other blocks are written than in the reference"
    actual, expected = actual.float().nan_to_num(), expected.float().nan_to_num()
    assert (actual - expected).norm() <= 1e-3 * expected.norm(), what
    if actual.dtype == torch.bfloat16:
        assert (actual != expected).float().mean() < 0.01, what


@pytest.mark.parametrize(("n_tokens", "routing", "end", "dims", "block_tokens"), AWKWARD)
def test_each_kernel_equals_its_reference(n_tokens, routing, end, dims, block_tokens):
    case = Case(n_tokens, routing, end, dims, block_tokens)
    x, router, w1, w2, w3 = (t.detach() for t in case.inputs)
    slots = moe.build_slots(case.ids, router, case.first_expert, LOCAL, block_tokens)
    used = int(slots.first_block_F[-1])
    w1_EHI, w2_EIH, w3_EHI = moe.kernel_weights(w1, w2, w3)
    tables = (slots.token_NB, slots.weight_NB, slots.visits_WV)

    y, g, u = moe.experts_forward_reference(x, w1_EHI, w3_EHI, w2_EIH, slots)
    actual = moe.experts_forward_kernel[moe.CORES](x, w1_EHI, w3_EHI, w2_EIH, *tables)
    written = used + used % 2  # an odd count is evened out with the spare block, which is all padding
    for name, a, expected in zip(("y", "gate", "up"), actual, (y, g, u), strict=True):
        assert a[used:written].abs().sum() == 0
        assert a[written:].isnan().all()
        assert_equal_up_to_rounding(a[:used], expected[:used], name)
        assert (a[:used][slots.token_NB[:used] < 0] == 0).all(), f"{name} of pad slots"

    dout = torch.nn.functional.pad(case.dout, (0, 0, 0, len(slots.pair_slot_RK) - n_tokens))
    expected = moe.experts_backward_reference(dout, g, u, w1, w3, w2, slots)
    g[used:written], u[used:written] = 0, 0  # what the forward kernel leaves in the spare block
    actual = moe.experts_backward_kernel[moe.CORES](dout, g, u, w1, w3, w2, *tables)
    for name, a, e in zip(("dx", "dgate", "dup", "weighted act", "dweight"), actual, expected, strict=True):
        assert a[used:written].abs().sum() == 0
        assert a[written:].isnan().all()
        assert_equal_up_to_rounding(a[:used], e[:used], name)

    dx, dg, du, a, _ = expected
    expected = moe.weight_gradients_reference(x, dout, dg, du, a, slots)
    actual = moe.weight_gradients_kernel[moe.CORES](x, dout, dg, du, a, slots.token_NB, slots.visits_WV, LOCAL)
    for name, got, e in zip(("dw1", "dw2", "dw3"), actual, expected, strict=True):
        assert_equal_up_to_rounding(got, e, name)

    expected = moe.combine_reference(dx, slots)
    assert_equal_up_to_rounding(moe._combine(dx, slots), expected, "combine")
    assert (expected[n_tokens:] == 0).all()


def test_weight_gradients_round_once():
    """Many blocks of one expert: the sum is as good as fp32 rounded once; rounding per block would be ten times off."""
    case = Case(1000, "all_to_one", "low", block_tokens=128)
    *_, dw1, dw2, dw3 = case.run(KERNELS)
    x, router, w1, w2, w3 = case.inputs
    slots = moe.build_slots(case.ids, router, case.first_expert, LOCAL, 128)
    w1_EHI, w2_EIH, w3_EHI = moe.kernel_weights(w1, w2, w3)
    dout = torch.nn.functional.pad(case.dout, (0, 0, 0, 24))
    _, g, u = moe.experts_forward_reference(x.detach(), w1_EHI, w3_EHI, w2_EIH, slots)
    grads = moe.experts_backward_reference(dout, g, u, w1, w3, w2, slots)[1:4]
    exact = moe.weight_gradients_reference(x.detach().double(), dout.double(), *(t.double() for t in grads), slots)
    for actual, expected in zip((dw1, dw2, dw3), exact, strict=True):
        assert (
            actual.double() - expected
        ).norm() / expected.norm() < 2.0e-3  # one bf16 rounding: 2^-9 / sqrt(3) ~ 1e-3


# ------------------------------------------------------------------------------------------------------------------
# Slots
# ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 700), st.integers(1, 4), st.integers(1, 6), st.sampled_from([128, 256]))
def test_slots_hold_every_local_pair_once_and_visits_cover_the_blocks(seed, T, K, E, B):
    torch.manual_seed(seed)
    n_experts, first = 8, int(torch.randint(0, 9 - E, ()))
    skew = torch.rand(n_experts) * torch.randint(0, 4, ()) + torch.rand(T, n_experts)
    ids = skew.topk(K).indices
    ids[torch.rand(T) < 0.1] = -1
    router = torch.rand(T, K)
    slots = moe.build_slots(ids, router, first, E, B)
    N = moe.num_blocks(T, K, E, n_experts, B)
    assert slots.token_NB.shape == (N, B)
    integers = [t for t in slots if t is not slots.weight_NB]
    assert all(t.dtype == torch.int32 for t in integers)

    # Against a plain loop.
    starts, ids = slots.first_block_F.tolist(), ids.tolist()
    token, weight, pair_slot = slots.token_NB.view(-1).tolist(), slots.weight_NB.view(-1), slots.pair_slot_RK.tolist()
    used, seen = starts[-1], []
    for t, k in itertools.product(range(T), range(K)):
        slot, e = pair_slot[t][k], ids[t][k] - first
        if 0 <= e < E:
            assert starts[e] * B <= slot < starts[e + 1] * B
            assert token[slot] == t
            assert weight[slot] == router[t, k]
            seen.append(slot)
        else:
            assert slot == -1
    assert len(set(seen)) == len(seen) == int((slots.token_NB >= 0).sum())
    assert (slots.weight_NB[slots.token_NB < 0] == 0).all()
    assert (slots.pair_slot_RK[T:] == -1).all()
    assert used < N
    assert all(b > a for a, b in itertools.pairwise(starts))

    # Walk as the kernels do.
    owner = [e for e in range(E) for _ in range(starts[e], starts[e + 1])] + [E - 1]
    for walk, of_core in enumerate(slots.visits_WV.view(2, 2, N, moe.VISIT).tolist()):
        visited, stored = [], []
        assert of_core[0][0][moe.TRIPS] == of_core[1][0][moe.TRIPS], "unequal device loops hang"
        for visits in of_core:
            loaded = visits[0][moe.LOAD]
            for block, load, following, store, keep in (v[:5] for v in visits[: visits[0][moe.TRIPS]]):
                if walk == moe.BLOCK_WALK:
                    assert loaded == owner[block], "the weights in SBUF are not those of the block"
                    loaded = following if following < E else loaded
                assert keep == (load == E)
                visited.append(block)
                stored += [store] if store < E else []
        if walk == moe.BLOCK_WALK:
            assert sorted(visited) == list(range(used + used % 2))
        else:
            assert set(visited) == set(range(used))
            assert sorted(stored) == list(range(E))


def test_expert_walk_adds_every_block_once():
    """Between the start of an expert and its store, a core visits exactly the blocks of that expert."""
    ids = torch.rand(900, 8).topk(2).indices
    slots = moe.build_slots(ids, torch.rand(900, 2), 2, 5, 128)
    starts, N = slots.first_block_F.tolist(), len(slots.token_NB)
    for core in slots.visits_WV.view(2, 2, N, moe.VISIT)[1]:
        blocks = []
        for block, _, _, store, keep in core[: core[0, moe.TRIPS], :5].tolist():
            blocks = [*blocks, block] if keep else [block]
            if store < 5:
                assert blocks == list(range(starts[store], starts[store + 1]))


def test_shapes_do_not_depend_on_the_routing():
    cases = [Case(257, routing) for routing in ROUTINGS]
    shapes = [[t.shape for t in moe.build_slots(c.ids, c.inputs[1], 0, LOCAL, 128)] for c in cases]
    assert all(s == shapes[0] for s in shapes)


# ------------------------------------------------------------------------------------------------------------------
# The operator
# ------------------------------------------------------------------------------------------------------------------


def test_gradcheck_fp64():
    case = Case(3, "uniform", "high", dims=(128, 256), dtype=torch.float64)
    case.ids = torch.tensor([[4, 7], [5, 1], [7, 6]])

    def layer(*inputs):
        x, router, *weights = inputs
        options = {"first_expert": case.first_expert, "block_tokens": 128, "backend": "reference"}
        return moe.expert_layer(x, case.ids, router, *weights, **options)

    def three_numbers(router):
        return (layer(case.inputs[0], router, *case.inputs[2:]) * case.dout).sum(1)

    # Fast mode: random projections of the Jacobian. The six router weights also one by one.
    assert torch.autograd.gradcheck(layer, case.inputs, fast_mode=True)
    assert torch.autograd.gradcheck(three_numbers, case.inputs[1])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")  # it is meant to be on
@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_no_unwritten_memory_reaches_autograd(backend):
    """Blocks beyond the used ones hold NaN on purpose; no gradient that autograd hands on may contain one."""
    case = Case(130, "uniform", "high")
    with torch.autograd.detect_anomaly(check_nan=True):
        case.layer(backend).backward(case.dout)


class CountZeros(TorchDispatchMode):
    """Shapes of the zero tensors that are made while it is active."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "zeros" in func.name():
            self.shapes.append(tuple(out.shape))
        return out


def test_backward_fills_no_zeros_for_gate_and_up():
    """They are outputs without a gradient: two slot tensors of zeros per layer would be pure waste."""
    case = Case(130, "uniform", "high", dims=(256, 384))
    out = case.layer("reference")
    with CountZeros() as zeros:
        out.backward(case.dout)
    assert not [shape for shape in zeros.shapes if shape[-1:] == (384,)], zeros.shapes


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_compile_fullgraph(backend, compiler):
    case = Case(130, "uniform", "high")
    eager = case.run(backend)
    compiled = torch.compile(case.layer, fullgraph=True, backend=compiler)
    out = compiled(backend)
    for a, b in zip(eager, [out, *torch.autograd.grad(out, case.inputs, case.dout)], strict=True):
        assert torch.equal(a, b)


def save_everything(ctx, op, *args, **kwargs):
    is_ours = op is torch.ops.qwen3_moe.experts_forward.default
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_activation_checkpointing(backend, selective, monkeypatch):
    case = Case(130, "uniform", "high")
    plain = case.run(backend)
    calls = []
    name = "combine_reference" if backend == "reference" else "_combine"
    original = getattr(moe, name)
    monkeypatch.setattr(moe, name, lambda *args: calls.append(1) or original(*args))
    options = {"context_fn": lambda: create_selective_checkpoint_contexts(save_everything)} if selective else {}
    out = checkpoint(case.layer, backend, use_reentrant=False, **options)
    for a, b in zip(plain, [out, *torch.autograd.grad(out, case.inputs, case.dout)], strict=True):
        assert torch.equal(a, b)
    assert len(calls) == (2 if selective else 3)  # forward, backward, and the recomputed forward


def test_saved_tensors_are_what_the_plan_says():
    case = Case(130, "uniform", "high", dims=(256, 384))
    slots = moe.build_slots(case.ids, case.inputs[1], case.first_expert, LOCAL, 128)
    N, B = slots.token_NB.shape

    def saved(function):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append((t.dtype, *t.shape)) or t, lambda t: t):
            out = function()
        out.sum().backward()
        return [s for s in shapes if s[0] == torch.bfloat16]

    w = [tuple(t.shape) for t in case.inputs[2:]]
    expected = [(130, 256), (N, B, 384), (N, B, 384), *w]
    assert sorted(s[1:] for s in saved(lambda: case.layer("reference"))) == sorted(expected)
    assert saved(lambda: checkpoint(case.layer, "reference", use_reentrant=False)) == []


def test_checkpointing_keeps_no_slot_tensor_alive(monkeypatch):
    """After a checkpointed forward, the gate and up of its slots are gone."""
    case = Case(130, "uniform", "high")
    storages = []
    original = moe.experts_forward_reference

    def spy(*args):
        outputs = original(*args)
        storages.extend(torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in outputs)
        return outputs

    monkeypatch.setattr(moe, "experts_forward_reference", spy)
    out = case.layer("reference")
    gc.collect()
    assert [s.expired() for s in storages] == [True, False, False]  # y is combined and gone; gate and up are saved
    storages.clear()
    out = checkpoint(case.layer, "reference", use_reentrant=False)
    gc.collect()
    assert [s.expired() for s in storages] == [True, True, True]
    assert out.requires_grad


def test_operator_obeys_the_rules_of_torch_library():
    case = Case(130, "uniform", "high")
    x, router, *weights = case.inputs
    slots = moe.build_slots(case.ids, router.detach(), case.first_expert, LOCAL, 128)
    tables = (slots.weight_NB, slots.token_NB, slots.pair_slot_RK, slots.first_block_F, slots.visits_WV)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (x, *weights, *moe.kernel_weights(*weights), *tables, KERNELS)
    torch.library.opcheck(torch.ops.qwen3_moe.experts_forward.default, args, test_utils=tests)


def test_meta_and_fake_tensors():
    case = Case(130, "uniform", "high", dims=(256, 384))
    meta = [t.detach().to("meta").requires_grad_() for t in case.inputs]
    options = {"first_expert": case.first_expert, "block_tokens": 128, "backend": "reference"}
    out = moe.expert_layer(meta[0], case.ids.to("meta"), *meta[1:], **options)
    out.sum().backward()
    assert (out.device.type, out.shape, out.dtype) == ("meta", (130, 256), torch.bfloat16)
    assert [t.grad.shape for t in meta] == [t.shape for t in case.inputs]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in case.inputs]
        out = moe.expert_layer(fake[0], mode.from_tensor(case.ids), *fake[1:], **options)
        out.sum().backward()
    assert [t.grad.shape for t in fake] == [t.shape for t in case.inputs]


@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_kept_forward_weights_change_nothing(backend):
    case = Case(130, "uniform", "high")
    x, router, *weights = case.inputs
    options = {"first_expert": case.first_expert, "block_tokens": 128, "backend": backend}
    kept = moe.kernel_weights(*weights)
    out = moe.expert_layer(x, case.ids, router, *weights, **options, forward_weights=kept)
    assert torch.equal(out, case.layer(backend))
    assert not any(w.requires_grad for w in kept)


# ------------------------------------------------------------------------------------------------------------------
# Limits and choices
# ------------------------------------------------------------------------------------------------------------------

TARGET = {"n_tokens": 4096, "hidden": 2048, "expert_width": 768, "n_experts": 128, "n_local_experts": 32}
TARGET |= {"top_k": 8, "block_tokens": 256}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tokens": 100}, "block_tokens = 100; choose one of 128, 256, 512, 1024"),
        ({"hidden": 2000}, "hidden = 2000; it must be a multiple of 128"),
        ({"hidden": 0}, "hidden = 0"),
        ({"expert_width": 770}, "expert_width = 770; it must be a multiple of 128"),
        ({"n_tokens": 0}, "n_tokens = 0; it must be at least 1"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_k": 129}, "top_k = 129 with n_experts = 128"),
        ({"n_local_experts": 200}, "n_local_experts = 200 with n_experts = 128"),
        ({"hidden": 4096, "expert_width": 1536}, "bytes of SBUF per partition; trn2 has 212,464"),
        ({"block_tokens": 1024}, "weight_gradients with hidden = 2048, .*block_tokens = 1024 needs .* bytes of SBUF"),
        ({"n_tokens": 400_000}, "the limit is 4 GiB"),
    ],
)
def test_unsupported_sizes_are_refused_by_name(change, message):
    moe.check_shapes(**TARGET)
    with pytest.raises(ValueError, match=message):
        moe.check_shapes(**(TARGET | change))


@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_layer_refuses_before_anything_runs(backend, monkeypatch):
    def never(*_):
        raise AssertionError("slots were built before the refusal")

    case = Case(5)
    monkeypatch.setattr(moe, "build_slots", never)
    x, router, w1, w2, w3 = case.inputs
    good = {"first_expert": 0, "block_tokens": 128, "backend": backend}
    bad = [
        ((x, case.ids, router, w1, w2, w3), good | {"block_tokens": 100}, "block_tokens = 100"),
        ((x, case.ids, router, w1, w2, w3), good | {"backend": "auto"}, "backend = 'auto'"),
        ((x[0], case.ids, router, w1, w2, w3), good, "x has shape"),
        ((x, case.ids[:4], router, w1, w2, w3), good, "topk_ids has shape"),
        ((x, case.ids, router[:, :1], w1, w2, w3), good, "topk_weights has shape"),
        ((x, case.ids, router, w1, w1, w3), good, "w2 has shape"),
        ((x, case.ids, router, w1, w2, w2), good, "w3 has shape"),
        ((x, case.ids, router, w1.float(), w2, w3), good, "w1 is torch.float32 and x is torch.bfloat16"),
        ((x.half(), case.ids, router, w1.half(), w2.half(), w3.half()), good, "x is torch.float16"),
        ((x[:, :200], case.ids, router, w1[..., :200], w2[:, :200], w3[..., :200]), good, "hidden = 200"),
    ]
    for tensors, options, message in bad:
        with pytest.raises(ValueError, match=message):
            moe.expert_layer(*tensors, **options)


def test_kernels_take_bf16_only():
    case = Case(5, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"x is torch.float32.*{KERNELS} takes one of bfloat16"):
        case.layer(KERNELS)


def test_resolve_backend(monkeypatch):
    monkeypatch.setattr(moe, "NKI_IS_REAL", False)
    assert moe.resolve_backend("auto", "cpu") == "reference"
    assert moe.resolve_backend("auto", "cuda") == "reference"
    assert moe.resolve_backend("reference", "cpu") == "reference"
    assert moe.resolve_backend("interpret", "cpu") == "interpret"
    with pytest.raises(ValueError, match="'triton': choose one of auto, nki, simulate, interpret, reference"):
        moe.resolve_backend("triton", "cpu")
    for kernels, device, message in [
        ("nki", "cpu", "cannot run on 'cpu'"),
        ("auto", "neuron", "needs the official nki package.*placeholder"),
        ("nki", "neuron", "needs the official nki package.*placeholder"),
        ("simulate", "cpu", "needs the official nki package.*placeholder"),
        ("interpret", "neuron", "cannot run on 'neuron'"),
        ("reference", "neuron", "cannot run on 'neuron'"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            moe.resolve_backend(kernels, device)


def test_resolve_backend_with_the_official_package(monkeypatch):
    monkeypatch.setattr(moe, "NKI_IS_REAL", True)
    monkeypatch.setattr(moe, "OPERATORS_ARE_NKI", False)
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    for kernels, device, message in [
        ("auto", "neuron", "torch_neuronx with nki_op"),
        ("simulate", "cpu", "NEURON_PLATFORM_TARGET_OVERRIDE=trn2"),
        ("interpret", "cpu", "NKI_STAND_IN=1"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            moe.resolve_backend(kernels, device)
    monkeypatch.setattr(moe, "OPERATORS_ARE_NKI", True)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert moe.resolve_backend("auto", "neuron") == "nki"
    assert moe.resolve_backend("simulate", "cpu") == "simulate"
    monkeypatch.delenv("NKI_SIMULATOR")
    with pytest.raises(RuntimeError, match="NKI_SIMULATOR=1"):
        moe.resolve_backend("simulate", "cpu")


@pytest.mark.parametrize(
    ("source", "is_real"),
    [
        ("raise RuntimeError('WRONG PACKAGE')", False),
        ("raise ImportError('this is a placeholder')", False),
        ("__version__ = '0.0.1'", False),
        (None, True),
    ],
)
def test_placeholder_package_is_recognised(source, is_real, tmp_path, monkeypatch):
    """PyPI's nki installs and is empty: importing the kernels must survive it, and must not take it for real."""
    package = tmp_path / "nki"
    package.mkdir()
    (package / "__init__.py").write_text(source or "")
    if is_real:
        (package / "isa.py").write_text("def nc_matmul(): pass")
        (package / "language.py").write_text("")
    monkeypatch.delenv("NKI_STAND_IN", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
        monkeypatch.delitem(sys.modules, name)
    module, real = moe._import_nki()
    assert real == is_real
    assert module is (sys.modules["nki"] if is_real else nki_interpreter)
    for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
        del sys.modules[name]
    monkeypatch.setenv("NKI_STAND_IN", "1")
    assert moe._import_nki() == (nki_interpreter, False)


@pytest.mark.parametrize("works", [True, False])
def test_operators_go_through_nki_op_where_it_exists(works, tmp_path, monkeypatch):
    """The Neuron path, with a recorder in place of torch_neuronx: the same names, and a schema can be inferred."""
    package = tmp_path / "torch_neuronx"
    package.mkdir()
    recorder = """
        import torch
        calls = {}
        def nki_op(name, fn=None, mutates_args={}):
            def register(function):
                calls[name] = torch.library.infer_schema(function, mutates_args=mutates_args)
                return function
            return register
    """
    (package / "__init__.py").write_text(textwrap.dedent(recorder) if works else "raise ImportError('WRONG PACKAGE')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(moe, "NKI_IS_REAL", True)
    monkeypatch.setattr(torch.library, "custom_op", lambda name, function, **_: MagicMock(name=name))
    forward, backward, through_nki_op = moe._make_operators()
    assert through_nki_op == works
    if works:
        assert (forward, backward) == (moe._experts_forward, moe._experts_backward)
        calls = sys.modules.pop("torch_neuronx").calls
        for name in ("experts_forward", "experts_backward"):
            assert (
                name + calls[f"qwen3_moe::{name}"]
                == str(getattr(torch.ops.qwen3_moe, name).default._schema).split("::")[1]
            )


def test_kernels_never_run_under_another_name():
    case = Case(5)
    for backend in {"nki", "simulate", "interpret"} - ({"nki", "simulate"} if moe.NKI_IS_REAL else {"interpret"}):
        with pytest.raises(RuntimeError, match=f"backend = '{backend}', but the kernels are bound to"):
            case.layer(backend)


def test_launch_on_one_core_is_refused():
    if moe.NKI_IS_REAL:
        pytest.skip("the simulator has its own rules for the grid")
    with pytest.raises(AssertionError, match="both cores"):
        moe.combine_kernel(torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(1, 256, 1, dtype=torch.int32))


def test_slot_bytes_count_what_the_layer_allocates():
    sizes = {"hidden": 256, "expert_width": 384, "n_experts": N_EXPERTS, "n_local_experts": LOCAL, "top_k": 2}
    bytes_of = moe.slot_bytes(130, **sizes, block_tokens=128)
    case = Case(130, "uniform", "high", dims=(256, 384))
    x, router, w1, w2, w3 = (t.detach() for t in case.inputs)
    slots = moe.build_slots(case.ids, router, case.first_expert, LOCAL, 128)
    kept = moe.kernel_weights(w1, w2, w3)
    y, g, u = moe.experts_forward_reference(x, kept[0], kept[2], kept[1], slots)
    grads = moe.experts_backward_reference(case.dout, g, u, w1, w3, w2, slots)
    assert bytes_of["saved"] == g.nbytes + u.nbytes
    assert bytes_of["forward"] == y.nbytes
    assert bytes_of["backward"] == sum(t.nbytes for t in grads[:4])


# ------------------------------------------------------------------------------------------------------------------
# Cost
# ------------------------------------------------------------------------------------------------------------------


PSUM_BANKS = {"experts_forward": 2, "experts_backward": 3, "weight_gradients": 2, "combine": 2}  # as documented


@needs_stand_in
def test_cost_targets_at_512_tokens_per_expert():
    """The widths of Qwen3-30B-A3B; 8 of its 32 local experts, since every expert costs the same."""
    costs = moe.cost_report(2048, 2048, 768, n_experts=32, n_local_experts=8, top_k=8, block_tokens=256)
    by_name = {c.kernel: c for c in costs}
    for name in ("experts_forward", "experts_backward", "weight_gradients"):
        assert 1 <= by_name[name].matmul_ratio <= 1.15, name
        assert 1 <= by_name[name].bytes_ratio <= 1.25, name
        assert by_name[name].bytes_per_descriptor > 2000
    for name, budget in moe.sbuf_bytes(2048, 768, 8, 256).items():
        assert 0.95 * budget <= by_name[name].peak_sbuf_bytes <= budget <= moe.SBUF_BYTES
        assert by_name[name].peak_psum_banks == PSUM_BANKS[name]


@needs_stand_in
@pytest.mark.parametrize(("dims", "block_tokens"), [((256, 640), 256), ((640, 128), 128), ((384, 384), 512)])
def test_sbuf_budget_is_what_the_kernels_use(dims, block_tokens):
    costs = moe.cost_report(1000, *dims, n_experts=8, n_local_experts=4, top_k=2, block_tokens=block_tokens)
    budgets = moe.sbuf_bytes(*dims, 2, block_tokens)
    for cost in costs:
        assert cost.peak_psum_banks <= PSUM_BANKS[cost.kernel]
        assert 0.85 * budgets[cost.kernel] <= cost.peak_sbuf_bytes <= budgets[cost.kernel], cost.kernel


@needs_stand_in
def test_weights_are_loaded_once_per_visit_of_an_expert():
    """Twice the tokens per expert, the same weight bytes: the other bytes double, the weights do not."""
    small, large = (
        moe.cost_report(T, 256, 384, n_experts=8, n_local_experts=8, top_k=2, block_tokens=128)[0].hbm_bytes
        for T in (512, 1024)
    )
    weights = 3 * 8 * 256 * 384 * 2
    tokens = small - weights
    assert abs(large - weights - 2 * tokens) < 0.02 * large


@needs_stand_in
def test_cost_report_command(capsys, monkeypatch):
    arguments = (
        "--tokens 128 --hidden 256 --expert-width 128 --experts 4 --local-experts 2 --top-k 2 --block-tokens 128"
    )
    monkeypatch.setattr(sys, "argv", ["nki_moe_kernels.py", *arguments.split()])
    moe.main()
    printed = capsys.readouterr().out
    for word in (
        "128 tokens, 64 routed",
        "1024 tokens, 512 routed",
        "weight_gradients",
        "bound",
        "matmul x",
        "bytes x",
    ):
        assert word in printed
