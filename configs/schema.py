"""Every key of a configuration: its type, its default, what it means.

A TOML file gives the sections and keys below; `--section.key value` on the command line overrides it. Both end in one
checked `Config`, and `toml_text` writes it back. Nothing here imports torch: --help and a typo answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import glob
import io
import json
import math
import re
import sys
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

REPO = Path(__file__).resolve().parent.parent

# Section and key names follow torchtitan's TOML. Command line beats TOML beats the default below.


@dataclass
class Job:
    dump_folder: str = "runs/default"  # checkpoints, logs and the export go to <dump_folder>/<hf|native|nki_moe>/


@dataclass
class Launch:
    nproc_per_node: int = 1  # processes per node that the file was written for; the NPROC environment variable wins


@dataclass
class Model:
    path: str = ""  # Hugging Face folder, or hub id such as Qwen/Qwen3-0.6B
    init: Literal["pretrained", "random"] = "pretrained"  # random: draw weights from debug.seed, ignore the files


@dataclass
class Data:
    path: str = ""  # file, folder or pattern (.jsonl .json .parquet .txt; .gz and .zst too), or a hub dataset id
    subset: str = ""  # configuration of a hub dataset
    split: str = "train"  # of a hub dataset
    files: str = ""  # pattern of files in a hub dataset; empty: all of the split
    # text: one document per row, every token is trained on; chat: messages or conversations, answers are trained on;
    # tokens: input_ids as they are, trained on where labels or a mask say so
    format: Literal["text", "chat", "tokens"] = "text"
    text_column: str = "text"  # column that holds the document
    # a conversation longer than seq_len: stop, leave it out, or cut its end; what was left out or cut is counted
    too_long: Literal["error", "skip", "truncate"] = "error"
    skip_bad_rows: bool = False  # true: leave out rows that cannot be read or rendered, and count them
    shuffle: bool = True  # a new order every epoch, from debug.seed
    document_mask: bool = False  # true: packed documents do not see each other (slow attention path on Neuron)
    cache_dir: str = ""  # where tokenized data is kept; empty: tokenized/ in HF_DATASETS_CACHE
    num_proc: int = 0  # processes that tokenize; 0: all cores


@dataclass
class Training:
    local_batch_size: int = 1  # sequences per data rank in one micro-step
    global_batch_size: int = -1  # sequences per optimizer step over all data ranks; -1: no gradient accumulation
    seq_len: int = 2048  # tokens per packed sequence; a multiple of 512 on Neuron
    steps: int = 100  # optimizer steps in total, counted from the very first start
    max_norm: float = 1.0  # gradient norm is clipped to this
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"  # compute dtype; stored weights are fp32


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1  # > 1: HSDP, weights replicated over this axis
    data_parallel_shard_degree: int = -1  # FSDP2 axis; -1: all remaining ranks
    tensor_parallel_degree: int = 1  # on Neuron 1, 2 or 4: one chip has 4 logical cores
    enable_sequence_parallel: bool = True  # with tensor parallelism: norms and residual stream hold L/TP tokens each
    expert_parallel_degree: int = 1  # native path on cpu and cuda only; nki_moe always spreads experts over TP
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"  # torchtitan's policy names


@dataclass
class Optimizer:
    name: Literal["AdamW", "SGD"] = "AdamW"  # SGD (no momentum) shows gradient-scale errors that AdamW hides
    lr: float = 3e-4  # after the warmup
    beta1: float = 0.9  # AdamW's memory of the gradient
    beta2: float = 0.95  # and of its square
    eps: float = 1e-8  # AdamW's, beside the root of the second moment
    weight_decay: float = 0.1  # on matrices; norm weights are not decayed
    decay_embeddings: bool = True  # false: not on embedding and output layer, whose rows shrink even if never used


@dataclass
class LRScheduler:
    warmup_steps: int = 0  # linear from lr / warmup_steps
    decay_ratio: float = 0.0  # share of all steps, at the end, over which the rate decays; 0: constant after warmup
    decay_type: Literal["linear", "cosine"] = "linear"  # shape of the decay
    min_lr_factor: float = 0.0  # the decay ends at lr * min_lr_factor


@dataclass
class Checkpoint:
    enable: bool = False  # save, and continue from what was saved when the same command runs again
    interval: int = 500  # steps between checkpoints; the last step and SIGTERM always save
    keep_latest_k: int = 2  # older complete checkpoints are removed; 0: keep all
    load_step: int = -1  # -1: the newest complete checkpoint if there is one


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = "selective"  # torchtitan's policies, per transformer block


@dataclass
class Compile:
    enable: bool = False  # torch.compile of every transformer block, static shapes
    backend: str = "inductor"  # "neuron" on Trainium


@dataclass
class Validation:
    path: str = ""  # like data.path, in the same format; empty: no validation
    subset: str = ""  # of a hub dataset, like those of [data]
    split: str = "validation"  # of a hub dataset
    files: str = ""  # pattern of files in a hub dataset
    freq: int = 0  # steps between validations; 0: only after the last step
    steps: int = 10  # at most this many global batches, always the same ones


@dataclass
class Metrics:
    log_freq: int = 10  # steps between log lines
    enable_tensorboard: bool = True  # scalars and expert loads to <dump_folder>/<path>/tensorboard


@dataclass
class Profiling:
    enable: bool = False  # write a torch.profiler trace of rank 0 to <dump_folder>/<path>/profile (open in Perfetto)
    step: int = 5  # first profiled step; the first ones compile and allocate
    steps: int = 2  # how many


@dataclass
class Sample:
    prompt: str = ""  # continued greedily after the last step; empty: no sample
    max_new_tokens: int = 48  # at most this many; an end token ends it too


@dataclass
class Export:
    enable: bool = True  # write a Hugging Face folder to <dump_folder>/<path>/export after the last step
    dtype: Literal["source", "bfloat16", "float32"] = "source"  # source: each tensor in the dtype it was loaded from


@dataclass
class MoE:
    router_aux_loss_coef: float = 0.0  # weight of Qwen3's load-balancing loss; 0: off, as in Transformers' training


@dataclass
class NKI:
    """Of the nki_moe path."""

    # auto: the NKI kernels on Neuron, their PyTorch references elsewhere; interpret: the kernel source on a CPU;
    # simulate: the same in the official simulator, where the real nki package is installed
    kernels: Literal["auto", "nki", "simulate", "interpret", "reference"] = "auto"
    block_tokens: int = 256  # token slots per block; 512 once an expert sees 2,000 tokens or more in a micro-step


@dataclass
class Comm:
    timeout_seconds: int = 7200  # a collective that waits longer ends the run; Neuron compiles for minutes in step 1


@dataclass
class Debug:
    seed: int = 42  # row order, random init


@dataclass
class Config:
    """Every key of a TOML file, section by section. `--section.key value` on the command line overrides it."""

    job: Job = field(default_factory=Job)
    launch: Launch = field(default_factory=Launch)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    sample: Sample = field(default_factory=Sample)
    export: Export = field(default_factory=Export)
    moe: MoE = field(default_factory=MoE)
    nki: NKI = field(default_factory=NKI)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    dry_run: bool = False  # build and shard on a fake process group of all ranks, print what one rank needs, stop


# What a checkpoint does about a key whose value is another one when a run continues from it. The file always decides:
# "refused" ends the start, "free" acts from the next step on and is named in one line, "no matter" changes no number.
ON_RESUME = {
    "refused": """
        data.format data.text_column data.too_long data.shuffle training.seq_len optimizer.name debug.seed
    """,
    "free": """
        model.path data.path data.subset data.split data.files data.document_mask training.local_batch_size
        training.global_batch_size training.steps training.max_norm training.mixed_precision_param optimizer.lr
        optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay optimizer.decay_embeddings
        lr_scheduler.warmup_steps lr_scheduler.decay_ratio lr_scheduler.decay_type lr_scheduler.min_lr_factor
        validation.path validation.subset validation.split validation.files validation.freq validation.steps
        export.enable export.dtype moe.router_aux_loss_coef
    """,
    "no matter": """
        data.skip_bad_rows data.cache_dir data.num_proc job.dump_folder launch.nproc_per_node model.init
        parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree
        parallelism.tensor_parallel_degree parallelism.enable_sequence_parallel parallelism.expert_parallel_degree
        parallelism.fsdp_reshard_after_forward checkpoint.enable checkpoint.interval checkpoint.keep_latest_k
        checkpoint.load_step activation_checkpoint.mode compile.enable compile.backend metrics.log_freq
        metrics.enable_tensorboard profiling.enable profiling.step profiling.steps sample.prompt sample.max_new_tokens
        nki.kernels nki.block_tokens comm.timeout_seconds
    """,
}
PATH_KEYS = (("job", "dump_folder"), ("model", "path"), ("data", "path"), ("data", "cache_dir"), ("validation", "path"))
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def parse_config(argv: list[str]) -> Config:
    """`[CONFIG.toml, --section.key, value, ...]` -> a checked Config with absolute paths.

    Relative paths in the TOML file count from the repository, those on the command line from the working directory.
    Raises ValueError naming the key and the nearest valid one.
    """
    import tyro

    if not argv or argv[0].startswith("-"):
        argv = ["", *argv]  # no file: defaults and --help
    argv = ["--dry_run=True" if argument in ("--dry_run", "--dry-run") else argument for argument in argv]
    config = load_toml(Path(argv[0])) if argv[0] else Config()
    _absolute_paths(config, REPO)
    from_toml = dataclasses.asdict(config)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            program = f"{Path(sys.argv[0]).name} CONFIG.toml"
            config = tyro.cli(
                Config, default=config, args=argv[1:], prog=program, config=(tyro.conf.FlagConversionOff,)
            )
    except SystemExit as stop:
        if stop.code:
            raise ValueError(f"command line: {messages.getvalue().strip()}") from None
        raise  # --help
    for section, key in PATH_KEYS:  # only what the command line changed is still relative
        if getattr(getattr(config, section), key) != from_toml[section][key]:
            _absolute_path(config, section, key, Path.cwd())
    check_config(config)
    path = config.data.path  # before the weights are read: that takes minutes for a large model
    if Path(path).is_absolute() and not config.dry_run and not Path(path).exists() and not glob.glob(path):
        raise ValueError(f"data path {path!r}: no file matches; set [data] path, or --data.path, to your own data")
    return config


def load_toml(path: Path) -> Config:
    """Read one TOML file strictly. Raises ValueError with file, key, and nearest valid name or type."""
    if not path.is_file():
        raise ValueError(f"config file {path} does not exist")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    config = Config()
    for section, table in tables.items():
        target = getattr(config, section, None)
        if target is None or not isinstance(table, dict):
            names = [f.name for f in dataclasses.fields(Config)]
            raise ValueError(f"{path}: unknown section [{section}]{_nearest(section, names)}")
        hints = typing.get_type_hints(type(target))
        for key, value in table.items():
            if key not in hints:
                homes = [f"[{f.name}]" for f in dataclasses.fields(Config) if hasattr(getattr(config, f.name), key)]
                hint = f"; it belongs to {' or '.join(homes)}" if homes else _nearest(key, list(hints))
                raise ValueError(f"{path}: unknown key {key!r} in [{section}]{hint}")
            setattr(target, key, _typed(value, hints[key], f"{path}: [{section}] {key}"))
    return config


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; valid are {', '.join(sorted(names))}"


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` if it has the type of the field (an int may stand for a float), else ValueError."""
    allowed = typing.get_args(hint)
    if allowed:
        if value not in allowed:
            raise ValueError(f"{where} = {value!r}: allowed are {', '.join(map(repr, allowed))}")
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # bool is an int for isinstance: compare types exactly
        raise ValueError(f"{where} = {value!r} is of type {type(value).__name__}, expected {hint.__name__}")
    return value


