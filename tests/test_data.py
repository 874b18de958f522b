"""Text data: what is read, how it is packed, where it continues, and the validation number."""

import functools
import gzip
import json
import shutil
from pathlib import Path

import common
from configs import schema

import pytest
import torch
from conftest import ONE_PER_PATH, SMALL_CASES, TOKENIZER, hf_oracle, make_config, refused

DOCUMENTS = [f"{i:02d}: " + "x = f(y)\n" * (i * 5 % 9) + f"# {i * i}" for i in range(30)]


def write(file: Path, documents=DOCUMENTS, column: str = "text") -> Path:
    """The documents as one file, in the format that its name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({column: d, "id": i}) + "\n" for i, d in enumerate(documents))
    if file.name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines.encode()))
    elif file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({column: pyarrow.array(documents, pyarrow.large_string()), "id": range(len(documents))})
        pyarrow.parquet.write_table(table, file, row_group_size=7)
    elif file.suffix == ".json":
        file.write_text(json.dumps([{column: d} for d in documents]))
    else:
        file.write_text(lines)
    return file


def packed(path: Path, rank: int = 0, ranks: int = 1, loop: bool = True, **keys) -> common.PackedText:
    sections = dict(data=dict(path=str(path), **keys.pop("data", {})), training=dict(seq_len=16) | keys)
    config = make_config(model=dict(path="x"), **sections)
    return common.PackedText(config, str(path), TOKENIZER(), rank, ranks, loop)


def take(stream: common.PackedText, steps: int) -> list[common.Batch]:
    """The micro-batches of some steps, each joined along dim 0."""
    return [common.Batch(*map(torch.cat, zip(*stream.next_step()[0], strict=True))) for _ in range(steps)]


def token_stream(documents=DOCUMENTS) -> list[int]:
    end = TOKENIZER().get_vocab()["<|endoftext|>"]
    return [i for d in documents for i in [*TOKENIZER().encode(d, add_special_tokens=False), end]]


# ----- packing -----


@pytest.mark.parametrize("document_mask", [False, True])
def test_every_token_once_in_sequences_of_exactly_seq_len(tmp_path, document_mask):
    want = token_stream()
    file, end = write(tmp_path / "a.jsonl"), TOKENIZER().get_vocab()["<|endoftext|>"]
    stream = packed(file, loop=False, global_batch_size=3, data=dict(document_mask=document_mask))
    inputs, labels, positions, total = [], [], [], 0
    while (step := stream.next_step()) is not None:
        for batch in step[0]:
            assert [(t.shape, t.dtype) for t in batch] == [((1, 16), torch.int32)] * 2 + [((1, 16), torch.int64)]
            inputs += batch.input_ids[0].tolist()
            labels += batch.labels[0].tolist()
            positions += batch.positions[0].tolist()
        total += step[1]
        assert step[1] == sum((b.labels != -100).sum() for b in step[0])
    assert inputs[: len(want) - 1] == want[:-1]  # the last token is only ever a label
    assert set(inputs[len(want) - 1 :]) <= {end}
    after_end = [i > 0 and want[i - 1] == end for i in range(len(want))]
    for i in range(len(want) - 1):
        skipped = document_mask and after_end[i + 1]
        assert labels[i] == (-100 if skipped else want[i + 1]), i
    assert set(labels[len(want) - 1 :]) <= {-100}
    assert total == len(want) - 1 - (len(DOCUMENTS) - 1 if document_mask else 0)
    for i in range(len(want) - 1):
        restart = i % 16 == 0 or (document_mask and after_end[i])
        assert positions[i] == (0 if restart else positions[i - 1] + 1)


def test_one_end_token_and_no_begin_token_whatever_the_tokenizer_adds(tmp_path):
    """Qwen ends documents with <|endoftext|>, also where eos is <|im_end|>; a post-processor must add nothing."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = type(TOKENIZER()).from_pretrained(save_tokenizer(tmp_path / "t"))
    end, turn = (tokenizer.get_vocab()[t] for t in ("<|endoftext|>", "<|im_end|>"))
    assert tokenizer.eos_token_id == turn
    processor = TemplateProcessing(
        "<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 5), ("<|im_end|>", turn)]
    )
    tokenizer.backend_tokenizer.post_processor = processor
    assert tokenizer.encode("ab")[-1] == turn  # it would
    ids, counted = common.encode_text({"text": "ab"}, "text", tokenizer, common.document_end_id(tokenizer), "")
    assert ids == [*TOKENIZER().encode("ab", add_special_tokens=False), end]
    assert counted == [True] * len(ids)
    assert common.encode_text({"text": ""}, "text", tokenizer, end, "") == ([], [])


