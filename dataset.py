"""From the files as people have them to token ids on disk: once per machine, before the process group starts.

files or a hub dataset -> parts -> rows -> token ids -> an Arrow cache that every rank maps into memory

One process tokenizes (with others that it starts), the rest wait for its lock, the next start finds the cache. A
document is stored as one list of int32: a token id where the token is trained on, its complement ~id where it is not.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import re
import shutil
import sys
import time
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import chat
from configs.schema import HUB_ID, Config

import numpy as np

VERSION = 1  # part of the cache key: raise it when the same input would be stored otherwise
KINDS = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")  # all but .parquet also with .gz or .zst behind
INDEX_FILES = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # describe data, hold none
OTHER_SPLITS = {
    "data": {"test", "validation", "valid", "val", "dev", "eval"},
    "validation": {"train", "training"},
}
PART_BYTES = 2**24  # what one process takes at a time
BYTES_PER_PROCESS = 2**23  # below this another process costs more than it saves
MAX_CHARACTERS = 2**25  # of one document: it is tokenized in one piece, at some hundred bytes a token


# ---------------------------------------------------------------------------------------------------------------------
# Which files, cut into parts
# ---------------------------------------------------------------------------------------------------------------------


def file_kind(name: str) -> str | None:
    """The suffix that says how to read a file, None if it cannot be read."""
    plain = re.sub(r"\.(gz|zst)$", "", name.lower())
    suffix = Path(plain).suffix
    return suffix if suffix in KINDS and (plain == name.lower() or suffix != ".parquet") else None


def find_files(path: str, section: str) -> tuple[list[str], list[str]]:
    """(files in sorted order, what else lies there) of a file, folder or pattern.

    A folder gives its readable files, without subfolders, hidden files and index files. Raises ValueError when none is
    left, when one is empty, and when a name that the user did not write says that it is of another split.
    """
    if Path(path).is_file():
        found = [path]
    elif Path(path).is_dir():
        found = sorted(str(f) for f in Path(path).iterdir())
    else:
        found = sorted(glob.glob(path, recursive=True))
    files, skipped = [], []
    for name in found:
        file = Path(name)
        if file.is_dir() and "**" in path:
            continue
        hidden = file.name.startswith((".", "_")) or file.name in INDEX_FILES
        good = file.is_file() and file_kind(name) and (name == path or not hidden)
        (files if good else skipped).append(name if file.is_file() else f"{name}/")
    if not files:
        there = f"; not readable: {', '.join(skipped[:5])}" if skipped else ""
        arrow = " (of save_to_disk: write it with Dataset.to_parquet)" if any(".arrow" in s for s in skipped) else ""
        raise ValueError(
            f"[{section}] path {path!r}: no file matches{there}{arrow}. Readable are {', '.join(KINDS)} (all but "
            f".parquet also as .gz and .zst), a folder of them, a pattern, or a hub dataset id"
        )
    if empty := [f for f in files if os.path.getsize(f) == 0]:
        raise ValueError(f"data file {empty[0]} is empty")
    base = Path(path)  # the folder that the user wrote without a pattern
    while glob.has_magic(str(base)) and not base.is_dir():
        base = base.parent
    written = words(base.name + str(path).removeprefix(str(base)))
    for file in files:
        if other := words(os.path.relpath(file, base)) & OTHER_SPLITS[section] - written:
            raise ValueError(
                f"[{section}] path {path!r} holds {file}, whose name says {other.pop()!r}: name the files that you "
                f"want, such as {base}/train*"
            )
    return files, skipped


def words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


class Part(NamedTuple):
    """What one process reads at a time: bytes of JSON lines, row groups of Parquet, rows of a hub dataset, a file."""

    source: Any  # file name, or datasets.Dataset
    index: int  # of the file in the list of files
    start: int
    stop: int
    first_row: int  # number of the first row of the part: lines count from 1, other rows from 0


def split_into_parts(files: list[str], part_bytes: int) -> list[Part]:
    """Parts in order. JSON lines are cut at line ends, Parquet files at row groups, others not at all."""
    parts: list[Part] = []
    for index, file in enumerate(files):
        try:
            parts += _parts_of_file(file, index, part_bytes)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: cannot be read: {error}") from None
    return parts


def _parts_of_file(file: str, index: int, part_bytes: int) -> Iterator[Part]:
    if file_kind(file) == ".parquet":
        import pyarrow.parquet

        meta, row = pyarrow.parquet.ParquetFile(file).metadata, 0
        for group in range(meta.num_row_groups):
            yield Part(file, index, group, group + 1, row)
            row += meta.row_group(group).num_rows
    elif file_kind(file) == ".txt" or is_array(file):
        yield Part(file, index, 0, 0, 0)
    elif file.lower().endswith((".gz", ".zst")):
        yield Part(file, index, 0, 0, 1)
    else:
        with open(file, "rb") as handle:
            line = 1
            while block := handle.read(part_bytes):
                block += handle.readline()
                yield Part(file, index, handle.tell() - len(block), handle.tell(), line)
                line += block.count(b"\n")


def is_array(file: str) -> bool:
    """Whether a JSON file holds one array of rows instead of a row a line."""
    with open_file(file) as handle:
        return handle.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def open_file(file: str) -> io.BufferedReader:
    """A file for reading bytes, unpacked if its name ends in .gz or .zst."""
    import pyarrow

    packed = {".gz": "gzip", ".zst": "zstd"}.get(Path(file).suffix.lower())
    return io.BufferedReader(pyarrow.input_stream(file, compression=packed), 2**20)


# ---------------------------------------------------------------------------------------------------------------------
# Rows, of which only the columns that are used are read
# ---------------------------------------------------------------------------------------------------------------------


def read_rows(part: Part, columns: tuple[str, ...]) -> Iterator[tuple[int, dict | bytes]]:
    """(row number, row) of a part; JSON lines as the bytes of the line, to be parsed by `parse_line`."""
    number = part.first_row
    try:
        for number, row in _rows(part, columns):
            yield number, row
    except (OSError, EOFError, ValueError, ArithmeticError) as error:  # what the readers raise about the file itself
        raise ValueError(f"{part.source}: cannot be read from row {number} on: {error}") from None


def _rows(part: Part, columns: tuple[str, ...]) -> Iterator[tuple[int, dict | bytes]]:
    file, number = part.source, part.first_row
    if not isinstance(file, str):  # a hub dataset
        for number in range(part.start, part.stop):
            yield number, without_nulls(file[number])
    elif file_kind(file) == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(file)
        present = [name for name in columns if name in table.schema_arrow.names]
        if not present:
            raise ValueError(f"no column {' or '.join(map(repr, columns))}; columns: {table.schema_arrow.names}")
        for batch in table.iter_batches(256, row_groups=range(part.start, part.stop), columns=present):
            for row in batch.to_pylist():
                yield number, without_nulls(row)
                number += 1
    elif file_kind(file) == ".txt":
        with open_file(file) as handle:
            yield 0, {columns[0]: decoded(handle.read())}
    elif number == 0:  # an array
        with open_file(file) as handle:
            yield from enumerate(json.loads(decoded(handle.read())))
    else:  # JSON lines
        with open_file(file) if part.stop == 0 else open(file, "rb") as handle:
            position = handle.seek(part.start) if part.start else 0
            while (part.stop == 0 or position < part.stop) and (line := handle.readline()):
                position += len(line)
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    yield number, line
                number += 1


def without_nulls(value: Any) -> Any:
    """Columnar files give every row the keys of all rows, null where a row had none: those are taken out again."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def decoded(data: bytes) -> str:
    """UTF-8 text without a byte-order mark."""
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}: {data[error.start : error.start + 4]!r}") from None


