"""Shared by the tests: tiny models, a pool of worker processes, and one call that trains through the real scripts.

The tests look at a training run from outside, through what it writes: losses and gradient norms in metrics.jsonl,
weights in the exported folder. With SGD the weights after one step are the gradient of every parameter.
"""

import atexit
import importlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on a network
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="datasets-")  # tokenized data of earlier runs proves nothing
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

import common  # noqa: E402 - after the path and the variables above
import dataset  # noqa: E402 - as above
from configs import schema  # noqa: E402 - as above

import pytest  # noqa: E402 - as above
import torch  # noqa: E402 - as above
from safetensors.torch import load_file  # noqa: E402 - as above
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig  # noqa: E402 - as above

from tools.make_debug_models import save_model, tiny_tokenizer  # noqa: E402 - as above
from tools.parity import JobError, Workers  # noqa: E402 - as above

JOB_TIMEOUT_SECONDS = 120

# The test bench: hidden, intermediate, expert width and heads x head_dim all differ; std 0.2 makes errors large.
D0 = dict(
    vocab_size=384, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rms_norm_eps=1e-6,
    max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.2,
)  # fmt: skip
M0 = D0 | dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, router_aux_loss_coef=0.001
)
# The smallest MoE that the NKI kernels take: hidden and expert width are multiples of 128.
M128 = M0 | dict(hidden_size=256, moe_intermediate_size=128, initializer_range=0.1)

# Every path with the models that it trains; nki_moe takes neither dense models nor M0's widths.
CASES = [
    *[(path, name) for path in ("native", "hf") for name in ("D0", "D0t", "M0")],
    *[(path, "M128") for path in ("native", "hf", "nki_moe")],
]
SMALL_CASES = [("native", "D0t"), ("hf", "D0t"), ("native", "M0"), ("hf", "M0"), ("nki_moe", "M128")]
ONE_PER_PATH = [("native", "D0t"), ("hf", "M0"), ("nki_moe", "M128")]
MOE_CASES = [("native", "M0"), ("hf", "M0"), ("nki_moe", "M128")]


# ----- models and data -----


def make_model(folder: Path, seed: int = 0, max_shard_size: str = "5GB", **changes) -> Path:
    """Write a tiny model folder: D0 with changes, or M0 if `num_experts` is among them."""
    is_moe = "num_experts" in changes
    config = (Qwen3MoeConfig if is_moe else Qwen3Config)(**(M0 if is_moe else D0) | changes)
    save_model(folder, config, TOKENIZER(), seed=seed, max_shard_size=max_shard_size)
    return folder


def TOKENIZER():
    if not hasattr(TOKENIZER, "value"):
        TOKENIZER.value = tiny_tokenizer(["def f(x): return x\n" * 3, "for i in range(10): print(i)\n"], vocab_size=300)
    return TOKENIZER.value


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """D0 (dense, untied), D0t (dense, tied), M0 and M128 (MoE), each with norm weights that are not all one."""
    root = tmp_path_factory.mktemp("models")
    folders = {
        "D0": make_model(root / "D0"),
        "D0t": make_model(root / "D0t", tie_word_embeddings=True),
        "M0": make_model(root / "M0", num_experts=8),
        "M128": make_model(root / "M128", **M128),
    }
    for folder in folders.values():
        rewrite_weights(folder, lambda name, w: w + 0.1 * torch.randn(w.shape) if w.ndim == 1 else w)
    return folders


def rewrite_weights(folder: Path, change) -> None:
    """Replace every tensor of a one-file folder by change(name, tensor)."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: change(name, w).contiguous() for name, w in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """40 numbered rows of uneven length."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"text": f"{i:03d} " + "x = f(y); " * (i * 7 % 11)} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder."""
    return {name: w for file in sorted(folder.glob("*.safetensors")) for name, w in load_file(file).items()}