def save_tokenizer(folder: Path) -> Path:
    TOKENIZER().save_pretrained(folder)
    return folder


def test_the_order_does_not_depend_on_the_mesh(tmp_path):
    file = write(tmp_path / "a.jsonl")
    for shuffle in (False, True):
        keys = dict(global_batch_size=8, data=dict(shuffle=shuffle))
        want = [b.input_ids for b in take(packed(file, **keys), 6)]
        for ranks, local in ((1, 4), (2, 1), (2, 4), (4, 2), (8, 1)):
            parts = [take(packed(file, r, ranks, local_batch_size=local, **keys), 6) for r in range(ranks)]
            for step in range(6):
                micro = [parts[r][step].input_ids.split(local) for r in range(ranks)]
                in_order = [micro[r][m] for m in range(8 // local // ranks) for r in range(ranks)]
                assert torch.equal(torch.cat(in_order), want[step]), (ranks, local, step)


def test_every_epoch_has_all_documents_in_a_new_order(tmp_path):
    file = write(tmp_path / "a.jsonl")
    stream = packed(file, seq_len=32, data=dict(shuffle=True, document_mask=True))
    orders = []
    for _ in range(3):
        epoch, order = stream.epoch, []
        while stream.epoch == epoch:
            ids, _ = next(stream._documents)
            order.append(tuple(ids))
        orders += order
    every = [sorted(orders[i : i + 30]) for i in (0, 30, 60)]
    assert every[0] == every[1] == every[2]
    assert len({tuple(orders[i : i + 30]) for i in (0, 30, 60)}) == 3
    again = packed(file, seq_len=32, data=dict(shuffle=True, document_mask=True))
    assert tuple(next(again._documents)[0]) == orders[0]


@pytest.mark.parametrize("kind", ["shuffled", "in order", "streaming"])
def test_state_continues_exactly(tmp_path, kind):
    """After every number of steps over more than two epochs, through JSON-like plain values, in a new reader."""
    for i in range(3):
        write(tmp_path / "folder" / f"{i}.jsonl", DOCUMENTS[i * 5 : i * 5 + 5])
    data = dict(shuffle=kind == "shuffled", streaming=kind == "streaming")
    make = functools.partial(packed, tmp_path / "folder", seq_len=32, data=data)
    stream, states = make(), []
    fresh = stream.state_dict()
    steps = []
    for _ in range(14):
        steps += take(stream, 1)
        states.append(stream.state_dict())
    assert states[-1]["epoch"] >= 2
    for k, state in [(0, fresh), *enumerate(states[:-1], start=1)]:
        again = make()
        torch.save(state, tmp_path / "state.pt")
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for got, want in zip(take(again, 14 - k), steps[k:], strict=True):
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), k
        assert again.state_dict() == states[-1]


def test_streaming_reads_what_a_download_reads(tmp_path):
    file = write(tmp_path / "a.jsonl")
    plain, stream = (packed(file, data=dict(streaming=s)) for s in (False, True))
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(take(plain, 20), take(stream, 20), strict=True))


# ----- formats -----


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
def test_every_format_gives_the_same_tokens(tmp_path, name):
    want = take(packed(write(tmp_path / "want.jsonl")), 10)
    got = take(packed(write(tmp_path / "in" / name)), 10)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(got, want, strict=True))


def test_a_txt_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n" * 20)
    got = take(packed(tmp_path / "a.txt", loop=False), 1)[0].input_ids.flatten().tolist()
    assert got == token_stream(["one\n\ntwo\n" * 20])[: len(got)]