def parse_line(line: dict | bytes) -> dict:
    """One row from the bytes of its line. Raises ValueError with the reason."""
    row = json.loads(decoded(line)) if isinstance(line, bytes) else line
    if not isinstance(row, dict):
        raise ValueError(f"holds {type(row).__name__}, expected an object with named columns")
    return row


# ---------------------------------------------------------------------------------------------------------------------
# Token ids
# ---------------------------------------------------------------------------------------------------------------------

MASKS = ("labels", "loss_mask", "assistant_masks", "completion_mask")


def columns_of(config: Config) -> tuple[str, ...]:
    """The columns that the format reads, the first of them in any case."""
    if config.data.format == "chat":
        return chat.COLUMNS
    return ("input_ids", *MASKS, "attention_mask") if config.data.format == "tokens" else (config.data.text_column,)


def document_end_id(tokenizer: Any) -> int:
    """Qwen ends a text document with <|endoftext|>, also where the chat tokenizer's eos is <|im_end|>."""
    end_id = tokenizer.get_vocab().get("<|endoftext|>", tokenizer.eos_token_id)
    if end_id is None:
        raise ValueError("the tokenizer has neither <|endoftext|> nor an eos token to end a document with")
    return end_id


def encode_text(row: dict[str, Any], column: str, tokenizer: Any, end_id: int) -> list[int]:
    """One document: its tokens and exactly one end token, none begins it. A control token spelled out is plain text."""
    text = row.get(column)
    if not isinstance(text, str):
        raise ValueError(f"column {column!r} holds {type(text).__name__}, expected text; columns: {list(row)}")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a document of {len(text):,} characters; at most {MAX_CHARACTERS:,}: split it into rows")
    text.encode()  # raises for half of a surrogate pair, which JSON may hold
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return [*ids, end_id] if ids else []


