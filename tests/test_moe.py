"""Experts on every path and mesh: balancing loss (FR-19), load counters (FR-20), idle experts (FR-21), transposes."""

import functools
import shutil
from unittest import mock

import common
import loop

import pytest
import torch
from conftest import (
    M128,
    MOE_CASES,
    hf_oracle,
    make_config,
    make_model,
    packed_data,
    read_tensors,
    relative_error,
    rewrite_weights,
)
from test_training import per_expert
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import train_nki_moe

# Meshes on which one micro-step holds the same 4 sequences: (processes, [parallelism], local batch size)
SAME_MICRO_STEP = {
    "one": (1, {}, 4),
    "fsdp2_tp2": (4, dict(tensor_parallel_degree=2), 2),
    "hsdp": (4, dict(data_parallel_replicate_degree=2), 1),
}

LR = 1e4  # of one SGD step, so large that the change of a weight keeps all digits of its gradient


def random_layers(tokens=13, experts=8, top_k=2, layers=3, dtype=torch.float64):
    torch.manual_seed(0)
    logits = [torch.randn(tokens, experts, dtype=dtype, requires_grad=True) for _ in range(layers)]
    routing = [loop.Routing(x.softmax(-1), x.topk(top_k, dim=-1).indices) for x in logits]
    return logits, routing


def test_balancing_loss_is_transformers_own():
    logits, routing = random_layers()
    real = torch.ones(13, dtype=torch.bool)
    ours = loop.load_balancing_loss(routing, real, None)
    theirs = load_balancing_loss_func(tuple(logits), 8, 2)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for got, want in zip(
        torch.autograd.grad(ours, logits, retain_graph=True), torch.autograd.grad(theirs, logits), strict=True
    ):
        assert relative_error(got, want) < 1e-6


def test_balancing_loss_by_hand_ignores_padding():
    logits, routing = random_layers(tokens=6, experts=4, top_k=2, layers=2)
    real = torch.tensor([True, True, False, True, False, True])
    counts, probabilities = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for x in logits:
        for t in range(6):
            if real[t]:
                p = x[t].exp() / x[t].exp().sum()
                probabilities += p.detach()
                for e in x[t].argsort(descending=True)[:2]:
                    counts[e] += 1
    by_hand = 4 * (counts / 8 * probabilities / 8).sum()  # 4 real tokens x 2 layers
    assert loop.load_balancing_loss(routing, real, None).item() == pytest.approx(by_hand.item(), rel=1e-6)
    per_layer = loop.tokens_per_expert(routing, real)
    assert per_layer.sum(dim=0).tolist() == counts.tolist()
    assert per_layer.sum().item() == 4 * 2 * 2


def test_balancing_loss_lowers_the_winner():
    torch.manual_seed(0)
    hidden, gate = torch.rand(20, 5) + 0.5, torch.zeros(8, 5)
    gate[0] = 3.0  # expert 0 always wins by a wide margin
    gate.requires_grad_()
    x = hidden @ gate.T
    routing = [loop.Routing(x.softmax(-1), x.topk(2, dim=-1).indices)]
    loop.load_balancing_loss(routing, torch.ones(20, dtype=torch.bool), None).backward()
    assert gate.grad.norm() > 0
    after = (hidden @ (gate - 10 * gate.grad).T).softmax(-1)[:, 0].mean()
    assert after < x.softmax(-1)[:, 0].mean()