def test_a_folder_and_a_glob_are_read_in_sorted_order(tmp_path):
    names = ["b.jsonl", "c.jsonl", "a.jsonl"]
    for i, name in enumerate(names):
        write(tmp_path / "in" / name, DOCUMENTS[i * 10 : i * 10 + 10])
    (tmp_path / "in" / "README.md").write_text("not data")
    ordered = DOCUMENTS[20:] + DOCUMENTS[:20]
    for path in (tmp_path / "in", tmp_path / "in" / "*.jsonl", tmp_path / "**" / "?.jsonl"):
        got = torch.cat([b.input_ids.flatten() for b in take(packed(path, loop=False), 5)]).tolist()
        assert got == token_stream(ordered)[: len(got)]


def test_a_glob_in_an_odd_folder(tmp_path, monkeypatch):
    """Only what the user wrote is a pattern, not the folder that it is relative to."""
    folder = tmp_path / "sub [1]"
    write(folder / "a.jsonl")
    monkeypatch.chdir(folder)
    (folder / "c.toml").write_text('[model]\npath = "x"\n')
    config = schema.parse_config([str(folder / "c.toml"), "--data.path", "*.jsonl"])
    assert len(common.load_rows(config.data, config.data.path)) == 30


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_another_column(tmp_path, name):
    file = write(tmp_path / name, column="content")
    got = take(packed(file, data=dict(text_column="content")), 1)[0]
    assert torch.equal(got.input_ids, take(packed(write(tmp_path / "want.jsonl")), 1)[0].input_ids)
    with pytest.raises(ValueError, match=r"column 'text' holds NoneType.*'content'"):
        packed(file).next_step()


BAD = {
    "null": ('{"text": "a"}\n{"text": null}\n', ["row 1", "'text' holds NoneType"]),
    "number": ('{"text": 5}\n', ["row 0", "'text' holds int"]),
    "no column": ('{"body": "a"}\n', ["row 0", "'text'", "['body']"]),
    "cut line": ('{"text": "a"}\n{"text": "b', ["cannot be read"]),
    "all empty": ('{"text": ""}\n' * 3, ["3 rows hold no text"]),
    "empty file": ("", ["is empty"]),
    "blank": ("\n\n", []),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_rows_stop_all_ranks_with_file_and_row(train, models, tmp_path, what):
    text, words = BAD[what]
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    refused(lambda: train("native", models["D0"], 2, data=dict(path=str(file))), "bad.jsonl", *words, world=2)


def test_no_file_no_readable_file_and_two_kinds(train, models, tmp_path):
    write(tmp_path / "two" / "a.jsonl")
    write(tmp_path / "two" / "b.parquet")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.csv").write_text("text\na\n")
    for path, words in (
        (tmp_path / "absent.jsonl", ("absent.jsonl", "no file matches", ".jsonl")),
        (tmp_path / "other", ("no file matches", ".parquet")),
        (tmp_path / "other" / "a.csv", ("a.csv", "one kind out of")),
        (tmp_path / "two", ("one kind", "a.jsonl", "b.parquet")),
        ("no/such-dataset", ("no/such-dataset", "hub", "--data.path")),
    ):
        refused(lambda path=path: train("native", models["D0"], 2, data=dict(path=str(path))), *words, world=2)


# ----- tokenizer and vocabulary (real input 4) -----


@pytest.mark.parametrize(("path", "name"), SMALL_CASES)
def test_a_tokenizer_larger_than_the_vocabulary_is_refused(train, models, tmp_path, path, name):
    folder = shutil.copytree(models[name], tmp_path / "in")
    tokenizer = type(TOKENIZER()).from_pretrained(folder)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(100)])
    tokenizer.save_pretrained(folder)
    refused(lambda: train(path, folder, 2), str(folder), "ids up to 391", "vocab_size = 384", world=2)


def test_a_vocabulary_larger_than_the_tokenizer_keeps_its_unused_rows(train, models):
    """384 rows, about 300 ids. Without weight decay the rows that never occur stay as they are."""
    used = max(TOKENIZER().get_vocab().values()) + 1
    run = train("native", models["D0"], optimizer=dict(name="AdamW", lr=1e-2))
    before = hf_oracle(models["D0"]).model.embed_tokens.weight
    after = run.tensors()["model.embed_tokens.weight"]
    assert after.shape == before.shape
    assert torch.equal(after[used:], before[used:])
    assert not torch.equal(after[:used], before[:used])