def encode_tokens(row: dict[str, Any], vocab_size: int) -> list[int]:
    """A row that is tokenized already, taken as it is: no end token is added, labels say what is trained on."""
    ids = row.get("input_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise ValueError(f"column 'input_ids' must be a list of ids from 0 to {vocab_size - 1}; columns: {list(row)}")
    masks = [name for name in MASKS if row.get(name) is not None]
    if len(masks) > 1:
        raise ValueError(f"columns {masks} all say what is trained on: keep one")
    for name in (*masks, "attention_mask"):
        if row.get(name) is not None and (not isinstance(row[name], list) or len(row[name]) != len(ids)):
            raise ValueError(f"column {name!r} has another length than 'input_ids' ({len(ids)})")
    if masks == ["labels"]:
        if any(label not in (-100, i) for label, i in zip(row["labels"], ids, strict=True)):
            raise ValueError(
                "column 'labels' must hold -100 or the token of the same place (it is shifted in training)"
            )
        counted = [label != -100 for label in row["labels"]]
    else:
        counted = [bool(m) for m in row[masks[0]]] if masks else [True] * len(ids)
    real = row.get("attention_mask") or [1] * len(ids)
    return [i if c else ~i for i, c, keep in zip(ids, counted, real, strict=True) if keep]


def encode_parts(
    parts: list[Part], config: Config, tokenizer: Any, end_id: int, vocab_size: int
) -> Iterator[dict[str, Any]]:
    """Every row of the parts as {ids, file, row, note}; a row that was skipped has no ids and the reason as note."""
    settings = config.data
    for part in parts:
        name = part.source if isinstance(part.source, str) else "hub dataset"
        line = "line" if isinstance(part.source, str) and part.first_row else "row"
        for number, raw in read_rows(part, columns_of(config)):
            note, ids = None, []
            try:
                row = parse_line(raw)
                if settings.format == "text":
                    ids = encode_text(row, settings.text_column, tokenizer, end_id)
                elif settings.format == "tokens":
                    ids = encode_tokens(row, vocab_size)
                else:
                    ids, note = chat.encode_conversation(row, tokenizer)
            except ValueError as error:
                if not settings.skip_bad_rows:
                    raise ValueError(f"{name}: {line} {number}: {error}") from None
                note = f"skipped: {error}"
            yield {"ids": ids, "file": part.index, "row": number, "note": note}


# ---------------------------------------------------------------------------------------------------------------------
# The cache
# ---------------------------------------------------------------------------------------------------------------------


class Tokenized:
    """Documents of a cache folder, mapped into memory: ranks of a machine share the pages."""

    def __init__(self, folder: Path, end_id: int):
        import pyarrow

        self.folder, self.end_id = folder, end_id
        self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self._chunks, self._first, lengths = [], [0], [np.zeros(0, np.int32)]
        for file in sorted(folder.glob("*.arrow")):
            for batch in pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))):
                ids = batch.column("ids")
                offsets = ids.offsets.to_numpy()
                self._chunks.append((ids.values.to_numpy(zero_copy_only=True), offsets, batch))
                self._first.append(self._first[-1] + len(batch))
                lengths.append(np.diff(offsets).astype(np.int32))
        self.lengths = np.concatenate(lengths)  # tokens of every document, 0 for an empty or skipped row
        self.whole_documents = self.meta["counted"] < self.meta["tokens"]  # never cut one that has a prompt

    def _chunk(self, document: int) -> tuple[tuple[np.ndarray, np.ndarray, Any], int]:
        chunk = bisect_right(self._first, document) - 1
        return self._chunks[chunk], document - self._first[chunk]

    def read(self, document: int) -> np.ndarray:
        """[T] int32 codes of one document: id where it is trained on, ~id where not."""
        (values, offsets, _), i = self._chunk(document)
        return values[offsets[i] : offsets[i + 1]]

    def place(self, document: int) -> str:
        """Where a document comes from: "file: row n" (lines count from 1)."""
        (_, _, batch), i = self._chunk(document)
        return f"{self.meta['files'][batch['file'][i].as_py()]}: row {batch['row'][i].as_py()}"

    def digest(self) -> str:
        """Of all lengths and ids: the same tokens in the same order, wherever the files lie."""
        crc = zlib.crc32(self.lengths)
        for values, offsets, _ in self._chunks:
            crc = zlib.crc32(values[offsets[0] : offsets[-1]], crc)
        return f"{crc:08x}-{len(self.lengths)}-{int(self.lengths.sum(dtype=np.int64))}"