def oracle_with_balancing_loss(folder, config, coefficient):
    """Gradients of the Hugging Face model for cross-entropy plus coefficient x its own balancing loss, one batch."""
    model = hf_oracle(folder)
    tokenizer = common.load_tokenizer(folder, model.config)
    (batch,), counted = packed_data(config, tokenizer).next_step()
    router_logits = []  # with output_router_logits Transformers takes the 4-D mask for one of padding
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, output: router_logits.append(output[0]))
    mask = common.document_mask(batch.positions)
    logits = model(input_ids=batch.input_ids.long(), position_ids=batch.positions, attention_mask=mask).logits
    labels = batch.labels.long().flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    aux = load_balancing_loss_func(tuple(router_logits), model.config.num_experts, model.config.num_experts_per_tok)
    (loss / counted + coefficient * aux).backward()
    return aux.item(), per_expert({n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize(("path", "name"), MOE_CASES)
@pytest.mark.parametrize("mesh", SAME_MICRO_STEP)
def test_balancing_loss_in_training(train, models, texts, path, name, mesh):
    """The logged value and every gradient equal the Hugging Face model's, on every mesh."""
    world, parallelism, local = SAME_MICRO_STEP[mesh]
    sections = dict(
        parallelism=parallelism,
        data=dict(path=str(texts)),
        training=dict(local_batch_size=local),
        moe=dict(router_aux_loss_coef=0.5),
        optimizer=dict(lr=LR),
    )
    run = train(path, models[name], world=world, **sections)
    one = make_config(model=dict(path="x"), **sections | dict(training=dict(local_batch_size=4)))
    aux, gradients = oracle_with_balancing_loss(models[name], one, 0.5)
    assert run.metrics[0]["balance_loss"] == pytest.approx(aux, rel=1e-5)
    start, end = read_tensors(models[name]), run.tensors()
    for key, want in gradients.items():
        assert relative_error((start[key] - end[key]) / LR, want) < 2e-5, key


@pytest.mark.parametrize(("path", "name"), MOE_CASES)
def test_load_counters_do_not_depend_on_how_it_is_computed(train, models, path, name):
    """Full recompute, accumulation, ranks and a validation pass leave the counted load alone."""
    plain = train(path, models[name], training=dict(local_batch_size=4))
    want = plain.metrics[0]["expert_max_over_mean"]
    assert want > 1
    variants = {
        "recomputed": (1, dict(activation_checkpoint=dict(mode="full"), training=dict(local_batch_size=4))),
        "accumulated": (1, dict(training=dict(local_batch_size=1))),
        "ranks": (2, dict(training=dict(local_batch_size=2))),
        "tp": (2, dict(training=dict(local_batch_size=4), parallelism=dict(tensor_parallel_degree=2))),
    }
    for variant, (world, sections) in variants.items():
        run = train(path, models[name], world=world, **sections)
        assert run.metrics[0]["expert_max_over_mean"] == pytest.approx(want, rel=1e-6), variant


@pytest.fixture(scope="module")
def idle_models(models, tmp_path_factory):
    """M0 and M128 with gates for which experts 4 to 7 never win: the top two are {0, 2} or {1, 3}."""

    def change(name, w):
        if not name.endswith("mlp.gate.weight"):
            return w
        rows = torch.zeros_like(w)
        winner = 30 * w[0]  # far ahead: AdamW moves the other rows a little, from rounding alone
        rows[0], rows[1], rows[2], rows[3] = winner, -winner, 0.9 * winner, -0.9 * winner
        return rows

    folders = {}
    for name in ("M0", "M128"):
        folders[name] = tmp_path_factory.mktemp("idle") / name
        shutil.copytree(models[name], folders[name])
        rewrite_weights(folders[name], change)
    return folders


IDLE_MESHES = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "tp2": (2, dict(tensor_parallel_degree=2)),  # hf and nki_moe: the second rank owns idle experts only
    "ep2": (2, dict(expert_parallel_degree=2)),
}


@pytest.mark.parametrize(("path", "name"), MOE_CASES)
def test_idle_experts_only_decay(train, idle_models, path, name):
    """5 AdamW steps: finite, idle experts shrink by the weight decay alone, and every mesh gives the same weights."""
    lr, decay, steps = 1e-4, 1.0, 5
    start, first = read_tensors(idle_models[name]), None
    for mesh, (world, parallelism) in IDLE_MESHES.items():
        if mesh == "ep2" and path != "native":
            continue  # refused there, see test_config.py
        run = train(
            path,
            idle_models[name],
            world=world,
            prepare=dirty_allocator,
            parallelism=parallelism,
            training=dict(steps=steps, local_batch_size=2),
            optimizer=dict(name="AdamW", lr=lr, weight_decay=decay),
        )
        tensors = run.tensors()
        for key, w in tensors.items():
            assert torch.isfinite(w).all(), (mesh, key)
            if any(f".experts.{e}." in key for e in range(4, 8)):
                want = start[key].float() * (1 - lr * decay) ** steps
                assert relative_error(w, want) < 1e-6 < relative_error(w, start[key]), (mesh, key)
        first = first or tensors
        assert max(relative_error(tensors[k], first[k]) for k in first) < 2e-3, mesh


class dirty_allocator:
    """Fill memory that the next allocations will reuse with NaN."""

    def __enter__(self):
        blocks = [torch.full((n,), float("nan")) for n in (64, 1024, 4096, 65536) for _ in range(50)]
        del blocks

    def __exit__(self, *_):
        pass


class watch_transposes:
    """Count the refreshes of a run, and compare the transposes with their weights in every forward pass."""

    def __init__(self, refreshes: int):
        self.wanted, self.refreshes, self.passes = refreshes, 0, 0

    def __enter__(self):
        weights, layer = train_nki_moe.ExpertWeights, train_nki_moe.kernels.expert_layer
        refresh = weights.refresh

        def counted_refresh(module):
            self.refreshes += 1
            refresh(module)

        def checked_layer(x, ids, scores, *parameters, forward_weights, **options):
            self.passes += 1
            for w, transpose in zip(parameters, forward_weights, strict=True):
                assert transpose.is_contiguous()
                assert torch.equal(transpose, w.transpose(1, 2))
            return layer(x, ids, scores, *parameters, forward_weights=forward_weights, **options)

        self.patches = [
            mock.patch.object(weights, "refresh", counted_refresh),
            mock.patch.object(train_nki_moe.kernels, "expert_layer", checked_layer),
        ]
        for patch in self.patches:
            patch.start()

    def __exit__(self, error, *_):
        for patch in self.patches:
            patch.stop()
        assert error or (self.passes > self.refreshes == self.wanted), (self.passes, self.refreshes, self.wanted)


# (processes, [parallelism], experts); few: more FSDP ranks than experts of a TP rank, so torchtitan cuts them by width
TRANSPOSED = {
    "one": (1, {}, 8),
    "fsdp2_tp2": (4, dict(tensor_parallel_degree=2), 8),
    "fsdp2_tp2_few": (4, dict(tensor_parallel_degree=2), 2),
    "hsdp2_never": (4, dict(data_parallel_replicate_degree=2, fsdp_reshard_after_forward="never"), 8),
}


@pytest.mark.parametrize("layout", TRANSPOSED)
def test_expert_weights_are_transposed_once_per_step(train, texts, tmp_path, layout):
    """Whatever the accumulation, recomputation and validation; a resumed run starts with those of its checkpoint."""
    world, parallelism, experts = TRANSPOSED[layout]
    folder = make_model(tmp_path / "in", **M128 | dict(num_hidden_layers=1, num_experts=experts))
    sections = dict(
        parallelism=parallelism, activation_checkpoint=dict(mode="full"), checkpoint=dict(enable=True),
        validation=dict(path=str(texts), freq=1, steps=1),
    )  # fmt: skip
    for start, steps in ((0, 2), (2, 3)):
        training = dict(steps=steps, global_batch_size=8)
        watch = functools.partial(watch_transposes, 1 + steps - start)
        run = train("nki_moe", folder, world, prepare=watch, folder=tmp_path / "run", training=training, **sections)
    assert "resumed from" in run.log
    assert not any("forward_w" in name for name in run.tensors())