# ----- validation (FR-16) -----


@pytest.mark.parametrize(("path", "name"), ONE_PER_PATH)
def test_validation_is_the_mean_over_tokens_and_disturbs_nothing(train, models, tmp_path, path, name):
    """Twice the same batches, the same number on every mesh, and the steps are those of a run without it."""
    held_out = write(tmp_path / "v.jsonl", [*DOCUMENTS[:3], "a", "b" * 40])
    base = dict(training=dict(steps=2), optimizer=dict(lr=1e-30))  # so small that no weight changes
    validation = dict(path=str(held_out), freq=1, steps=100)
    plain = train(path, models[name], 2, **base)
    config = make_config(model=dict(path="x"), validation=validation, data=dict(path="y"))
    model, total, count = hf_oracle(models[name]), 0.0, 0
    for batches, counted in common.validation_steps(config, TOKENIZER(), 0, 1):
        count += counted
        for b in batches:
            mask = common.document_mask(b.positions)
            logits = model(input_ids=b.input_ids.long(), position_ids=b.positions, attention_mask=mask).logits
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), b.labels.long().flatten(), reduction="sum"
            ).item()
    assert count == len(token_stream([*DOCUMENTS[:3], "a", "b" * 40])) - 5
    for world, parallelism in ((1, {}), (2, {}), (2, dict(tensor_parallel_degree=2))):
        run = train(path, models[name], world, validation=validation, parallelism=parallelism, **base)
        assert run.validation == pytest.approx([total / count] * 2, rel=1e-5)
        assert run.validation[0] == run.validation[1]
        if (world, parallelism) == (2, {}):
            assert run.losses == plain.losses
            assert run.norms == plain.norms


def test_a_limited_validation_set_is_the_same_on_every_mesh(train, models, texts):
    """`validation.steps` counts global batches, whose size does not depend on the mesh."""
    validation = dict(path=str(texts), steps=3)
    one, two, four = (
        train("native", models["D0"], world, validation=validation, training=dict(steps=0)).validation
        for world in (1, 2, 4)
    )
    assert one == pytest.approx(two, rel=1e-6)
    assert one == pytest.approx(four, rel=1e-6)


def test_a_set_smaller_than_one_batch_is_used_and_one_without_labels_is_refused(train, models, tmp_path):
    small = write(tmp_path / "small.jsonl", ["ab"])
    run = train("hf", models["D0"], 2, validation=dict(path=str(small)))
    assert len(run.validation) == 1
    for text in ("", None):
        lines = "" if text is None else json.dumps({"text": text}) + "\n"
        (tmp_path / "none.jsonl").write_text(lines + "\n")
        sections = dict(validation=dict(path=str(tmp_path / "none.jsonl")))
        refused(lambda sections=sections: train("hf", models["D0"], 2, **sections), "none.jsonl", world=2)


# ----- sample -----


def test_the_greedy_sample_is_the_oracles(train, models):
    """No step taken: what the trainer samples is what Transformers generates from the same folder."""
    prompt = "for i in"
    model, ids = hf_oracle(models["D0"]), TOKENIZER().encode(prompt)
    stop = {TOKENIZER().get_vocab()[t] for t in ("<|endoftext|>", "<|im_end|>")}
    new: list[int] = []
    while len(new) < 6 and not (new and new[-1] in stop):
        new.append(int(model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax()))
    for path in ("native", "hf"):
        for document_mask, parallelism in ((True, {}), (False, dict(tensor_parallel_degree=2))):
            run = train(
                path, models["D0"], 2, training=dict(steps=0), sample=dict(prompt=prompt, max_new_tokens=6),
                data=dict(document_mask=document_mask), parallelism=parallelism,
            )  # fmt: skip
            assert f"sample       {prompt!r} -> {TOKENIZER().decode(new)!r}" in run.log
