"""Model FLOPs against torch's counter, the peak table, and shapes that a compiler sees once."""

import contextlib
import importlib
import io
import json
from unittest import mock

import metrics

import pytest
import torch
from conftest import D0, M0, make_config, refused
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import nki_moe_kernels as kernels


@pytest.mark.parametrize(
    "changes",
    [{}, dict(tie_word_embeddings=True), dict(num_experts=8), dict(num_experts=16, num_experts_per_tok=3)],
)
def test_flops_per_token_equal_the_counter(changes):
    """Equal but for attention: eager attention computes all L x L scores, the formula counts the causal half."""
    moe = "num_experts" in changes
    c = (Qwen3MoeConfig if moe else Qwen3Config)(**(M0 if moe else D0) | changes)
    experts = {"experts_implementation": "eager"} if moe else {}  # plain matmuls, which the counter knows
    model = AutoModelForCausalLM.from_config(c, attn_implementation="eager", **experts)
    seq_len, batch = 64, 2
    ids = torch.randint(0, c.vocab_size, (batch, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    attention = 6 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * seq_len
    assert counter.get_total_flops() == batch * seq_len * (metrics.flops_per_token(c, seq_len) + attention)
    assert metrics.parameter_counts(c)[0] == sum(p.numel() for p in model.parameters())


def test_peaks():
    assert metrics.peak_flops(torch.device("cpu")) is None
    names = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "Other": None,
    }
    for name, peak in names.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
            assert metrics.peak_flops(torch.device("cuda")) == peak
    assert metrics.PEAK_FLOPS["neuron"] == 667e12 / 4


def test_an_unknown_device_prints_no_mfu(train, models):
    run = train("native", models["D0"])
    assert "MFU n/a" in run.log
    assert "mfu" not in (run.folder / "metrics.jsonl").read_text()


def test_profile(train, models):
    """A trace of exactly the chosen steps, also after the run was resumed."""
    run = train("native", models["D0"], training=dict(steps=4), profiling=dict(enable=True, step=2, steps=2))
    (file,) = (run.folder / "profile").iterdir()
    assert file.name == "steps-2-3.json"
    assert file.read_text().count('"ProfilerStep#') >= 2
    assert "profile      " in run.log


def test_compile_backend_belongs_to_the_device(train, models):
    message = "[compile] backend = 'neuron' on cpu: needs a Neuron device"
    refused(lambda: train("native", models["D0"], compile=dict(enable=True, backend="neuron")), message)


def shapes_of_a_run(path, config):
    """In a worker: every distinct shape and dtype of what the model was given, and of the kernels' slot tables."""
    script, seen, slots = importlib.import_module(f"train_{path}"), set(), set()
    forward, build_slots = script.hidden_states, kernels.build_slots

    def shapes(tensors):
        return tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)

    def record(model, batch, document_mask):
        seen.add(shapes(batch))
        return forward(model, batch, document_mask)

    def record_slots(*arguments):
        made = build_slots(*arguments)
        slots.add(shapes(made))
        return made

    patches = (
        mock.patch.object(script, "hidden_states", record),
        mock.patch.object(kernels, "build_slots", record_slots),
    )
    with patches[0], patches[1], contextlib.redirect_stdout(io.StringIO()):
        script.main(config)
    return seen, slots


@pytest.mark.parametrize(("path", "model"), [("hf", "D0"), ("native", "M0"), ("nki_moe", "M128")])
def test_shapes_do_not_change_nor_losses_with_the_logging(workers, models, texts, tmp_path, path, model):
    """FR-35: ragged rows, accumulation, validation with a partial last batch and a sample change no shape."""
    config = make_config(
        model=dict(path=str(models[model])), data=dict(path=str(texts)), job=dict(dump_folder=str(tmp_path)),
        training=dict(steps=8, local_batch_size=2, global_batch_size=8), optimizer=dict(lr=1e-3),
        validation=dict(path=str(texts), freq=7, steps=100), sample=dict(prompt="def", max_new_tokens=3),
        export=dict(enable=False),
    )  # fmt: skip
    losses = {}
    for log_freq in (1, 7):
        config.metrics.log_freq = log_freq
        for seen, slots in workers.run(2, shapes_of_a_run, path, config):
            assert seen == {(((2, 32), "int32"), ((2, 32), "int32"), ((2, 32), "int64"), ((2, 32), "bool"))}
            assert len(slots) == (1 if path == "nki_moe" else 0)
        file = tmp_path / path / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        losses[log_freq] = {line["step"]: line["loss"] for line in lines if "loss" in line}
        file.unlink()
    assert losses[7] == {step: losses[1][step] for step in (1, 7, 8)}