def prepare_data(config: Config, tokenizer: Any, vocab_size: int) -> tuple[Tokenized | None, Tokenized | None]:
    """(training data, validation data if there is any), tokenized now or found in the cache; a dry run needs none.

    Called before the process group starts, so that no collective waits for it. Raises ValueError and RuntimeError with
    file, row and reason.
    """
    if config.dry_run:
        return None, None
    train = tokenize(config, "data", tokenizer, vocab_size)
    if not config.validation.path:
        return train, None
    validation = tokenize(config, "validation", tokenizer, vocab_size)
    both = sorted(set(train.meta["files"]) & set(validation.meta["files"]))
    if both and train.meta["files"] != validation.meta["files"]:  # the same files twice are meant
        raise ValueError(f"[data] path and [validation] path both hold {both[0]}: it would be trained on")
    return train, validation


def tokenize(config: Config, section: str, tokenizer: Any, vocab_size: int) -> Tokenized:
    """The documents of [data] or [validation]; one process of this machine tokenizes, the others wait for its lock."""
    import datasets
    from filelock import FileLock

    chosen, end_id = getattr(config, section), document_end_id(tokenizer)
    root = Path(config.data.cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "tokenized")
    if HUB_ID.fullmatch(chosen.path) and not os.path.exists(chosen.path):
        rows = load_hub_dataset(chosen, columns_of(config))
        name = " ".join(filter(None, (chosen.path, chosen.subset, chosen.split, chosen.files)))
        files, skipped, state, size = [name], [], [rows._fingerprint], len(rows) * 1024
        step = 10_000
        parts = [Part(rows, 0, i, min(i + step, len(rows)), 0) for i in range(0, len(rows), step)]
    else:
        if chosen.subset or chosen.files:
            raise ValueError(
                f"[{section}] subset and files choose from a hub dataset, but path {chosen.path!r} is local"
            )
        files, skipped = find_files(chosen.path, section)
        status = [os.stat(f) for f in files]
        state = [[os.path.abspath(f), s.st_size, s.st_mtime_ns] for f, s in zip(files, status, strict=True)]
        parts, size = None, sum(s.st_size for s in status)
    options = [VERSION, config.data.format, config.data.skip_bad_rows, columns_of(config), vocab_size, state]
    key = hashlib.sha256(json.dumps(options).encode())
    key.update(tokenizer.backend_tokenizer.to_str().encode())
    if config.data.format == "chat":
        key.update(json.dumps(tokenizer.chat_template).encode())
    folder = root / key.hexdigest()[:32]
    if (folder / "meta.json").is_file():  # also in a cache that this user may only read
        return Tokenized(folder, end_id)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "meta.json").is_file():
                parts = parts or split_into_parts(files, PART_BYTES)
                _write_cache(folder, parts, config, tokenizer, vocab_size, size, {"files": files, "left_out": skipped})
    except OSError as error:
        raise RuntimeError(
            f"the tokenized data cannot be written to {root}: {error.strerror or error}. Set [data] cache_dir, or the "
            f"variable HF_DATASETS_CACHE, to a folder with space that can be written"
        ) from error
    return Tokenized(folder, end_id)


def load_hub_dataset(chosen: Any, columns: tuple[str, ...]) -> Any:
    """A split of a hub dataset, with the columns that are used."""
    import datasets

    _progress_bars(datasets)
    try:
        rows = datasets.load_dataset(
            chosen.path, chosen.subset or None, split=chosen.split, data_files=chosen.files or None
        )
    except Exception as error:  # the hub's, the network's or the library's: the ways out are the same
        raise RuntimeError(
            f"data path {chosen.path!r} is no file here, and the hub dataset could not be loaded ({error}). Either "
            f"connect this machine to the Hugging Face hub, or point --data.path to local files"
        ) from error
    present = [name for name in columns if name in rows.column_names]
    if not present:
        raise ValueError(f"{chosen.path}: no column {' or '.join(columns)}; columns: {rows.column_names}")
    return rows.select_columns(present)


