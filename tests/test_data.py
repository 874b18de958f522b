"""Text data: what is read, how it is packed, where it continues, and the validation number."""

import contextlib
import functools
import gzip
import json
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import common
import dataset
from configs import schema

import hypothesis
import numpy as np
import pytest
import torch
from conftest import (
    ONE_PER_PATH,
    SMALL_CASES,
    TOKENIZER,
    hf_oracle,
    make_config,
    packed_data,
    refused,
    write_tokens,
)
from hypothesis import strategies as st

from tools.make_debug_models import tiny_tokenizer

DOCUMENTS = [f"{i:02d}: " + "x = f(y)\n" * (i * 5 % 9) + f"# {i * i}" for i in range(30)]


def write(file: Path, documents=DOCUMENTS, column: str = "text") -> Path:
    """The documents as one file, in the format that its name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({column: d, "id": i}) + "\n" for i, d in enumerate(documents))
    if file.name.endswith(".gz"):
        middle = len(lines) // 2  # as `cat a.gz b.gz` does
        file.write_bytes(gzip.compress(lines[:middle].encode()) + gzip.compress(lines[middle:].encode()))
    elif file.name.endswith(".zst"):
        import pyarrow

        with pyarrow.output_stream(str(file), compression="zstd") as stream:
            stream.write(lines.encode())
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


def packed(path: Path, rank: int = 0, ranks: int = 1, finite: bool = False, **keys) -> common.PackedData:
    section = "validation" if finite else "data"
    sections = dict(data=dict(path=str(path), **keys.pop("data", {})), training=dict(seq_len=16) | keys)
    if finite:
        sections["validation"] = dict(path=str(path))
    return packed_data(make_config(model=dict(path="x"), **sections), rank=rank, ranks=ranks, section=section)


def take(stream: common.PackedData, steps: int) -> list[common.Batch]:
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
    stream = packed(file, finite=True, global_batch_size=3, data=dict(document_mask=document_mask))
    inputs, labels, positions, real, total = [], [], [], [], 0
    while (step := stream.next_step()) is not None:
        for batch in step[0]:
            kinds = (torch.int32, torch.int32, torch.int64, torch.bool)
            assert [(t.shape, t.dtype) for t in batch] == [((1, 16), kind) for kind in kinds]
            inputs += batch.input_ids[0].tolist()
            labels += batch.labels[0].tolist()
            positions += batch.positions[0].tolist()
            real += batch.real[0].tolist()
        total += step[1]
        assert step[1] == sum((b.labels != -100).sum() for b in step[0])
    assert inputs[: len(want) - 1] == want[:-1]  # the last token is only ever a label
    assert set(inputs[len(want) - 1 :]) <= {end}
    assert real == [i < len(want) for i in range(len(inputs))]
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
    ids = dataset.encode_text({"text": "ab"}, "text", tokenizer, dataset.document_end_id(tokenizer))
    assert ids == [*TOKENIZER().encode("ab", add_special_tokens=False), end]
    assert dataset.encode_text({"text": ""}, "text", tokenizer, end) == []


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


@pytest.mark.parametrize("whole", [False, True])
def test_every_epoch_has_all_documents_in_a_new_order(tmp_path, whole):
    """Documents are known by their first token; a whole one has its answer mask, text runs on."""
    documents = [[200 + i, *range(i % 5 + 1)] for i in range(30)]
    counted = [[False, *[True] * (len(d) - 1)] for d in documents] if whole else None
    file = write_tokens(tmp_path / "tokens.jsonl", documents, counted)
    for shuffle in (True, False):
        stream = packed(file, seq_len=8, data=dict(shuffle=shuffle, format="tokens", document_mask=True))
        length = sum(map(len, documents))
        sequences = 3 * len(stream.bins) if whole else -(-3 * length // 8)
        ids = [i for k in range(sequences) for i in stream.sequence(k).input_ids.tolist() if i >= 200]
        epochs = [ids[i : i + 30] for i in (0, 30, 60)]
        assert all(sorted(epoch) == list(range(200, 230)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == (3 if shuffle else 1)
        if not shuffle and not whole:
            assert epochs[0] == list(range(200, 230))
        other = packed(file, seq_len=8, data=dict(shuffle=shuffle, format="tokens"))
        assert torch.equal(other.sequence(5).input_ids, stream.sequence(5).input_ids)


@pytest.mark.parametrize("kind", ["shuffled", "in order", "whole documents"])
def test_state_continues_exactly(tmp_path, kind):
    """After any number of steps over more than two epochs, through a file, in a new reader, on 1 to 4 ranks."""
    if kind == "whole documents":
        documents = [[i, *range(i % 7)] for i in range(40)]
        write_tokens(tmp_path / "0.jsonl", documents, [[False, *[True] * (i % 7)] for i in range(40)])
    else:
        for i in range(3):
            write(tmp_path / f"{i}.jsonl", DOCUMENTS[i * 5 : i * 5 + 5])
    keys = dict(seq_len=32, global_batch_size=12)
    keys["data"] = dict(shuffle=kind != "in order", format="tokens" if kind == "whole documents" else "text")
    stream, states, steps = packed(tmp_path, **keys), [], []
    fresh = stream.state_dict()
    for _ in range(8):
        steps += take(stream, 1)
        states.append(stream.state_dict())
    assert stream.sequences > 2 * stream.sequences_per_epoch
    assert len(json.dumps(states[-1])) < 1000
    for k, state in [(0, fresh), *enumerate(states[:-1], start=1)]:
        torch.save(state, tmp_path / "state.pt")
        for ranks in (1, 2, 3, 4) if k in (0, 5) else (1,):
            parts = []
            for rank in range(ranks):
                again = packed(tmp_path, rank, ranks, **keys)
                again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
                parts.append(take(again, 8 - k))
                assert again.state_dict() == states[-1]
            for step, want in enumerate(steps[k:]):  # sequence k is micro-batch k // ranks of rank k % ranks
                for field in range(4):
                    got = torch.stack([part[step][field] for part in parts], dim=1).flatten(0, 1)
                    assert torch.equal(got, want[field]), (k, ranks, step)


def test_changed_data_is_refused_on_resume(tmp_path):
    state = packed(write(tmp_path / "a.jsonl")).state_dict()
    packed(write(tmp_path / "copy" / "a.parquet")).load_state_dict(state)  # the same tokens from elsewhere
    for name, documents in (("b", DOCUMENTS[:-1]), ("c", [*DOCUMENTS[:-1], "other"])):
        with pytest.raises(ValueError, match=rf"{name}.jsonl.*not the checkpoint's.*start a new run"):
            packed(write(tmp_path / f"{name}.jsonl", documents)).load_state_dict(state)


@hypothesis.given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40), seq_len=st.integers(1, 24), seed=st.integers(0, 3)
)
@hypothesis.settings(deadline=None, max_examples=100)
def test_best_fit_packs_every_document_once_and_well(lengths, seq_len, seed):
    bins = common.pack_best_fit(np.array(lengths, np.int32), seq_len)
    fits = [i for i, n in enumerate(lengths) if 0 < n <= seq_len]
    assert sorted(i for b in bins for i in b) == fits
    assert all(sum(lengths[i] for i in b) <= seq_len for b in bins)
    fill = sorted(sum(lengths[i] for i in b) for b in bins)
    assert len(fill) < 2 or fill[0] + fill[1] > seq_len  # no two bins could be one


# ----- the cache -----


def test_a_second_start_finds_the_cache_and_changed_data_is_read_again(tmp_path):
    file = write(tmp_path / "a.jsonl")
    config = make_config(model=dict(path="x"), data=dict(path=str(file), cache_dir=str(tmp_path / "cache")))
    first = dataset.tokenize(config, "data", TOKENIZER(), 384)
    with mock.patch.object(dataset, "_write_cache", side_effect=AssertionError("tokenized again")):
        assert dataset.tokenize(config, "data", TOKENIZER(), 384).folder == first.folder
    status = os.stat(file)
    write(file, [d.upper() for d in DOCUMENTS])  # the same size
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    second = dataset.tokenize(config, "data", TOKENIZER(), 384)
    assert second.meta["digest"] != first.meta["digest"]
    other = tiny_tokenizer(["zz zz zzz " * 9], vocab_size=290)
    assert dataset.tokenize(config, "data", other, 384).folder != second.folder
    assert not list((tmp_path / "cache").glob("*.building"))
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 3


def test_many_processes_give_what_one_gives(tmp_path):
    """Several parts a file, several files, and the error of another process names file and line too."""
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.jsonl"):
        write(tmp_path / "in" / name, [f"{name} {i} {d}" for i, d in enumerate(DOCUMENTS)])
    results = []
    for workers in (1, 3):
        data = dict(path=str(tmp_path / "in"), num_proc=workers, cache_dir=str(tmp_path / f"cache{workers}"))
        config = make_config(model=dict(path="x"), data=data)
        with mock.patch.multiple(dataset, PART_BYTES=256, BYTES_PER_PROCESS=1):
            results.append(dataset.tokenize(config, "data", TOKENIZER(), 384))
    one, three = results
    assert (one.meta["processes"], three.meta["processes"]) == (1, 3)
    assert one.meta["digest"] == three.meta["digest"]
    assert [one.place(i) for i in range(120)] == [three.place(i) for i in range(120)]
    assert one.place(0).endswith("a.jsonl: row 1")
    assert one.place(119).endswith("d.jsonl: row 30")
    with open(tmp_path / "in" / "d.jsonl", "a") as file:
        file.write('{"text": 3}\n')
    with (
        mock.patch.multiple(dataset, PART_BYTES=256, BYTES_PER_PROCESS=1),
        pytest.raises(ValueError, match=r"^\S+d\.jsonl: line 31: column 'text' holds int"),
    ):
        dataset.tokenize(config, "data", TOKENIZER(), 384)
    assert [f.name for f in (tmp_path / "cache3").iterdir() if f.suffix == ".building"] == []


def test_ranks_that_start_together_tokenize_once(train, models, tmp_path):
    file = write(tmp_path / "a.jsonl")
    run = train("native", models["D0"], 2, data=dict(path=str(file), cache_dir=str(tmp_path / "cache")))
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 1
    assert "30 documents, " in run.log


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("no folder")
    data = dict(path=str(write(tmp_path / "a.jsonl")), cache_dir=str(tmp_path / "file" / "cache"))
    config = make_config(model=dict(path="x"), data=data)
    with pytest.raises(RuntimeError, match=r"cannot be written to .*cache.*cache_dir.*HF_DATASETS_CACHE"):
        dataset.tokenize(config, "data", TOKENIZER(), 384)


def test_nodes_with_other_data_are_refused(train, models, tmp_path):
    """Two ranks stand for two nodes, each with a file of its own under the same name."""
    write(tmp_path / "0" / "a.jsonl")
    write(tmp_path / "1" / "a.jsonl", DOCUMENTS[1:])
    hook = functools.partial(own_disk, tmp_path)
    refused(
        lambda: train("native", models["D0"], 2, hook, data=dict(path="set by own_disk")),
        "rank 1 has other training or validation data", "copy the same files", world=2,
    )  # fmt: skip


def test_nodes_without_a_shared_disk_get_the_same_data(train, models, texts, tmp_path):
    """Each tokenizes into a cache of its own; the run is that of a shared one."""
    shared = train("native", models["D0"], 2)
    own = train("native", models["D0"], 2, functools.partial(own_cache, tmp_path))
    assert own.losses == shared.losses
    assert sorted(f.parent.parent.name for f in tmp_path.glob("cache*/*/meta.json")) == ["cache0", "cache1"]


@contextlib.contextmanager
def own_cache(root: Path):
    """In a worker: [data] cache_dir is a folder of this rank."""
    tokenize = dataset.tokenize

    def into_own(config, *arguments):
        config.data.cache_dir = str(root / f"cache{os.environ['RANK']}")
        return tokenize(config, *arguments)

    with mock.patch.object(dataset, "tokenize", into_own):
        yield


@contextlib.contextmanager
def own_disk(root: Path):
    """In a worker: [data] path is in a folder of this rank."""
    tokenize = dataset.tokenize

    def from_own(config, *arguments):
        config.data.path = str(root / os.environ["RANK"] / "a.jsonl")
        return tokenize(config, *arguments)

    with mock.patch.object(dataset, "tokenize", from_own):
        yield


# ----- hub datasets -----


def test_a_hub_dataset_takes_subset_split_and_files(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"text": d, "extra": {"a": i}} for i, d in enumerate(DOCUMENTS)])
    hub = dict(path="some/set", subset="en", split="train[:50%]", files="a/*.parquet")
    config = make_config(model=dict(path="x"), data=hub, training=dict(seq_len=16))
    with mock.patch.object(datasets, "load_dataset", return_value=rows) as load:
        got = packed_data(config)
    load.assert_called_once_with("some/set", "en", split="train[:50%]", data_files="a/*.parquet")
    want = packed(write(tmp_path / "a.jsonl"))
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(take(got, 5), take(want, 5), strict=True))
    with pytest.raises(ValueError, match=r"subset and files choose from a hub dataset"):
        packed(tmp_path / "a.jsonl", data=dict(subset="en"))
    bad = make_config(model=dict(path="x"), data=hub | dict(text_column="body"))
    with (
        mock.patch.object(datasets, "load_dataset", return_value=rows),
        pytest.raises(ValueError, match=r"no column body; columns: \['text', 'extra'\]"),
    ):
        packed_data(bad)


# ----- formats -----


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "c4-train.00000-of-01024.json.gz", "A.JSONL",
     "a.ndjson", "a.parquet", "sub [1] #%20 é/a.jsonl"],
)  # fmt: skip
def test_every_format_gives_the_same_tokens(tmp_path, name):
    want = take(packed(write(tmp_path / "want.jsonl")), 10)
    got = take(packed(write(tmp_path / "in" / name)), 10)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(got, want, strict=True))


def test_a_txt_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n" * 20)
    got = take(packed(tmp_path / "a.txt", finite=True), 1)[0].input_ids.flatten().tolist()
    assert got == token_stream(["one\n\ntwo\n" * 20])[: len(got)]


def test_a_folder_and_a_glob_are_read_in_sorted_order(tmp_path):
    names = ["b.jsonl", "c.jsonl", "a.jsonl"]
    for i, name in enumerate(names):
        write(tmp_path / "in" / name, DOCUMENTS[i * 10 : i * 10 + 10])
    (tmp_path / "in" / "README.md").write_text("not data")
    (tmp_path / "in" / "dataset_info.json").write_text("{}")
    (tmp_path / "in" / "._a.jsonl").write_bytes(b"\0\5\x16\7")
    write(tmp_path / "in" / "sub" / "d.jsonl", ["of a subfolder"])
    ordered = DOCUMENTS[20:] + DOCUMENTS[:20]
    for path in (tmp_path / "in", f"{tmp_path}/in/", tmp_path / "in" / "*.jsonl", tmp_path / "in" / "[abc].jsonl"):
        got = torch.cat([b.input_ids.flatten() for b in take(packed(path, finite=True), 5)]).tolist()
        assert got == token_stream(ordered)[: len(got)]


def test_a_glob_in_an_odd_folder(tmp_path, monkeypatch):
    """Only what the user wrote is a pattern, not the folder that it is relative to."""
    folder = tmp_path / "sub [1]"
    write(folder / "a.jsonl")
    monkeypatch.chdir(folder)
    (folder / "c.toml").write_text('[model]\npath = "x"\n')
    config = schema.parse_config([str(folder / "c.toml"), "--data.path", "*.jsonl"])
    assert dataset.tokenize(config, "data", TOKENIZER(), 384).meta["documents"] == 30


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_another_column(tmp_path, name):
    file = write(tmp_path / name, column="content")
    got = take(packed(file, data=dict(text_column="content")), 1)[0]
    assert torch.equal(got.input_ids, take(packed(write(tmp_path / "want.jsonl")), 1)[0].input_ids)
    with pytest.raises(ValueError, match=r"a\.(jsonl|parquet).*column 'text'.*'content'"):
        packed(file)


def test_only_the_column_that_is_used_is_read(tmp_path):
    """FN-01: whatever the other columns hold, and however that changes within a file or a folder."""
    odd = [
        {"id": 1},
        {"id": "x"},
        None,
        {"a": [1, None]},
        123456789012345678901234567890,
        "2024-01-02 03:04:05",
        float("nan"),
    ]
    rows = [{"text": d, "meta": odd[i % len(odd)]} | ({"extra": i} if i > 20 else {}) for i, d in enumerate(DOCUMENTS)]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    want = packed(write(tmp_path / "want.jsonl")).state_dict()
    assert packed(tmp_path / "odd.jsonl").state_dict() == want
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "two").mkdir()
    for i, column in enumerate(([1] * 15, ["x"] * 15)):
        table = pyarrow.table({"text": DOCUMENTS[i * 15 : i * 15 + 15], "x": column})
        pyarrow.parquet.write_table(table, tmp_path / "two" / f"{i}.parquet")
    assert packed(tmp_path / "two").state_dict() == want
    write(tmp_path / "dates.jsonl", ["2024-01-02 03:04:05"] * 3)
    assert packed(tmp_path / "dates.jsonl").data.meta["documents"] == 3


def test_a_folder_says_what_it_leaves_out(train, models, tmp_path):
    """FN-02: every file is read or named, and those of another split are refused."""
    for i, name in enumerate(("p0.jsonl", "p1.json.gz", "p2.jsonl.zst", "sub/p3.jsonl", "p4.csv")):
        write(tmp_path / "in" / name, DOCUMENTS[i * 5 : i * 5 + 5])
    run = train("native", models["D0"], data=dict(path=str(tmp_path / "in")))
    assert "15 documents" in run.log
    assert "not read: " in run.log
    assert "in/p4.csv, " in run.log
    assert "in/sub/" in run.log
    assert packed(tmp_path / "in" / "**").data.meta["documents"] == 20
    for name in ("test.jsonl", "my-validation_set.jsonl", "dev.parquet"):
        file = write(tmp_path / "in" / name)
        for path in (tmp_path / "in", tmp_path / "in" / "*", tmp_path / "in" / "**"):
            with pytest.raises(ValueError, match=f"holds .*{name}, whose name says '(test|validation|dev)'"):
                packed(path)
        assert packed(file).data.meta["documents"] == 30  # named by the user
        file.unlink()
    write(tmp_path / "v" / "train-0.jsonl")
    with pytest.raises(ValueError, match=r"\[validation\] path .*says 'train'"):
        packed(tmp_path / "v", finite=True)
    both = {"data": dict(path=str(tmp_path / "in")), "validation": dict(path=str(tmp_path / "in" / "p0.jsonl"))}
    config = make_config(model=dict(path="x"), **both)
    with pytest.raises(ValueError, match="it would be trained on"):
        dataset.prepare_data(config, TOKENIZER(), 384)


def test_control_tokens_spelled_out_are_text(tmp_path):
    """FN-06: the ids are those that the tokenizer gives with special tokens split."""
    text = "a <|endoftext|> b <|im_start|>assistant\nevil<|im_end|>"
    stream = packed(write(tmp_path / "a.jsonl", [text]))
    ids = stream.data.read(0).tolist()
    control = {TOKENIZER().get_vocab()[t] for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    assert [i for i in ids if i in control] == [TOKENIZER().get_vocab()["<|endoftext|>"]]
    assert ids[:-1] == TOKENIZER().encode(text, add_special_tokens=False, split_special_tokens=True)
    assert TOKENIZER().decode(ids[:-1]) == text


def test_a_long_document_costs_no_more_than_short_ones(tmp_path):
    """FN-04: no list of the rest is kept: the state stays small, a sequence is a slice."""
    stream = packed(write(tmp_path / "a.jsonl", ["x = f(y)\n" * 40_000]))
    assert len(json.dumps(stream.state_dict())) < 1000
    first, late = stream.sequence(0), stream.sequence(int(stream.sequences_per_epoch) - 2)
    assert first.input_ids.shape == late.input_ids.shape
    with (
        mock.patch.object(dataset, "MAX_CHARACTERS", 1000),
        pytest.raises(ValueError, match=r"line 1: a document of 360,000 characters.*split it"),
    ):
        packed(write(tmp_path / "b.jsonl", ["x = f(y)\n" * 40_000]))


GOOD = {
    "byte-order mark": b"\xef\xbb\xbf" + b'{"text": "a"}\n{"text": "b"}\n',
    "crlf": b'{"text": "a"}\r\n{"text": "b"}\r\n',
    "blank lines": b'{"text": "a"}\n\n   \n{"text": "b"}\n\n\n',
    "no last newline": b'{"text": "a"}\n{"text": "b"}',
    "escaped": b'{"text": "\\u0061"}\n{"text": "b", "more": {"deep": [null]}}\n',
    "empty text": b'{"text": ""}\n{"text": "a"}\n{"text": "b"}\n',
}


@pytest.mark.parametrize("what", GOOD)
def test_what_looks_odd_and_is_not(tmp_path, what):
    (tmp_path / "a.jsonl").write_bytes(GOOD[what])
    data = packed(tmp_path / "a.jsonl").data
    assert [TOKENIZER().decode(data.read(i)[:-1]) for i in range(len(data.lengths)) if data.lengths[i]] == ["a", "b"]


BAD = {  # the line, what the message says about it
    "null": (b'{"text": null}', "column 'text' holds NoneType"),
    "number": (b'{"text": 5}', "column 'text' holds int"),
    "no column": (b'{"body": "a"}', "column 'text' holds NoneType, expected text; columns: ['body']"),
    "cut line": (b'{"text": "b', "Unterminated string"),
    "not an object": (b'["text"]', "holds list, expected an object"),
    "bad byte": (b'{"text": "a\xff"}', "not UTF-8 at byte 11"),
    "half a character": (b'{"text": "\\ud800"}', "surrogates not allowed"),
}


@pytest.mark.parametrize("at", [2, 4000])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_by_file_and_line_or_left_out(tmp_path, what, at):
    """FR-31: the same near the start and at the end; with skip_bad_rows counted, the rest as if it were not there."""
    line, words = BAD[what]
    rows = [b'{"text": "row %d"}' % i for i in range(1, at)]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b"\n".join([*rows, line]) + (b"" if what == "cut line" else b'\n{"text": "last"}\n'))
    with pytest.raises(ValueError, match=rf"bad\.jsonl: line {at}: .*{re.escape(words)}"):
        packed(file)
    data = packed(file, data=dict(skip_bad_rows=True)).data
    assert data.meta["skipped"] == 1
    assert words in data.meta["skipped_examples"][0]
    assert f"row {at}: " in data.meta["skipped_examples"][0]
    assert data.meta["documents"] == at - (what == "cut line")


@pytest.mark.parametrize("what", ["null", "all empty", "empty file", "blank"])
def test_bad_rows_stop_all_ranks(train, models, tmp_path, what):
    file, text = tmp_path / "bad.jsonl", {"null": '{"text": null}\n', "all empty": '{"text": ""}\n' * 3}
    file.write_text(text.get(what, "" if what == "empty file" else "\n\n"))
    words = {"null": "line 1", "all empty": "3 rows hold no text", "empty file": "is empty", "blank": "0 rows hold no"}
    refused(lambda: train("native", models["D0"], 2, data=dict(path=str(file))), "bad.jsonl", words[what], world=2)


def test_a_damaged_file_is_named(tmp_path):
    gz = write(tmp_path / "a.jsonl.gz")
    gz.write_bytes(gz.read_bytes()[:-30])
    parquet = write(tmp_path / "a.parquet")
    parquet.write_bytes(parquet.read_bytes()[:100])
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": ')
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    for file in (gz, parquet, tmp_path / "a.json", tmp_path / "a.txt"):
        for skip in (False, True):  # rows can be skipped, not the rest of a file
            with pytest.raises(ValueError, match=rf"{re.escape(str(file))}: cannot be read"):
                packed(file, data=dict(skip_bad_rows=skip))


def test_no_file_and_no_readable_file(train, models, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.csv").write_text("text\na\n")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "data-00000-of-00001.arrow").write_bytes(b"x")
    (tmp_path / "saved" / "state.json").write_text("{}")
    for path, words in (
        (tmp_path / "absent.jsonl", ("absent.jsonl", "no file matches", ".jsonl")),
        (tmp_path / "other", ("no file matches", ".parquet", "not readable", "a.csv")),
        (tmp_path / "other" / "a.csv", ("a.csv", "no file matches", ".jsonl")),
        (tmp_path / "saved", ("save_to_disk", "to_parquet")),
        ("no/such-dataset", ("no/such-dataset", "hub", "--data.path")),
    ):
        refused(lambda path=path: train("native", models["D0"], 2, data=dict(path=str(path))), *words, world=2)


@hypothesis.given(
    lines=st.lists(st.one_of(st.binary(max_size=30), st.sampled_from([b'{"text": "ab"}', b'{"text": ""}', b"[]"])))
)
@hypothesis.settings(
    deadline=None, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_any_bytes_end_in_tokens_or_one_error(tmp_path, lines):
    file = tmp_path / "fuzz.jsonl"
    file.write_bytes(b"\n".join(lines))
    config = make_config(model=dict(path="x"), data=dict(path=str(file)))
    part = dataset.Part(str(file), 0, 0, file.stat().st_size, 1)
    rows, message = [], ""
    try:
        rows = list(dataset.encode_parts([part], config, TOKENIZER(), 291, 384))
    except ValueError as error:
        message = str(error)
    assert not message or re.match(rf"{re.escape(str(file))}: line \d+: .", message, re.S)
    assert all(row["ids"] == [] or row["ids"][-1] == 291 for row in rows)


# ----- tokenized columns -----


@pytest.mark.parametrize("mask", ["labels", "loss_mask", "assistant_masks", "completion_mask"])
def test_tokenized_columns_are_taken_as_they_are(tmp_path, mask):
    rows = [{"input_ids": [5, 6, 7, 8], mask: [-100, -100, 7, 8] if mask == "labels" else [0, 0, 1, 1]}]
    rows += [{"input_ids": [9, 10, 11], mask: [-100, 10, 11] if mask == "labels" else [0, 1, 1]}]
    rows[1]["attention_mask"] = [1, 1, 0]  # the last one is padding
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = packed(tmp_path / "a.jsonl", seq_len=8, data=dict(format="tokens", document_mask=True))
    one = stream.sequence(0)
    assert one.input_ids.tolist()[:6] == [5, 6, 7, 8, 9, 10]
    assert one.labels.tolist() == [-100, 7, 8, -100, 10, -100, -100, -100]
    assert one.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert one.real.tolist() == [True] * 6 + [False] * 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [1, 384]}, "list of ids from 0 to 383"),
        ({"input_ids": [1, -1]}, "list of ids from 0 to 383"),
        ({"input_ids": "12"}, "list of ids"),
        ({"tokens": [1]}, "columns: ['tokens']"),
        ({"input_ids": [1, 2], "labels": [1]}, "another length"),
        ({"input_ids": [1, 2], "labels": [2, 3]}, "it is shifted in training"),
        ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [0, 1]}, "keep one"),
    ],
)
def test_bad_tokenized_columns(tmp_path, row, words):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl: line 1: .*{re.escape(words)}"):
        packed(tmp_path / "a.jsonl", data=dict(format="tokens"))


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
    held_out_data = dataset.tokenize(config, "validation", TOKENIZER(), 384)
    for batches, counted in common.validation_steps(config, held_out_data, 0, 1):
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


def test_a_limited_validation_set_is_the_same_on_every_mesh(train, models, tmp_path):
    """`validation.steps` counts global batches, whose size does not depend on the mesh."""
    validation = dict(path=str(write(tmp_path / "v.jsonl")), steps=3)
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
