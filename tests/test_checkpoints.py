"""Resume: bit for bit on the same mesh, without gap or repeat on another; never from something half-written."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import checkpoint
import common
from configs import schema

import pytest
import torch
from conftest import (
    ONE_PER_PATH,
    REPO,
    hf_oracle,
    make_config,
    make_model,
    packed_data,
    refused,
    relative_error,
)

ADAM = dict(name="AdamW", lr=1e-2, weight_decay=0.1)
TP2 = dict(tensor_parallel_degree=2)


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    """12 rows: an epoch lasts between four and five steps of 4 x 32 tokens."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [
        json.dumps({"text": f"{i:02d} " + f"for i in range({i}): print(i, {i * 37})\n" * (1 + i * 5 % 4)})
        for i in range(12)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def only_step(run, step: int, folder: Path) -> Path:
    """A dump folder that holds one checkpoint of `run` and nothing else."""
    name = run.folder.name
    shutil.copytree(run.folder / "checkpoints" / f"step-{step}", folder / name / "checkpoints" / f"step-{step}")
    return folder


def train_state(folder: Path, step: int) -> dict:
    return torch.load(folder / "checkpoints" / f"step-{step}" / "train_state.pt", weights_only=True)


def steps_in(folder: Path) -> list[str]:
    return sorted(f.name for f in (folder / "checkpoints").iterdir())