def hf_oracle(folder: Path):
    """The Hugging Face model in fp32, one process."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.model.embed_tokens.padding_idx = None  # <|endoftext|> pads and ends documents: it is trained
    return model


# ----- workers -----


@pytest.fixture(scope="session")
def workers():
    pool = Workers(JOB_TIMEOUT_SECONDS)
    yield pool
    pool.stop()


# ----- training runs -----


@dataclass
class Run:
    folder: Path  # <dump_folder>/<path>
    losses: list[float]
    norms: list[float]
    log: str  # what rank 0 printed
    metrics: list[dict]  # every line of metrics.jsonl

    @property
    def validation(self) -> list[float]:
        return [line["validation_loss"] for line in self.metrics if "validation_loss" in line]

    def tensors(self) -> dict[str, torch.Tensor]:
        return read_tensors(self.folder / "export")


def make_config(**sections) -> schema.Config:
    """A Config from {section: {key: value}}, with small sizes, SGD and fp32 unless told otherwise."""
    defaults = {
        "training": dict(seq_len=32, steps=1, max_norm=1e9, mixed_precision_param="float32", global_batch_size=4),
        "optimizer": dict(name="SGD", lr=1.0, weight_decay=0.0),
        "activation_checkpoint": dict(mode="none"),
        "metrics": dict(log_freq=1, enable_tensorboard=False),
        "data": dict(shuffle=False, document_mask=True),
        "export": dict(dtype="float32"),
        "nki": dict(block_tokens=128),
    }
    config = schema.Config()
    for section in {*defaults, *sections}:
        for key, value in (defaults.get(section, {}) | sections.get(section, {})).items():
            assert hasattr(getattr(config, section), key), (section, key)
            setattr(getattr(config, section), key, value)
    schema.check_config(config)
    return config


def packed_data(
    config: schema.Config, tokenizer=None, rank: int = 0, ranks: int = 1, section: str = "data"
) -> common.PackedData:
    """The sequences of a configuration, as one data rank sees them; those of [validation] end."""
    data = dataset.tokenize(config, section, tokenizer or TOKENIZER(), 384)
    return common.PackedData(config, data, rank, ranks, loop=section == "data")


def write_tokens(file: Path, documents: list[list[int]], counted: list[list[bool]] | None = None) -> Path:
    """A file of rows that are tokenized already, for [data] format = "tokens"."""
    rows = [{"input_ids": ids} for ids in documents]
    for row, mask in zip(rows, counted or (), strict=bool(counted)):
        row["labels"] = [i if c else -100 for i, c in zip(row["input_ids"], mask, strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run_main(path: str, config: schema.Config, prepare=None) -> str:
    """In a worker: train through the script's own main(); returns what this rank printed."""
    import contextlib
    import io

    out = io.StringIO()
    script = importlib.import_module(f"train_{path}")
    with prepare() if prepare else contextlib.nullcontext(), contextlib.redirect_stdout(out):
        script.main(config)
    return out.getvalue()


@pytest.fixture
def train(workers, texts, tmp_path):
    """train(path, model, world=1, prepare=None, **sections) -> Run"""
    count = 0

    def call(path: str, model: Path, /, world: int = 1, prepare=None, folder: Path | None = None, **sections) -> Run:
        nonlocal count
        count += 1
        sections = {name: dict(keys) for name, keys in sections.items()}
        sections.setdefault("model", {}).setdefault("path", str(model))
        sections.setdefault("data", {}).setdefault("path", str(texts))
        sections.setdefault("job", {})["dump_folder"] = str(folder or tmp_path / f"run{count}")
        config = make_config(**sections)
        logs = workers.run(world, run_main, path, config, prepare)
        out = Path(config.job.dump_folder) / path
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        return Run(out, [s["loss"] for s in steps], [s["grad_norm"] for s in steps], logs[0], lines)

    return call


def refused(call, *words: str, world: int = 1) -> str:
    """`call()` must fail on every rank with a message that holds all `words`; returns rank 0's.

    A rank that does not answer within seconds of the first one counts as hanging (see Workers.run).
    """
    with pytest.raises(JobError) as error:
        call()
    messages = error.value.messages
    assert set(messages) == set(range(world)), f"not every rank reported: {messages}\n{error.value}"
    for message in messages.values():
        assert message.startswith(("ValueError: ", "RuntimeError: ")), message
        for word in words:
            assert word in message, (word, message)
    return messages[0]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in the Euclidean norm."""
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()
