"""Training steps against a computation in double precision, written from the formulas and not from our code.

Gradients are those of the Hugging Face model in fp64; the loss, AdamW (Loshchilov & Hutter, arXiv:1711.05101,
algorithm 2), clipping and the schedule are written out here in NumPy.
"""

import json
import math
import re

import numpy as np
import pytest
import torch
from conftest import MOE_CASES, hf_oracle, relative_error, write_tokens
from test_training import per_expert

# Documents of all lengths up to a whole sequence, of which another part counts in each: no two sequences count alike.
DOCUMENTS = [[(i * 53 + k * 37) % 290 for k in range(2 + (i * 11) % 15)] for i in range(48)]
COUNTED = [[k > (i * 7) % 5 for k in range(len(d))] for i, d in enumerate(DOCUMENTS)]
SEQUENCES = 28  # that the documents fill, packed by best fit: one epoch is a step
LR, BETA1, BETA2, EPS, DECAY, MAX_NORM = 3e-3, 0.8, 0.9, 1e-6, 0.3, 0.5
STEPS, WARMUP, DECAY_STEPS, MIN_FACTOR = 6, 2, 3, 0.1
RATES = [  # linear warmup, constant, then cosine from 1 towards 0.1, which step 7 would have
    LR * f for f in (0.5, 1.0, 1.0, 1.0, *(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 3)) for k in (1, 2)))
]


def double_precision_run(folder, decay_embeddings: bool):
    """(losses, norms, weights) of steps that train on all documents each."""
    model = hf_oracle(folder).double()
    model.set_experts_implementation("eager")  # torch's grouped matmul has no fp64
    weights = dict(model.named_parameters())
    first = {name: np.zeros(tuple(w.shape)) for name, w in weights.items()}
    second = {name: np.zeros(tuple(w.shape)) for name, w in weights.items()}
    losses, norms = [], []
    for t in range(1, STEPS + 1):
        total, counted = torch.zeros((), dtype=torch.float64), 0
        for d in range(len(DOCUMENTS)):  # each alone: it sees no other
            log_p = model(input_ids=torch.tensor([DOCUMENTS[d]])).logits[0].log_softmax(-1)
            for k in range(1, len(DOCUMENTS[d])):  # its first token follows nothing, its last predicts nothing
                if COUNTED[d][k]:
                    total, counted = total - log_p[k - 1, DOCUMENTS[d][k]], counted + 1
        model.zero_grad()
        (total / counted).backward()
        gradients = {
            name: w.grad.numpy() if w.grad is not None else 0 * w.detach().numpy() for name, w in weights.items()
        }
        norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        losses, norms = [*losses, total.item() / counted], [*norms, norm]
        for name, w in weights.items():
            g = gradients[name] * min(1, MAX_NORM / norm)
            first[name] = BETA1 * first[name] + (1 - BETA1) * g
            second[name] = BETA2 * second[name] + (1 - BETA2) * g**2
            step = first[name] / (1 - BETA1**t) / (np.sqrt(second[name] / (1 - BETA2**t)) + EPS)
            decayed = w.ndim > 1 and (decay_embeddings or not re.search("embed|lm_head", name))
            step = step + (DECAY * w.detach().numpy() if decayed else 0)
            w.data -= RATES[t - 1] * torch.from_numpy(step)
    return losses, norms, per_expert({name: w.detach() for name, w in weights.items()})


MESHES = {
    "one": (1, {}),
    "hsdp": (4, dict(data_parallel_replicate_degree=2)),
    "fsdp x tp": (4, dict(tensor_parallel_degree=2)),
}
SIX_STEPS = [
    *[(path, name, mesh, True) for path, name in (("native", "D0"), ("hf", "D0t"), *MOE_CASES) for mesh in MESHES],
    *[(path, name, "one", False) for path, name in (("native", "D0"), ("native", "D0t"), ("hf", "M0"))],
]


@pytest.mark.parametrize(("path", "name", "mesh", "decay_embeddings"), SIX_STEPS)
def test_six_steps_in_double_precision(train, models, tmp_path, path, name, mesh, decay_embeddings):
    """Every step trains on all documents, accumulated over micro-steps of ragged counts."""
    world, parallelism = MESHES[mesh]
    file = write_tokens(tmp_path / "a.jsonl", DOCUMENTS, COUNTED)
    run = train(
        path, models[name], world, parallelism=parallelism,
        data=dict(path=str(file), format="tokens", document_mask=True),
        training=dict(seq_len=16, steps=STEPS, global_batch_size=SEQUENCES, max_norm=MAX_NORM),
        optimizer=dict(name="AdamW", lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY,
                       decay_embeddings=decay_embeddings),
        lr_scheduler=dict(warmup_steps=WARMUP, decay_ratio=DECAY_STEPS / STEPS, decay_type="cosine",
                          min_lr_factor=MIN_FACTOR),
    )  # fmt: skip
    losses, norms, weights = double_precision_run(models[name], decay_embeddings)
    assert norms[0] > MAX_NORM  # it does clip, at first
    assert [line["lr"] for line in run.metrics] == pytest.approx(RATES, rel=1e-12)
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert run.norms == pytest.approx(norms, rel=1e-5)
    start = per_expert({n: w.detach().double() for n, w in hf_oracle(models[name]).named_parameters()})
    for tensor, got in run.tensors().items():
        change = relative_error(got.double() - start[tensor], weights[tensor] - start[tensor])
        assert change < 2e-3, tensor  # of six updates, whose direction AdamW takes from the sign of tiny gradients too


@pytest.mark.parametrize(("max_norm", "clipped"), [(1.0, False), (0.999, True)])
def test_clipping_at_exactly_the_norm(max_norm, clipped):
    """Two gradients that make 0.6 and 0.8, so a norm of 1: not scaled at max_norm 1, and to 0.999 below it."""
    import loop

    parameters = [torch.zeros(3), torch.zeros(2, 2)]
    parameters[0].grad, parameters[1].grad = torch.tensor([0.0, 6.0, 0.0]), torch.full((2, 2), 4.0)
    norm = loop.clip_grad_norm(parameters, max_norm, counted=10)
    assert norm.item() == pytest.approx(1.0, rel=1e-7)
    after = math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in parameters))
    assert after == pytest.approx(0.999 if clipped else 1.0, rel=2e-6)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-30B-A3B-Instruct-2507"])
def test_rotary_tables_far_out_are_those_of_the_formula(name):
    """cos and sin of position x base^(-2i/d), at the last position of a shipped config, in fp64 against ours."""
    import common

    from torchtitan.models.common import CosSinRoPE

    import train_native

    config = json.loads((common.REPO / "configs/hf" / name / "config.json").read_text())
    base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    length, d = config["max_position_embeddings"], config["head_dim"]
    rope = CosSinRoPE(CosSinRoPE.Config(dim=d, max_seq_len=length, theta=base))
    table = rope._precompute_cache()
    for position in (1, 32_767, 32_768, length - 1):
        angle = position * np.float64(base) ** (-np.arange(0, d, 2) / d)
        want = np.concatenate([np.cos(angle), np.cos(angle), np.sin(angle), np.sin(angle)])
        error = np.abs(table[position].double().numpy().ravel() - want).max()
        assert error < length * 2**-24 * 2, (position, error)  # fp32 keeps 24 bits of the angle
    assert train_native.PATH == "native"