def _absolute_paths(config: Config, base: Path) -> None:
    for section, key in PATH_KEYS:
        _absolute_path(config, section, key, base)


def _absolute_path(config: Config, section: str, key: str, base: Path) -> None:
    target, value = getattr(config, section), getattr(getattr(config, section), key)
    path = Path(value).expanduser()
    if glob.has_magic(value) and not (base / path).exists():
        base = Path(glob.escape(str(base)))  # only what the user wrote is a pattern
    is_hub_id = key == "path" and HUB_ID.fullmatch(value) and not (base / path).exists()
    if value and not is_hub_id:
        setattr(target, key, str(base / path))


def check_config(config: Config) -> None:
    """Ranges that need neither the model nor the world size. Raises ValueError naming the key."""
    positive = [
        ("launch", "nproc_per_node"), ("training", "local_batch_size"), ("training", "seq_len"),
        ("training", "max_norm"), ("parallelism", "tensor_parallel_degree"),
        ("parallelism", "data_parallel_replicate_degree"),
        ("parallelism", "expert_parallel_degree"), ("optimizer", "lr"), ("checkpoint", "interval"),
        ("metrics", "log_freq"), ("validation", "steps"), ("profiling", "step"), ("profiling", "steps"),
        ("sample", "max_new_tokens"), ("comm", "timeout_seconds"),
    ]  # fmt: skip
    zero_or_more = [
        ("training", "steps"), ("optimizer", "weight_decay"), ("optimizer", "eps"), ("lr_scheduler", "warmup_steps"),
        ("lr_scheduler", "decay_ratio"), ("lr_scheduler", "min_lr_factor"), ("checkpoint", "keep_latest_k"),
        ("validation", "freq"), ("data", "num_proc"), ("moe", "router_aux_loss_coef"),
    ]  # fmt: skip
    for keys, minimum, words in ((positive, 0, "greater than 0"), (zero_or_more, -1e-30, "0 or more")):
        for section, key in keys:
            value = getattr(getattr(config, section), key)
            if not (value > minimum and math.isfinite(value)):
                raise ValueError(f"[{section}] {key} = {value}: must be {words}")
    for section, key in (("model", "path"), ("data", "path")):
        if not getattr(getattr(config, section), key):
            raise ValueError(f"[{section}] {key} is empty: set it in the TOML file or with --{section}.{key}")
    if config.lr_scheduler.decay_ratio > 1:
        raise ValueError(f"[lr_scheduler] decay_ratio = {config.lr_scheduler.decay_ratio}: must be at most 1")
    if config.training.global_batch_size == 0 or config.training.global_batch_size < -1:
        raise ValueError(f"[training] global_batch_size = {config.training.global_batch_size}: must be -1 or positive")
    if not 0 <= config.debug.seed < 2**32:
        raise ValueError(f"[debug] seed = {config.debug.seed}: must be from 0 to 2**32 - 1")


def changes_on_resume(saved: dict[str, Any], config: Config) -> str:
    """What differs between the configuration of a checkpoint and this one, for the log; "" if nothing that acts.

    Raises ValueError for keys that must stay as they were.
    """
    now, found = dataclasses.asdict(config), {}
    saved = {
        section: table | saved.get(section, {})
        for section, table in dataclasses.asdict(Config()).items()
        if section != "dry_run"
    }
    for group in ("refused", "free"):
        pairs = [key.split(".") for key in ON_RESUME[group].split()]
        found[group] = ", ".join(
            f"[{section}] {key} {saved[section][key]!r} -> {now[section][key]!r}"
            for section, key in pairs
            if saved[section][key] != now[section][key]
        )
    if found["refused"]:
        raise ValueError(
            f"the checkpoint was written with other settings that cannot change in the middle of a run: "
            f"{found['refused']}. Put them back, or start a new run (--job.dump_folder) from the exported folder"
        )
    return found["free"]


def toml_text(config: Config) -> str:
    """The resolved configuration as TOML (strings, numbers and booleans are written as JSON does)."""
    lines = []
    for section, table in dataclasses.asdict(config).items():
        if not isinstance(table, dict):
            continue  # dry_run is for the command line
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)
