"""The three paths against the Hugging Face model in fp32, and against themselves on every mesh."""

import common

import pytest
import torch
from conftest import CASES, hf_oracle, make_config, relative_error

# (processes, [parallelism]) of every layout that must give the same numbers
LAYOUTS = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "tp2": (2, dict(tensor_parallel_degree=2)),
    "tp2_no_sp": (2, dict(tensor_parallel_degree=2, enable_sequence_parallel=False)),
    "fsdp2_tp2": (4, dict(tensor_parallel_degree=2)),
    "hsdp": (4, dict(data_parallel_replicate_degree=2)),
}


def oracle_step(folder, config, lr):
    """Loss, gradient norm and weights after one SGD step of the Hugging Face model on the run's own first step."""
    model = hf_oracle(folder)
    tokenizer = common.load_tokenizer(folder, model.config)
    batches, counted = common.PackedText(config, config.data.path, tokenizer, 0, 1).next_step()
    total = 0.0
    for batch in batches:
        mask = common.document_mask(batch.positions) if config.data.document_mask else None
        logits = model(input_ids=batch.input_ids.long(), position_ids=batch.positions, attention_mask=mask).logits
        labels = batch.labels.long().flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
        (loss / counted).backward()
        total += loss.item() / counted
    parameters = dict(model.named_parameters())
    start = {n: p.detach().clone() for n, p in per_expert(parameters).items()}
    norm = torch.stack([p.grad.norm() for p in parameters.values() if p.grad is not None]).norm().item()
    updated = {n: (p - lr * p.grad).detach() for n, p in parameters.items()}
    return total, norm, per_expert(updated), start


def per_expert(tensors):
    """Transformers' fused experts under the names of its files."""
    out = {}
    for name, w in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, one in enumerate(w):
                for kind, half in zip(("gate", "up"), one.chunk(2), strict=True):
                    out[name.replace("gate_up_proj", f"{e}.{kind}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): one for e, one in enumerate(w)}
        else:
            out[name] = w
    return out


def assert_same_step(run, oracle, lr, tolerance=1e-5):
    """Loss, norm, every parameter's gradient and every weight of `run` equal the oracle's."""
    loss, norm, weights, start = oracle
    assert run.losses == pytest.approx([loss], rel=tolerance)
    assert run.norms == pytest.approx([norm], rel=tolerance)
    got = run.tensors()
    assert set(got) == set(weights)
    for name, want in weights.items():
        assert relative_error(got[name], want) < tolerance, name
        if (start[name] - want).norm() > 0:
            gradient, want_gradient = (start[name] - got[name]) / lr, (start[name] - want) / lr
            assert relative_error(gradient, want_gradient) < 2 * tolerance, f"gradient of {name}"


# The hf path refuses TP without sequence parallelism, see test_config.py.
@pytest.mark.parametrize(
    ("path", "name", "layout"), [(p, n, lay) for p, n in CASES for lay in LAYOUTS if (p, lay) != ("hf", "tp2_no_sp")]
)
def test_one_step(train, models, texts, path, name, layout):
    world, parallelism = LAYOUTS[layout]
    sections = dict(parallelism=parallelism, optimizer=dict(lr=1.0), data=dict(path=str(texts)))
    run = train(path, models[name], world, **sections)
    assert_same_step(run, oracle_step(models[name], make_config(model=dict(path="x"), **sections), 1.0), 1.0)