def _progress_bars(datasets: Any) -> None:
    (datasets.enable_progress_bars if sys.stderr.isatty() else datasets.disable_progress_bars)()


def processes(config: Config, size_bytes: int, parts: int) -> int:
    """How many processes tokenize."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(config.data.num_proc or cores, 1 + size_bytes // BYTES_PER_PROCESS, max(parts, 1))


def _write_cache(
    folder: Path, parts: list[Part], config: Config, tokenizer: Any, vocab_size: int, size_bytes: int, about: dict
) -> None:
    """Tokenize into a folder beside `folder`, describe it in meta.json, rename: a cache is whole or not there."""
    import datasets
    from datasets import LargeList, Value

    _progress_bars(datasets)
    building, started = folder.with_suffix(".building"), time.perf_counter()
    shutil.rmtree(building, ignore_errors=True)  # what a run that was killed left
    workers, end_id = processes(config, size_bytes, len(parts)), document_end_id(tokenizer)
    arguments = {"config": config, "tokenizer": tokenizer, "end_id": end_id, "vocab_size": vocab_size}
    features = datasets.Features(
        ids=LargeList(Value("int32")), file=Value("int32"), row=Value("int64"), note=Value("string")
    )
    try:
        if any(True for part in parts for _ in read_rows(part, columns_of(config))):  # from_generator needs a row
            datasets.Dataset.from_generator(
                encode_parts,
                features=features,
                cache_dir=str(building / "work"),
                gen_kwargs={"parts": parts, **arguments},
                num_proc=workers if workers > 1 else None,
                fingerprint=folder.name,
            )
        for file in sorted(building.glob("work/**/*.arrow")):
            file.rename(building / file.name)
        shutil.rmtree(building / "work", ignore_errors=True)
        building.mkdir(exist_ok=True)
        _describe(building, end_id, about | {"seconds": time.perf_counter() - started, "processes": workers})
        building.rename(folder)
    except Exception as error:
        shutil.rmtree(building, ignore_errors=True)
        raise _cause(error) from error


def _cause(error: BaseException) -> BaseException:
    """What went wrong in the generator: `datasets` wraps it, and a process hands over its traceback as text."""
    if isinstance(error.__cause__, ValueError | OSError):
        return error.__cause__
    texts = [str(e) for e in (error, error.__cause__, error.__context__) if e is not None]
    for found in (re.search(r"^ValueError: (.+?)$", text, re.M) for text in texts):
        if found:
            return ValueError(found[1])
    return error


def _describe(folder: Path, end_id: int, about: dict[str, Any]) -> None:
    """Write meta.json: what a person wants to know of the data, and its digest."""
    meta_file = folder / "meta.json"
    meta_file.write_text(json.dumps({"tokens": 0, "counted": 0, "files": about["files"]}))
    data = Tokenized(folder, end_id)
    notes, examples, first = Counter(), [], 0
    for values, offsets, batch in data._chunks:
        about["counted"] = about.get("counted", 0) + int((values[offsets[0] : offsets[-1]] >= 0).sum())
        for i, note in enumerate(batch["note"].to_pylist()) if batch["note"].null_count < len(batch) else ():
            if note:
                notes["skipped" if note.startswith("skipped: ") else note] += 1
            if note and note.startswith("skipped: ") and len(examples) < 5:
                examples.append(f"{data.place(first + i)}: {note.removeprefix('skipped: ')}")
        first += len(batch)
    meta = {"counted": 0, **about, "rows": len(data.lengths), "documents": int((data.lengths > 0).sum())}
    meta |= {"tokens": int(data.lengths.sum(dtype=np.int64)), "digest": data.digest()}
    meta |= {"skipped": notes.pop("skipped", 0), "skipped_examples": examples, "notes": notes}
    if meta["documents"] == 0:
        skipped = f", the first: {examples[0]}" if examples else ""
        raise ValueError(f"{about['files'][0]}: {meta['rows']} rows hold no text at all{skipped}")
    with contextlib.suppress(FileNotFoundError):
        meta_file.unlink()
    meta_file.write_text(json.dumps(meta, indent=1), encoding="utf-8")
