"""Tokenize the data of a configuration on any machine, and show what would be trained on.

    ./run.sh data CONFIG [--section.key value ...]

Prints documents, tokens, what was skipped and why, lengths, steps an epoch and padding, then the first documents as
text with the tokens that count marked: in colour on a terminal, between [[ and ]] elsewhere. A training run on this
machine, or on one that sees the same cache folder, finds the result and starts at once.
"""

from __future__ import annotations

import os
import sys
from itertools import groupby
from typing import Any

import common
from configs.schema import Config
from dataset import Tokenized, prepare_data
from metrics import data_line, data_problems

import numpy as np

SHOWN_DOCUMENTS, SHOWN_TOKENS = 3, 400


def main(config: Config) -> None:
    """Tokenize what is not in the cache yet, and report on training and validation data."""
    folder = common.fetch_model(config.model.path, need_weights=False)
    hf_config = common.load_hf_config(folder)
    tokenizer = common.load_tokenizer(folder, hf_config)
    for name, data in zip(("data", "validation"), prepare_data(config, tokenizer, hf_config.vocab_size), strict=True):
        if data is not None:
            report(name, data, config)
            if name == "data":
                show_documents(data, tokenizer)


def report(name: str, data: Tokenized, config: Config) -> None:
    """The numbers of one dataset."""
    processes = int(os.environ.get("NPROC") or config.launch.nproc_per_node) * int(os.environ.get("NNODES") or 1)
    ranks = max(1, processes // config.parallelism.tensor_parallel_degree)
    packed, meta = common.PackedData(config, data, rank=0, ranks=ranks), data.meta
    lengths = data.lengths[data.lengths > 0]
    quantiles = np.quantile(lengths, (0, 0.25, 0.5, 0.75, 0.99, 1), method="nearest")
    speed = f"{meta['tokens'] / meta['seconds']:,.0f} tokens/s with {meta['processes']} process(es)"
    print(f"{name:<12} {getattr(config, name).path}, {len(meta['files'])} file(s)")
    print(f"             {data_line(packed)}")
    for problem in data_problems(config, packed):
        print(f"             {problem}")
    for example in meta["skipped_examples"][1:]:
        print(f"             also skipped: {example}")
    print(f"             tokens a document: {' '.join(map(str, quantiles))} (min, 25 %, median, 75 %, 99 %, max)")
    print(f"             tokenized in {meta['seconds']:.1f} s: {speed}")
    print(f"             kept in {data.folder}")


def show_documents(data: Tokenized, tokenizer: Any) -> None:
    """The beginning of the first documents; tokens that are trained on are marked."""
    begin, end = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    for document in np.flatnonzero(data.lengths)[:SHOWN_DOCUMENTS]:
        codes = data.read(document)
        print(f"\n--- {data.place(document)}, {len(codes)} tokens, {int((codes >= 0).sum())} counted")
        for counted, group in groupby(codes[:SHOWN_TOKENS].tolist(), key=lambda code: code >= 0):
            text = tokenizer.decode([code if counted else ~code for code in group])
            print(f"{begin}{text}{end}" if counted else text, end="")
        print(" ..." if len(codes) > SHOWN_TOKENS else "")


if __name__ == "__main__":
    common.launch(main)