def equal(a, b) -> bool:
    """Of nested states that hold tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# ----- N == k + (N - k) -----


@pytest.mark.parametrize(("path", "name"), ONE_PER_PATH)
def test_resume_is_bit_exact_in_the_middle_of_an_epoch_and_after_its_end(train, models, rows, tmp_path, path, name):
    sections = dict(training=dict(steps=4, seq_len=64), optimizer=ADAM, data=dict(path=str(rows), shuffle=True))
    sections["lr_scheduler"] = dict(warmup_steps=2, decay_ratio=0.5)
    saving = sections | dict(checkpoint=dict(enable=True, interval=1, keep_latest_k=0))
    full = train(path, models[name], 2, **saving)
    config = make_config(model=dict(path="x"), **sections)
    epochs = [
        train_state(full.folder, k)["data"]["sequences"] / packed_data(config).sequences_per_epoch for k in (1, 3)
    ]
    assert 0 < epochs[0] < 1 < epochs[1] < 2
    for k in (1, 3):
        run = train(path, models[name], 2, folder=only_step(full, k, tmp_path / f"from{k}"), **saving)
        assert f"resumed from {run.folder / 'checkpoints' / f'step-{k}'}" in run.log
        assert (run.losses, run.norms) == (full.losses[k:], full.norms[k:])
        assert equal(train_state(run.folder, 4), train_state(full.folder, 4))
        for tensor, w in full.tensors().items():
            assert torch.equal(run.tensors()[tensor], w), tensor
    if path == "native":
        plain = train(path, models[name], 2, **sections)
        assert plain.losses == full.losses  # saving changes nothing


def test_the_rate_of_the_second_half_is_that_of_an_uninterrupted_run(train, models, rows, tmp_path):
    schedule = dict(warmup_steps=2, decay_ratio=0.5, decay_type="cosine")
    sections = dict(training=dict(steps=6), lr_scheduler=schedule, checkpoint=dict(enable=True, interval=4))
    full = train("native", models["D0"], **sections)
    again = train("native", models["D0"], folder=only_step(full, 4, tmp_path / "again"), **sections)
    rates = [[line["lr"] for line in run.metrics if "lr" in line] for run in (full, again)]
    assert rates[1] == rates[0][4:]
    assert rates[0][:4] == [0.5, 1, 1, 1]
    assert 0 < rates[0][5] < rates[0][4] < 1


@contextlib.contextmanager
def sigterm_at(step: int, rank: str):
    """In a worker: this process gets SIGTERM while it waits for the data of that step."""
    next_step, calls = common.PackedData.next_step, [0]

    def counting(self):
        calls[0] += 1
        if calls[0] == step and os.environ["RANK"] == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return next_step(self)

    with mock.patch.object(common.PackedData, "next_step", counting):
        yield


@pytest.mark.parametrize(("path", "name"), ONE_PER_PATH)
def test_sigterm_of_one_rank_saves_on_all_and_the_rerun_continues(train, models, rows, tmp_path, path, name):
    sections = dict(training=dict(steps=4), optimizer=ADAM, data=dict(path=str(rows)), checkpoint=dict(enable=True))
    full = train(path, models[name], 2, **sections)
    folder = tmp_path / "stopped"
    first = train(path, models[name], 2, folder=folder, prepare=functools.partial(sigterm_at, 3, "1"), **sections)
    assert first.losses == full.losses[:3]
    assert "SIGTERM after step 3, checkpoint saved" in first.log
    assert steps_in(first.folder) == ["step-3"]
    assert not (first.folder / "export").exists()
    second = train(path, models[name], 2, folder=folder, **sections)
    assert second.losses == full.losses
    assert all(torch.equal(second.tensors()[n], w) for n, w in full.tensors().items())


# ----- another mesh (FR-12) -----


@contextlib.contextmanager
def recording(folder: Path):
    """In a worker: write the sequences that this rank trains on, one line a step."""
    next_step = common.PackedData.next_step

    def record(self):
        step = next_step(self)
        lines = [ids for batch in step[0] for ids in batch.input_ids.tolist()]
        with open(folder / f"{self.rank}-{os.environ['RANK']}.jsonl", "a") as file:
            file.write(json.dumps(lines) + "\n")
        return step

    folder.mkdir(exist_ok=True)
    with mock.patch.object(common.PackedData, "next_step", record):
        yield


def recorded(folder: Path) -> list[list[list[int]]]:
    """[step][sequence], sorted; the ranks of a TP group must have read the same."""
    by_data_rank: dict[str, list] = {}
    for file in sorted(folder.glob("*.jsonl")):
        steps = [json.loads(line) for line in file.read_text().splitlines()]
        assert by_data_rank.setdefault(file.name.split("-")[0], steps) == steps
    return [sorted(ids for rank in step for ids in rank) for step in zip(*by_data_rank.values(), strict=True)]


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("native", (2, {}), (1, {})),
        ("native", (4, TP2), (4, {})),
        ("hf", (2, {}), (4, dict(data_parallel_replicate_degree=2))),
        ("nki_moe", (4, {}), (2, TP2)),
    ],
)
def test_another_mesh_continues_without_gap_or_repeat(train, models, rows, tmp_path, path, before, after):
    model = models["M128" if path == "nki_moe" else "D0"]
    data = dict(path=str(rows), shuffle=True)
    sections = dict(optimizer=dict(lr=0.1), data=data)
    config = make_config(model=dict(path="x"), **sections)
    stream = packed_data(config, common.load_tokenizer(model, mock.Mock(vocab_size=384)))
    want = [sorted(ids for batch in stream.next_step()[0] for ids in batch.input_ids.tolist()) for _ in range(4)]
    assert len({tuple(ids) for step in want[:4] for ids in step}) == 16  # so a repeat would be seen

    folder = tmp_path / "run"
    sections["checkpoint"] = dict(enable=True)
    hook = functools.partial(recording, tmp_path / "seen1")
    train(path, model, before[0], hook, folder, parallelism=before[1], training=dict(steps=2), **sections)
    hook = functools.partial(recording, tmp_path / "seen2")
    run = train(path, model, after[0], hook, folder, parallelism=after[1], training=dict(steps=4), **sections)
    assert recorded(tmp_path / "seen1") + recorded(tmp_path / "seen2") == want
    plain = train(path, model, training=dict(steps=4), **{k: v for k, v in sections.items() if k != "checkpoint"})
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, w in plain.tensors().items():
        assert relative_error(run.tensors()[name], w) < 1e-5, name


# ----- where a run starts (FR-09) -----


def test_without_a_complete_checkpoint_the_hf_weights_are_used_and_one_line_says_so(train, models, tmp_path):
    fresh = train("native", models["D0"], 2)
    assert f"start        fresh, from {models['D0']}; [checkpoint] enable = false" in fresh.log
    for name, inside in (
        ("empty", None),
        ("no metadata", "step-4"),
        ("backup", "backup-step-99"),
        ("old", "step-99.old"),
        ("half", "step-99.tmp"),
        ("padded", "step-099"),
    ):
        folder = tmp_path / name
        (folder / "native" / "checkpoints" / (inside or ".")).mkdir(parents=True)
        run = train("native", models["D0"], 2, folder=folder, checkpoint=dict(enable=True))
        assert run.losses == fresh.losses
        assert run.log.count("start  ") == 1
        assert f"start        fresh, from {models['D0']}; no complete checkpoint in {run.folder}" in run.log
        assert ("step-4 is incomplete and not used" in run.log) == (inside == "step-4")
        assert "step-1" in steps_in(run.folder)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(train, models, tmp_path):
    sections = dict(training=dict(steps=4), folder=tmp_path / "run")
    saved = train("native", models["D0"], 2, checkpoint=dict(enable=True, interval=2), **sections)
    again = functools.partial(train, "native", models["D0"], 2, **sections)
    refused(lambda: again(checkpoint=dict(enable=True, load_step=7)), "load_step = 7", "[2, 4]", world=2)
    # Going back to step 2 while step 4 stays: the next plain start would take step 4, of the branch left behind.
    refused(lambda: again(checkpoint=dict(enable=True, load_step=2)), "load_step = 2", "[4]", world=2)
    assert steps_in(saved.folder) == ["step-2", "step-4"]
    shutil.rmtree(saved.folder / "checkpoints" / "step-4")
    assert "resumed from" in again(checkpoint=dict(enable=True, load_step=2)).log


def test_a_finished_run_trains_nothing_more_and_a_shorter_one_is_refused(train, models, tmp_path):
    call = functools.partial(train, "hf", models["D0"], 2, folder=tmp_path / "run", checkpoint=dict(enable=True))
    first = call(training=dict(steps=2))
    tensors = first.tensors()
    shutil.rmtree(first.folder / "export")
    again = call(training=dict(steps=2))
    assert len(again.losses) == 2
    assert all(torch.equal(again.tensors()[n], w) for n, w in tensors.items())
    refused(lambda: call(training=dict(steps=1)), "step-2", "steps = 1", world=2)


@pytest.mark.parametrize("path", ["native", "hf"])
def test_a_checkpoint_of_another_model_or_path_is_refused(train, models, tmp_path, path):
    sections = dict(checkpoint=dict(enable=True), folder=tmp_path / "run")
    train(path, models["D0"], 2, **sections)
    other = make_model(tmp_path / "wider", intermediate_size=96)
    words = ("step-1", "intermediate_size: 80 there, 96 here", "dump_folder")
    refused(lambda: train(path, other, 2, **sections), *words, world=2)
    swapped = "hf" if path == "native" else "native"
    shutil.copytree(tmp_path / "run" / path, tmp_path / "run" / swapped)
    refused(lambda: train(swapped, models["D0"], 2, **sections), f"path: {path} there, {swapped} here", world=2)


def test_changed_data_is_refused(train, models, rows, tmp_path):
    data = tmp_path / "rows.jsonl"
    shutil.copy(rows, data)
    sections = dict(checkpoint=dict(enable=True), folder=tmp_path / "run", data=dict(path=str(data)))
    train("native", models["D0"], 2, **sections)
    data.write_text(data.read_text() + json.dumps({"text": "one more"}) + "\n")
    more = dict(training=dict(steps=2))
    refused(
        lambda: train("native", models["D0"], 2, **sections, **more),
        str(data),
        "not the checkpoint's",
        "-12-",
        "-13-",
        world=2,
    )


# ----- other settings than those of the checkpoint (FN-07) -----


@pytest.mark.parametrize(
    ("section", "key", "before", "after"),
    [
        ("data", "shuffle", True, False),
        ("debug", "seed", 42, 43),
        ("optimizer", "name", "SGD", "AdamW"),
        ("training", "seq_len", 32, 64),
    ],
)
def test_what_cannot_change_in_the_middle_of_a_run_is_refused(
    train, models, rows, tmp_path, section, key, before, after
):
    sections = dict(data=dict(path=str(rows), shuffle=True), checkpoint=dict(enable=True))
    first = train("native", models["D0"], folder=tmp_path / "run", **sections)
    written = (first.folder / "config.toml").read_text()
    sections = {**sections, "training": dict(steps=2)}
    sections[section] = {**sections.get(section, {}), key: after}
    words = (f"[{section}] {key} {before!r} -> {after!r}", "--job.dump_folder")
    refused(lambda: train("native", models["D0"], folder=tmp_path / "run", **sections), *words)
    assert (first.folder / "config.toml").read_text() == written


@pytest.mark.parametrize(("path", "name", "world"), [("native", "D0t", 1), ("hf", "D0", 2)])
def test_the_file_decides_over_the_optimizer_settings_of_the_checkpoint(
    train, models, rows, tmp_path, path, name, world
):
    """Weights after 2 + 2 steps against torch's own AdamW on the Hugging Face model, changed between."""
    old = dict(name="AdamW", lr=1e-2, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8)
    new = dict(name="AdamW", lr=3e-3, weight_decay=9.0, beta1=0.5, beta2=0.6, eps=1e-3)
    sections = dict(data=dict(path=str(rows)), checkpoint=dict(enable=True), folder=tmp_path / "run")
    train(path, models[name], world, optimizer=old, training=dict(steps=2), **sections)
    run = train(path, models[name], world, optimizer=new, training=dict(steps=4), **sections)
    changed = "changed: [training] steps 2 -> 4, [optimizer] lr 0.01 -> 0.003, [optimizer] beta1 0.9 -> 0.5"
    assert changed in run.log

    model = hf_oracle(models[name])
    matrices = [p for p in model.parameters() if p.ndim > 1]
    adam = torch.optim.AdamW([{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim == 1]}])
    config = make_config(model=dict(path="x"), data=dict(path=str(rows)))
    data = packed_data(config)
    for step in range(4):
        o = old if step < 2 else new
        for group, decay in zip(adam.param_groups, (o["weight_decay"], 0.0), strict=True):
            group |= dict(lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["eps"], weight_decay=decay)
        batches, counted = data.next_step()
        for b in batches:
            mask = common.document_mask(b.positions)
            logits = model(input_ids=b.input_ids.long(), position_ids=b.positions, attention_mask=mask).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), b.labels.long().flatten(), reduction="sum")
            (loss / counted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        adam.step()
        adam.zero_grad()
    exported = run.tensors()
    for tensor, w in model.named_parameters():
        if tensor in exported:
            assert relative_error(exported[tensor], w.detach()) < 1e-4, tensor


@pytest.mark.parametrize(("path", "name"), [("native", "D0"), ("hf", "M0"), ("nki_moe", "M128")])
def test_without_decay_the_embedding_rows_of_tokens_that_never_occur_stay(train, models, rows, tmp_path, path, name):
    """They get no gradient: decay alone shrinks them by 1 - lr * decay in each step (FN-24). Switched on resume too."""
    adam = dict(name="AdamW", lr=1e-2, weight_decay=0.1)
    sections = dict(data=dict(path=str(rows)), checkpoint=dict(enable=True), folder=tmp_path / "run")
    start = hf_oracle(models[name]).model.embed_tokens.weight.detach()
    never = start.shape[0] - 20  # rows that the tokenizer does not have
    first = train(path, models[name], 2, optimizer=adam, training=dict(steps=2), **sections)
    decayed = first.tensors()["model.embed_tokens.weight"]
    torch.testing.assert_close(decayed[never:], start[never:] * (1 - 1e-3) ** 2)
    spared = adam | dict(decay_embeddings=False)
    run = train(path, models[name], 2, optimizer=spared, training=dict(steps=4), **sections)
    assert "[optimizer] decay_embeddings True -> False" in run.log
    after = run.tensors()["model.embed_tokens.weight"]
    assert not torch.equal(after[:never], decayed[:never])
    assert torch.equal(after[never:], decayed[never:])


def test_every_key_of_the_schema_is_in_one_group_on_resume():
    keys = [key for group in schema.ON_RESUME.values() for key in group.split()]
    config = dataclasses.asdict(schema.Config())
    known = [f"{section}.{key}" for section, table in config.items() if isinstance(table, dict) for key in table]
    assert sorted(keys) == sorted(known)


@pytest.mark.parametrize("path", ["native", "hf"])
def test_an_output_that_cannot_be_written_is_refused_on_all_ranks(train, models, tmp_path, path):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "run"
    refused(lambda: train(path, models["D0"], 2, folder=folder), "dump_folder", str(folder), world=2)


# ----- damage (FR-11) -----


def smallest_data_file(step: Path) -> Path:
    return min(step.glob("*.distcp"), key=lambda f: f.stat().st_size)


DAMAGE = {
    "no meta.json": (lambda s: (s / "meta.json").unlink(), "no readable meta.json"),
    "meta.json is cut": (lambda s: (s / "meta.json").write_text('{"step": 6, "ident'), "no readable meta.json"),
    "meta.json is null": (lambda s: (s / "meta.json").write_text("null"), "no readable meta.json"),
    "meta.json lists nothing": (lambda s: (s / "meta.json").write_text('{"files": []}'), "no readable meta.json"),
    "no .metadata": (lambda s: (s / ".metadata").unlink(), ".metadata is missing"),
    "a data file is cut": (
        lambda s: os.truncate(smallest_data_file(s), smallest_data_file(s).stat().st_size // 2),
        "bytes instead of",
    ),
    "a data file is empty": (lambda s: os.truncate(smallest_data_file(s), 0), "has 0 bytes instead of"),
    "a rank's file is gone": (lambda s: smallest_data_file(s).unlink(), "is missing"),
    "no train_state.pt": (lambda s: (s / "train_state.pt").unlink(), "train_state.pt is missing"),
}


@pytest.fixture(scope="module")
def saved(workers, models, texts, tmp_path_factory):
    """A native run with checkpoints at 4 and 6 (2 was removed), its losses, and what one needs to continue it."""
    from conftest import run_main

    folder = tmp_path_factory.mktemp("saved")
    sections = dict(
        model=dict(path=str(models["D0"])), data=dict(path=str(texts)), job=dict(dump_folder=str(folder)),
        checkpoint=dict(enable=True, interval=2), training=dict(steps=6), optimizer=ADAM,
    )  # fmt: skip
    workers.run(2, run_main, "native", make_config(**sections))
    losses = [json.loads(line)["loss"] for line in (folder / "native" / "metrics.jsonl").read_text().splitlines()]
    return folder, losses


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(train, models, saved, tmp_path, what):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    assert steps_in(folder / "native") == ["step-4", "step-6"]
    (folder / "native" / "metrics.jsonl").unlink()
    hurt, reason = DAMAGE[what]
    hurt(folder / "native" / "checkpoints" / "step-6")
    sections = dict(checkpoint=dict(enable=True, interval=2), training=dict(steps=6), optimizer=ADAM)
    run = train("native", models["D0"], 2, folder=folder, **sections)
    warning = next(line for line in run.log.splitlines() if line.startswith("warning"))
    assert "step-6 is incomplete and not used" in warning
    assert reason in warning
    assert f"resumed from {run.folder / 'checkpoints' / 'step-4'}" in run.log
    assert run.losses == saved[1][4:]
    assert checkpoint.list_saved(run.folder / "checkpoints") == [(4, None), (6, None)]  # saved over the remains
    assert steps_in(run.folder) == ["step-4", "step-6"]


@contextlib.contextmanager
def save_fails_at(step: int):
    """In a worker: the disk is full when that step's data are written."""
    save = checkpoint.dcp.save

    def failing(state, checkpoint_id, **options):
        if checkpoint_id.name.startswith(f"step-{step}."):
            with contextlib.suppress(FileNotFoundError):  # the other rank has failed first
                (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return save(state, checkpoint_id=checkpoint_id, **options)

    with mock.patch.object(checkpoint.dcp, "save", failing):
        yield


def test_a_failed_save_leaves_the_older_ones(train, models, tmp_path):
    sections = dict(checkpoint=dict(enable=True, interval=2, keep_latest_k=1), training=dict(steps=6), optimizer=ADAM)
    folder = tmp_path / "run"
    hook = functools.partial(save_fails_at, 4)
    refused(
        lambda: train("native", models["D0"], 2, hook, folder, **sections), "the checkpoint of step 4", "GB free",
        "No space left", "the newest complete one is step-2", world=2,
    )  # fmt: skip
    assert steps_in(folder / "native") == ["step-2"]  # the half one does not keep the disk full
    run = train("native", models["D0"], 2, folder=folder, **sections)
    assert "step-2; not used" in run.log
    assert steps_in(run.folder) == ["step-6"]


def test_keep_zero_keeps_all_and_saving_again_replaces(train, models, tmp_path):
    sections = dict(checkpoint=dict(enable=True, interval=1, keep_latest_k=0), training=dict(steps=3))
    run = train("native", models["D0"], folder=tmp_path / "run", **sections)
    assert steps_in(run.folder) == ["step-1", "step-2", "step-3"]
    assert all(problem is None for _, problem in checkpoint.list_saved(run.folder / "checkpoints"))


def test_what_a_cut_off_save_left_is_removed_at_the_next_start(train, models, tmp_path):
    folder = tmp_path / "run"
    (folder / "native" / "checkpoints" / "step-437.tmp").mkdir(parents=True)
    run = train("native", models["D0"], folder=folder, checkpoint=dict(enable=True))
    assert steps_in(run.folder) == ["step-1"]


@pytest.mark.parametrize(("free", "fits"), [(10**9, True), (10**6, False)])
def test_a_disk_that_will_be_full_is_refused_before_the_first_step(train, models, tmp_path, free, fits):
    """FN-09: as many checkpoints as lie there at once, and the export. D0 has 82,112 parameters, 12 bytes each."""
    sections = dict(checkpoint=dict(enable=True, keep_latest_k=2, interval=1), training=dict(steps=5), optimizer=ADAM)
    folder, hook = tmp_path / "run", functools.partial(disk_of, free)
    if fits:
        return train("native", models["D0"], 2, hook, folder, **sections)
    parameters = sum(w.numel() for w in hf_oracle(models["D0"]).parameters())
    numbers = (f"3 checkpoints of {parameters * 12 / 1e9:.3f} GB", f"export of {parameters * 4 / 1e9:.3f} GB")
    refused(lambda: train("native", models["D0"], 2, hook, folder, **sections), "0.001 GB free", *numbers, world=2)
    return None


@contextlib.contextmanager
def disk_of(free_bytes: int):
    """In a worker: every disk has that much space left."""
    with mock.patch.object(checkpoint.shutil, "disk_usage", return_value=mock.Mock(free=free_bytes)):
        yield


def test_a_second_run_in_a_folder_is_told_who_has_it(train, models, tmp_path):
    """FN-10; the lock of a process that died is free."""
    from filelock import FileLock

    folder = tmp_path / "run" / "native"
    folder.mkdir(parents=True)
    (folder / ".lock_holder").write_text("process 7 on host a since 2026-01-02")
    with FileLock(folder / ".lock"):
        words = (str(folder), "in use by process 7 on host a since 2026-01-02", "--job.dump_folder")
        refused(lambda: train("native", models["D0"], 2, folder=tmp_path / "run"), *words, world=2)
        assert not (folder / "config.toml").exists()
    train("native", models["D0"], 2, folder=tmp_path / "run")
    assert re.match(rf"process \d+ on {re.escape(os.uname().nodename)} since 20", (folder / ".lock_holder").read_text())


def test_every_step_is_logged_once_after_a_resume(train, models, saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    shutil.rmtree(folder / "native" / "checkpoints" / "step-6")
    sections = dict(checkpoint=dict(enable=True, interval=2), training=dict(steps=6), optimizer=ADAM)
    run = train("native", models["D0"], 2, folder=folder, **sections)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert run.losses == saved[1]


@pytest.mark.parametrize(("path", "name"), ONE_PER_PATH)
def test_a_step_that_is_not_finite_names_its_documents(train, models, rows, path, name):
    """The first step of 4 sequences of 32 tokens: its documents by file and line, weights as they were."""
    sections = dict(optimizer=dict(lr=1e30), training=dict(steps=9), data=dict(path=str(rows)))
    message = refused(
        lambda: train(path, models[name], 2, **sections), "not finite", "weights were not updated", world=2
    )
    assert re.search(rf"look at the data of this step: {re.escape(str(rows))}: row \d+, .*: row \d+", message)


# ----- real processes -----

SLOW = """
import sys, time
sys.path.insert(0, {repo!r})
import checkpoint, common, train_native
save = checkpoint.dcp.save
def slow(state, checkpoint_id, **options):  # a slow disk: the data are there, the rename is not
    save(state, checkpoint_id=checkpoint_id, **options)
    if checkpoint_id.name == "step-4.tmp":
        print("in the middle of a save", flush=True)
        time.sleep(600)
checkpoint.dcp.save = slow
common.launch(train_native.main)
"""


def torchrun(script: Path, config: Path, tmp_path: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.Popen(
        [*command, str(config)], cwd=tmp_path, env=environment, text=True, bufsize=1,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for(process: subprocess.Popen, text: str) -> str:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} not in\n{''.join(lines)}")


def write_config(file: Path, **sections) -> schema.Config:
    config = make_config(**sections)
    file.write_text(schema.toml_text(config))
    return config


@pytest.mark.timeout(120)
def test_killed_in_the_middle_of_a_save(train, models, texts, tmp_path):
    """The whole job dies by SIGKILL while step 4 is being written; it starts again from step 2, twice."""
    sections = dict(checkpoint=dict(enable=True, interval=2, keep_latest_k=1), training=dict(steps=4), optimizer=ADAM)
    folder = tmp_path / "run"
    where = dict(model=dict(path=str(models["D0"])), data=dict(path=str(texts)), job=dict(dump_folder=str(folder)))
    write_config(tmp_path / "run.toml", **where, **sections)
    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(repo=str(REPO)))
    process = torchrun(script, tmp_path / "run.toml", tmp_path)
    try:
        wait_for(process, "in the middle of a save")
    finally:
        kill(process)
    assert steps_in(folder / "native") == ["step-2", "step-4.tmp"]
    run = train("native", models["D0"], 2, folder=folder, **sections)
    assert "step-2; not used" in run.log
    assert steps_in(run.folder) == ["step-4"]
    again = train("native", models["D0"], 2, folder=folder, **sections)
    assert "step-4; not used" in again.log


@pytest.mark.timeout(120)
def test_sigterm_through_torchrun_saves_and_every_rank_exits_with_0(train, models, texts, tmp_path):
    """To the workers, as Slurm and Kubernetes send it; test_launch.py sends it to run.sh."""
    sections = dict(checkpoint=dict(enable=True), training=dict(steps=100_000), optimizer=ADAM)
    folder = tmp_path / "run"
    where = dict(model=dict(path=str(models["D0"])), data=dict(path=str(texts)), job=dict(dump_folder=str(folder)))
    write_config(tmp_path / "run.toml", **where, **sections)
    process = torchrun(REPO / "train_native.py", tmp_path / "run.toml", tmp_path)
    try:
        wait_for(process, "step      2/")
        start = time.monotonic()
        for pid in children(process.pid):
            os.kill(pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        kill(process)
    assert process.returncode == 0, output
    assert time.monotonic() - start < 30
    step = int(re.search(r"SIGTERM after step (\d+), checkpoint saved", output)[1])
    assert steps_in(folder / "native") == [f"step-{step}"]
    sections["training"] = dict(steps=step + 1)
    again = train("native", models["D0"], 2, folder=folder, **sections)
    assert f"step-{step}; not used" in again.log


@pytest.mark.timeout(120)
def test_ranks_end_with_their_launcher(models, texts, tmp_path):
    """torchrun dies by SIGKILL: its ranks free the cores instead of waiting for each other."""
    where = dict(model=dict(path=str(models["D0"])), data=dict(path=str(texts)), job=dict(dump_folder=str(tmp_path)))
    write_config(tmp_path / "run.toml", **where, training=dict(steps=100_000))
    process = torchrun(REPO / "train_native.py", tmp_path / "run.toml", tmp_path)
    wait_for(process, "step      2/")
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").is_file() and Path(f"/proc/{pid}/cmdline").read_text() for pid in ranks):
        assert time.monotonic() < end
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if line.split()[1] == str(pid)]


def kill(process: subprocess.Popen) -> None:
    """End torchrun and its workers (which have sessions of their own) at once, as a lost machine does."""
    workers = children(process.pid)
    process.kill()
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):  # it saw its parent die first
            os.kill(pid, signal.SIGKILL)
    process.wait()
