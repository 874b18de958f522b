"""What the three training scripts share before and after the loop, in the order in which they call it.

1. distributed     device, process group, mesh, SIGTERM, errors that reach the terminal
2. model folder    hub download, config.json, the fields that we refuse
3. data            token ids on disk -> sequences of exactly seq_len tokens, the same global order on every mesh
4. safetensors     Hugging Face folder in, Hugging Face folder out, one tensor at a time, strict both ways

A line lives here when all three scripts would hold it and a fix must reach all three. The parts of the loop itself are
in loop.py, what a person sees of it in metrics.py, the configuration in configs/schema.py.
Import this module before anything of torchtitan: it tells torchtitan which device to use (see `prepare_torchtitan`).
Words: *axis* is an axis of the device mesh, *dim* is a dimension of a tensor.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import threading
import traceback
import types
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import HUB_ID, NKI, Compile, Config, Data, MoE, Profiling, parse_config
from dataset import Tokenized

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

REPO = Path(__file__).resolve().parent
IGNORE_INDEX = -100  # label of a position that carries no loss (PyTorch's and Hugging Face's convention)


# ---------------------------------------------------------------------------------------------------------------------
# 1. Device, process group, mesh
# ---------------------------------------------------------------------------------------------------------------------

BACKENDS = {"neuron": "neuron", "cuda": "nccl", "cpu": "gloo"}


def pick_device_type() -> str:
    """neuron if TorchNeuron has registered its device, else cuda, else cpu (device_facts#device-name)."""
    neuron = getattr(torch, "neuron", None)  # appears when torch_neuronx has autoloaded
    if neuron is not None and neuron.is_available():
        return "neuron"
    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare_torchtitan(device_type: str) -> None:
    """Make torchtitan 0.3.0 importable and tell it the device; must run before its other modules are imported.

    - Its Qwen3 imports `triton` unguarded, for kernels of an expert-parallel backend that is not used here. Where
      triton is absent (Mac, CPU wheels) that one kernel module is replaced by empty names. The name `triton` itself
      is left alone: Inductor would believe that it is installed (device_facts#torchtitan-on-neuron).
    - It decides on "cuda" at import when it sees no accelerator (torchtitan/tools/utils.py, `get_device_info`).
    """
    if importlib.util.find_spec("triton") is None:
        stub = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
        for name in (
            "copy_full_counts_to_peers_kernel", "copy_rows_to_peers_kernel", "expand_topk_grad_kernel",
            "fill_combine_metadata_kernel", "fill_dispatch_metadata_kernel", "invert_flat_indices_kernel",
            "reduce_topk_slots_kernel", "topk_scores_grad_kernel",
        ):  # fmt: skip
            setattr(stub, name, None)
        sys.modules.setdefault(stub.__name__, stub)
    from torchtitan.tools import utils

    utils.device_type = device_type
    utils.device_module = getattr(torch, device_type)


DEVICE_TYPE = pick_device_type()
prepare_torchtitan(DEVICE_TYPE)
# Gathering a parameter that is cut over tp and fsdp takes two all-gathers: slow in a loop, right for an export.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
# torchtitan's router asks for an fp32 autocast, which CPU lacks: it computes in the dtype of its input there.
warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")


def init_distributed(config: Config) -> tuple[torch.device, dist.ProcessGroup]:
    """Start the process group and return (device, CPU group). Works under torchrun and as one plain process.

    The process group comes first: on Neuron it assigns the core and starts the runtime, and nothing may touch the
    device before it. There the device is the bare "neuron": an index is wrong on most ranks
    (device_facts#process-group-first). The second group runs on gloo, for objects and CPU tensors: checkpoints plan
    through it (device_facts#gloo-beside-neuron).
    """
    if config.dry_run:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend
        from torchtitan.distributed import parallel_dims

        parallel_dims.device_type = "cpu"  # the meshes of a dry run touch no device
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size(config))
        return torch.device("cpu"), dist.group.WORLD
    if DEVICE_TYPE == "neuron":
        check_neuron_ranks(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        pin_to_numa_node(int(os.environ.get("LOCAL_RANK", "0")))
    elif Path("/dev/neuron0").exists() and os.environ.get("IGNORE_NEURON") != "1":
        from tools import doctor

        problems = " ".join(doctor.diagnose(doctor.gather_facts())) or f"torch found {DEVICE_TYPE} only."
        raise RuntimeError(f"Neuron devices are here, but not used: {problems} (To train without: IGNORE_NEURON=1)")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    timeout = timedelta(seconds=config.comm.timeout_seconds)
    store = dist.HashStore() if "MASTER_ADDR" not in os.environ else None  # one plain process needs no address
    dist.init_process_group(
        BACKENDS[DEVICE_TYPE],
        timeout=timeout,
        store=store,
        rank=int(os.environ["RANK"]) if store else -1,
        world_size=int(os.environ["WORLD_SIZE"]) if store else -1,
    )
    cpu_group = dist.group.WORLD if DEVICE_TYPE == "cpu" else dist.new_group(backend="gloo", timeout=timeout)
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", int(os.environ["LOCAL_RANK"])), cpu_group
    return torch.device(DEVICE_TYPE), cpu_group


def check_neuron_ranks(ranks: int) -> None:
    """Processes of this machine must be all cores or whole chips of 4 (device_facts#process-groups)."""
    if ranks not in (4, 16, 64):
        raise ValueError(
            f"{ranks} processes on this machine: Neuron needs one per logical core, 64 on a trn2.48xlarge, or whole "
            f"chips, 4 or 16. Set NPROC, or [launch] nproc_per_node"
        )


def pin_to_numa_node(local_rank: int) -> None:
    """Keep this rank on the CPUs beside its chip; without it throughput was seen to halve (device_facts#numa).

    The map is a public measurement of one trn2.48xlarge, so it applies to 192 CPUs only. Rank r
    has core r, four cores are a chip. NUMA_PINNING=0 turns it off.
    """
    if os.cpu_count() != 192 or os.environ.get("NUMA_PINNING") == "0" or not hasattr(os, "sched_setaffinity"):
        return
    chip = local_rank // 4
    far = chip < 4 or chip >= 12
    cpus = [*range(48, 96), *range(144, 192)] if far else [*range(48), *range(96, 144)]
    os.sched_setaffinity(0, cpus)
    if local_rank == 0:
        print("pinning      ranks to the CPUs of their chip's NUMA node; NUMA_PINNING=0 turns it off", flush=True)


def world_size(config: Config) -> int:
    """Number of processes that torchrun started, 1 without it; in a dry run, the number that run.sh would start."""
    if not config.dry_run:
        return int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("NPROC") or config.launch.nproc_per_node) * int(os.environ.get("NNODES") or 1)


def check_parallelism(config: Config, hf_config: Any, world_size: int, path: str) -> None:
    """Every divisibility rule, before weights are read. Raises ValueError: field, value, degree, what is allowed."""
    p, t = config.parallelism, config.training
    backend = config.compile.backend
    if config.compile.enable and not config.dry_run and (backend == "neuron") != (DEVICE_TYPE == "neuron"):
        allowed = "must be 'neuron', the device's own" if DEVICE_TYPE == "neuron" else "needs a Neuron device"
        raise ValueError(
            f"[compile] backend = {backend!r} on {DEVICE_TYPE}: {allowed}; or set [compile] enable = false"
        )
    tp, replicate, shard = p.tensor_parallel_degree, p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    known = tp * replicate * (1 if shard == -1 else shard)
    if (world_size % known if shard == -1 else world_size != known) or shard == 0 or shard < -1:
        raise ValueError(
            f"[parallelism] replicate {replicate} x shard {shard} x tensor {tp} does not make {world_size} processes: "
            f"their product must be {world_size} (shard = -1 takes what remains)"
        )
    data_ranks = world_size // tp
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    widths = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": hf_config.vocab_size}
    experts = getattr(hf_config, "num_experts", 0)
    if experts and path == "native":  # torchtitan cuts experts by width, the other paths give whole ones to the ranks
        widths["moe_intermediate_size"] = hf_config.moe_intermediate_size
        columns = hf_config.moe_intermediate_size // tp
        if t.mixed_precision_param == "bfloat16" and columns % 8:
            raise ValueError(
                f"[parallelism] tensor_parallel_degree = {tp} leaves {columns} columns of moe_intermediate_size = "
                f"{hf_config.moe_intermediate_size} on a rank: torch's grouped matmul in bfloat16 needs a multiple of 8"
            )
    elif experts:
        widths["num_experts"] = experts
    if experts and path != "hf":  # torchtitan's router: DTensor cannot cut the gradient of the scores unevenly
        widths["num_experts_per_tok"] = hf_config.num_experts_per_tok
    if any(not is_moe_layer(hf_config, i) for i in range(hf_config.num_hidden_layers)):
        widths["intermediate_size"] = hf_config.intermediate_size
    for name, size in widths.items():
        if size % tp:
            allowed = [d for d in range(1, min(heads, kv_heads) + 1) if not any(w % d for w in widths.values())]
            raise ValueError(
                f"[parallelism] tensor_parallel_degree = {tp} does not divide {name} = {size} of the model; "
                f"degrees that divide {', '.join(widths)}: {allowed}"
            )
    if tp > 1 and p.enable_sequence_parallel and t.seq_len % tp:
        raise ValueError(f"[training] seq_len = {t.seq_len} is not a multiple of tensor_parallel_degree = {tp}")
    ep = p.expert_parallel_degree
    if ep > 1:
        if not experts:
            raise ValueError(f"[parallelism] expert_parallel_degree = {ep}, but the model has no experts: set it to 1")
        shard = world_size // (tp * replicate)
        if experts % ep or (shard * tp) % ep:
            raise ValueError(
                f"[parallelism] expert_parallel_degree = {ep} must divide num_experts = {experts} and "
                f"shard x tensor = {shard} x {tp}"
            )
    if t.seq_len > hf_config.max_position_embeddings:
        raise ValueError(
            f"[training] seq_len = {t.seq_len} exceeds max_position_embeddings = {hf_config.max_position_embeddings}"
        )
    if t.global_batch_size != -1 and t.global_batch_size % (t.local_batch_size * data_ranks):
        raise ValueError(
            f"[training] global_batch_size = {t.global_batch_size} is not a multiple of local_batch_size x data ranks "
            f"= {t.local_batch_size} x {data_ranks}"
        )


def log_unused(config: Config, hf_config: Any, path: str) -> None:
    """One line for each key that was set, but has no effect on this path, model or mesh."""
    c, p = config, config.parallelism
    unused = {
        "[nki]": path != "nki_moe" and c.nki != NKI(),
        "[moe] router_aux_loss_coef": not getattr(hf_config, "num_experts", 0) and c.moe != MoE(),
        "[compile] backend": not c.compile.enable and c.compile.backend != Compile.backend,
        "[parallelism] enable_sequence_parallel": p.tensor_parallel_degree == 1 and not p.enable_sequence_parallel,
        "[checkpoint] load_step": not c.checkpoint.enable and c.checkpoint.load_step != -1,
        "[profiling]": not c.profiling.enable and c.profiling != Profiling(),
        "[data] too_long": c.data.format == "text" and c.data.too_long != Data.too_long,
        "[data] text_column": c.data.format != "text" and c.data.text_column != Data.text_column,
        "[validation] freq": not c.validation.path and c.validation.freq != 0,
    }
    for key in (key for key, is_unused in unused.items() if is_unused):
        log(f"no effect    {key}: not used by this run of {path}")


def build_mesh(config: Config, world_size: int) -> Any:
    """torchtitan's ParallelDims with the axes dp_replicate, fsdp, tp (and efsdp, ep).

    `partial_dtensor` keeps data-parallel axes out of the activations' DTensors: it is the backend that trains on CPU,
    and the closest to what AWS runs (device_facts#torchtitan-on-neuron).
    """
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")
    p = config.parallelism
    dims = ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=1,
        tp=p.tensor_parallel_degree,
        pp=1,
        ep=p.expert_parallel_degree,
        world_size=world_size,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    return dims


def data_rank_and_size(dims: Any) -> tuple[int, int]:
    """(index of this data rank, number of data ranks): the ranks of one TP group share an index."""
    return dist.get_rank() // dims.tp, dims.dp_replicate * dims.dp_shard


def log(message: str) -> None:
    """Print one line from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def catch_sigterm() -> threading.Event:
    """An event that SIGTERM sets: the loop finishes its step, saves, and exits with status 0."""
    event = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: event.set())
    return event


def launch(main: Callable[[Config], None]) -> None:
    """`main(parse_config(sys.argv))`, with one clear message when it fails and no process left hanging; never returns.

    An error raised by these files is the user's to fix: message only. Anything else keeps its traceback.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: without torchrun nobody would end this rank
    try:
        main(parse_config(sys.argv[1:]))
    except Exception as error:  # whatever it is, this rank reports it and ends
        where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = isinstance(error, ValueError | RuntimeError) and where.parent in (REPO, REPO / "configs", REPO / "tools")
        if _first_to_fail():
            if not ours:
                traceback.print_exc()
            print(f"error: {error}", file=sys.stderr, flush=True)
            if "RUN_ERROR_FILE" in os.environ:  # run.sh shows it again, below torchrun's report
                Path(os.environ["RUN_ERROR_FILE"]).write_text(f"error: {error}\n")
        sys.stdout.flush()
        os._exit(1)  # a normal exit may wait for ranks that are inside a collective; torchrun ends those
    # A gloo thread that frees its last tensor while the interpreter takes itself apart aborts a run that is complete.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def _first_to_fail() -> bool:
    """True on the one rank that reports: usually all ranks fail, and torchrun ends the others as soon as one has."""
    if "RUN_ERROR_FILE" in os.environ:
        try:
            Path(os.environ["RUN_ERROR_FILE"]).touch(exist_ok=False)
            return True
        except FileExistsError:
            return False
    return not dist.is_initialized() or dist.distributed_c10d._get_default_store().add("reported_error", 1) == 1


# ---------------------------------------------------------------------------------------------------------------------
# 2. Model folder and config.json
# ---------------------------------------------------------------------------------------------------------------------


def fetch_model(path: str, need_weights: bool = True, dry_run: bool = False) -> Path:
    """A local folder as it is, or the snapshot of a hub id; downloads before the process group starts.

    A dry run needs no more than config.json: configs/hf holds those of the Qwen3 models, for use without a network.

    One process per node downloads, the others wait for its lock. Raises RuntimeError when the hub is out of reach
    and the snapshot is not in the cache, with both ways out.
    """
    if Path(path).is_dir():
        return Path(path)
    if not HUB_ID.fullmatch(path):
        raise ValueError(
            f"[model] path = {path!r} is neither a folder on this machine nor a hub id such as Qwen/Qwen3-8B"
        )
    from filelock import FileLock
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if os.environ.get("LOCAL_RANK", "0") != "0" or not sys.stderr.isatty():
        disable_progress_bars()
    patterns = ["*.json", "*.jinja", "*.txt", *(["*.safetensors"] if need_weights else [])]
    if dry_run and (folder := _sizes_only(path)):
        return folder
    cache = Path(constants.HF_HUB_CACHE)
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    # A cache of another user may be read-only; what is complete in it needs no lock.
    writable = os.access(cache, os.W_OK)
    lock = FileLock(cache / f".{path.replace('/', '--')}.lock") if writable else contextlib.nullcontext()
    try:
        with lock:
            return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the hub's, the network's or the disk's: the ways out are the same
        known = sorted(f"Qwen/{f.parent.name}" for f in REPO.glob("configs/hf/*/config.json"))
        raise RuntimeError(
            f"[model] path = {path!r}: not in the hub cache ({constants.HF_HUB_CACHE}) and the download failed "
            f"({type(error).__name__}). Either connect this machine to the Hugging Face hub (HF_HUB_OFFLINE must be "
            f"unset), or copy the model folder here and set --model.path to it."
            + (f" A dry run knows without a network: {', '.join(known)}" if dry_run else "")
        ) from error


def _sizes_only(path: str) -> Path | None:
    """A folder with the config.json of a hub id: of the hub cache, else of this repository (dry runs only)."""
    from huggingface_hub import try_to_load_from_cache

    if isinstance(cached := try_to_load_from_cache(path, "config.json"), str):
        return Path(cached).parent
    shipped = REPO / "configs" / "hf" / path.removeprefix("Qwen/")
    if not (shipped / "config.json").is_file():
        return None
    log(f"model        sizes from {shipped.relative_to(REPO)}/config.json (dry run only); {path} is not downloaded")
    return shipped


def load_hf_config(folder: Path) -> Any:
    """config.json as Transformers reads it, refused by field name where a training path would not honour it."""
    from transformers import AutoConfig

    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    if raw.get("model_type") not in ("qwen3", "qwen3_moe"):
        raise ValueError(f"{file}: model_type = {raw.get('model_type')!r} is not supported; allowed: qwen3, qwen3_moe")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # Transformers validates the fields, with exception classes of its own
        raise ValueError(f"{file}: Transformers refuses it: {error}") from None
    rope = config.rope_parameters or {}
    refused = {
        "quantization_config": (raw.get("quantization_config"), None),
        "use_sliding_window": (bool(getattr(config, "use_sliding_window", False)), False),
        "layer_types": (set(getattr(config, "layer_types", None) or ["full_attention"]), {"full_attention"}),
        "attention_bias": (bool(config.attention_bias), False),
        "attention_dropout": (config.attention_dropout, 0.0),
        "hidden_act": (config.hidden_act, "silu"),
        "rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for name, (value, allowed) in refused.items():
        if value != allowed:
            raise ValueError(f"{file}: {name} = {value!r} is not supported; allowed: {allowed!r}")
    if getattr(config, "head_dim", None) is None:  # Transformers' own rule for files that leave it out
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def is_moe_layer(hf_config: Any, layer: int) -> bool:
    """Transformers' rule (Qwen3MoeDecoderLayer): which decoder layers hold experts."""
    if getattr(hf_config, "num_experts", 0) == 0 or layer in hf_config.mlp_only_layers:
        return False
    return (layer + 1) % hf_config.decoder_sparse_step == 0


def load_tokenizer(folder: Path, hf_config: Any) -> Any:
    """The folder's tokenizer; refused when it knows ids that the model's embedding lacks."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: the tokenizer cannot be loaded: {error}") from None
    highest = max(tokenizer.get_vocab().values())
    if highest >= hf_config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has ids up to {highest}, but config.json has vocab_size = {hf_config.vocab_size}"
        )
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# 3. Data
# ---------------------------------------------------------------------------------------------------------------------
# The documents are token ids on disk before this module is asked for them (see dataset.py). The order is global and a
# matter of arithmetic: sequence k of a run is the same on every mesh, so the position is one number, and a run resumes
# on any number of ranks without a gap or a repeat.


class Batch(NamedTuple):
    """One micro-batch of one data rank; the shapes never change during a run."""

    input_ids: torch.Tensor  # [B, L] int32
    labels: torch.Tensor  # [B, L] int32, IGNORE_INDEX where no loss is counted
    positions: torch.Tensor  # [B, L] int64, 0 at the start of each document if document_mask, else 0..L-1
    real: torch.Tensor  # [B, L] bool, False on padding

    def to(self, device: torch.device) -> Batch:
        return Batch(*(t.to(device) for t in self))


class PackedData:
    """Documents in sequences of exactly seq_len tokens, in one global order.

    `next_step()` gives the micro-batches of this data rank for one optimizer step and the number of counted labels of
    the step over all ranks. With document_mask, positions restart at each document and the label across a document
    boundary is not counted.

    Text is one long stream of documents, cut anywhere. Documents with tokens that are not trained on (conversations)
    stay whole: they are packed into sequences by best fit, padding behind them.
    """

    def __init__(self, config: Config, data: Tokenized, rank: int, ranks: int, loop: bool = True):
        self.data, self.loop, self.rank, self.ranks = data, loop, rank, ranks
        self.document_mask, self.seq_len = config.data.document_mask, config.training.seq_len
        self.local = config.training.local_batch_size
        self.step_size = config.training.global_batch_size
        if self.step_size == -1:
            self.step_size = self.local * ranks
        self.shuffle, self.seed = config.data.shuffle and loop, config.debug.seed
        self.lengths, self.too_long = data.lengths, 0
        if data.whole_documents:
            long = data.lengths > self.seq_len
            self.too_long = int(long.sum())
            if self.too_long and config.data.too_long == "error":
                first = int(long.argmax())
                raise ValueError(
                    f"{data.place(first)}: {data.lengths[first]:,} tokens, more than [training] seq_len = "
                    f"{self.seq_len}, as {self.too_long:,} of {len(long):,} documents: raise it, or choose [data] "
                    f"too_long = 'skip' or 'truncate' (keeps the beginning)"
                )
            self.lengths = np.minimum(data.lengths, self.seq_len if config.data.too_long == "truncate" else 2**31 - 1)
            self.bins = pack_best_fit(self.lengths, self.seq_len)
            self.sequences_per_epoch = float(len(self.bins))
        else:
            self.tokens = int(self.lengths.sum(dtype=np.int64))
            self.sequences_per_epoch = self.tokens / self.seq_len
        if not self.sequences_per_epoch:
            raise ValueError(f"{data.meta['files'][0]}: no document is short enough for seq_len = {self.seq_len}")
        self._order = functools.lru_cache(maxsize=2)(self._order_of_epoch)
        self.sequences = 0  # consumed so far by all ranks: the whole state

    def _order_of_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(order of documents or bins, end of each in the stream of the epoch)."""
        lengths = np.array([1] * len(self.bins)) if self.data.whole_documents else self.lengths
        order = np.arange(len(lengths), dtype=np.int32)
        if self.shuffle:
            order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(order)
        return order, np.cumsum(lengths[order], dtype=np.int64)

    def _documents_of(self, sequence: int) -> Iterator[tuple[int, int, int]]:
        """(document, first token, number of tokens) of what sequence k holds, in order; the last may be too long."""
        if self.data.whole_documents:
            epoch, k = divmod(sequence, len(self.bins))
            if not epoch or self.loop:
                yield from ((int(d), 0, int(self.lengths[d])) for d in self.bins[self._order(epoch)[0][k]])
            return
        # Tokens [k L, k L + L] of the endless stream of epochs: the last one, here a label, is the next one's first.
        position, end = sequence * self.seq_len, sequence * self.seq_len + self.seq_len + 1
        while position < end and (position < self.tokens or self.loop):
            epoch, offset = divmod(position, self.tokens)
            order, ends = self._order(epoch)
            i = int(np.searchsorted(ends, offset, side="right"))
            left = int(ends[i]) - offset
            yield int(order[i]), int(self.lengths[order[i]]) - left, left
            position += left

    def sequence(self, k: int) -> Batch:
        """Sequence k of the run, without a batch dim; all padding behind the end of a finite set."""
        n, filled = self.seq_len, 0
        codes = np.full(n + 1, ~self.data.end_id, np.int32)  # an id that is trained on, or the complement of one
        starts = np.zeros(n + 1, bool)
        for document, first, count in self._documents_of(k):
            count = min(count, n + 1 - filled)
            codes[filled : filled + count] = self.data.read(document)[first : first + count]
            starts[filled] = first == 0
            if self.data.whole_documents:  # its first token follows nothing, or another document
                codes[filled] = min(codes[filled], ~codes[filled])
            filled += count
        starts[filled : filled + 1] = True  # padding is a document of its own
        counted = codes >= 0
        ids = np.where(counted, codes, ~codes)
        if not self.document_mask:
            starts[:] = False
        labels = np.where(counted[1:] & ~starts[1:], ids[1:], IGNORE_INDEX)
        index = np.arange(n)
        positions = index - np.maximum.accumulate(np.where(starts[:n], index, 0))
        return Batch(*map(torch.from_numpy, (ids[:n], labels.astype(np.int32), positions, index < filled)))

    def next_step(self) -> tuple[list[Batch], int] | None:
        """(micro-batches of this rank, counted labels of the step over all data ranks); None at a finite end.

        Sequence k of a step goes to micro-step k // (local x ranks), data rank (k // local) % ranks.
        """
        if not self.loop and self.sequences >= self.finite_sequences():
            return None
        step = [self.sequence(self.sequences + k) for k in range(self.step_size)]
        counted = sum(int((sequence.labels != IGNORE_INDEX).sum()) for sequence in step)
        if self.loop and counted == 0:
            raise ValueError(
                f"{self.data.meta['files'][0]}: a whole step of {self.step_size} sequences holds no counted label"
            )
        self.sequences += self.step_size
        mine = [sequence for k, sequence in enumerate(step) if (k // self.local) % self.ranks == self.rank]
        chunks = [mine[first : first + self.local] for first in range(0, len(mine), self.local)]
        return [Batch(*map(torch.stack, zip(*chunk, strict=True))) for chunk in chunks], counted

    def places_of_last_step(self) -> list[str]:
        """File and row of every document of the last step, those of this data rank first."""
        step = range(max(0, self.sequences - self.step_size), self.sequences)
        mine = [k for i, k in enumerate(step) if (i // self.local) % self.ranks == self.rank]
        documents = [d for k in [*mine, *step] for d, _, _ in self._documents_of(k)]
        return [self.data.place(d) for d in dict.fromkeys(documents)]

    def finite_sequences(self) -> int:
        """Sequences of one pass over the data: every token once, as an input or as the last label."""
        return len(self.bins) if self.data.whole_documents else -(-(self.tokens - 1) // self.seq_len)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it counts in; the same on every rank."""
        return {"sequences": self.sequences, "digest": self.data.meta["digest"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("digest") != self.data.meta["digest"]:
            raise ValueError(
                f"{self.data.meta['files'][0]}: the tokenized data is not the checkpoint's (checksum, rows, tokens "
                f"{state.get('digest')}, now {self.data.meta['digest']}); restore it, or start a new run from the "
                f"exported folder"
            )
        self.sequences = state["sequences"]


def pack_best_fit(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Indices of lengths in bins of at most `size`; 0 and what is larger than a bin is left out.

    Best fit, longest first: each goes to the fullest bin that has room. Bins are in the order of their first document.
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room -> bins
    rooms: list[int] = []  # keys of with_room, sorted
    for i in np.argsort(-lengths, kind="stable"):
        length = int(lengths[i])
        if not 0 < length <= size:
            continue
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, chosen = size, len(bins)
            bins.append([])
        else:
            room = rooms[at]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        bins[chosen].append(int(i))
        if room > length:
            if room - length not in with_room:
                insort(rooms, room - length)
            with_room.setdefault(room - length, []).append(chosen)
    return sorted(sorted(b) for b in bins)


def check_same_data(sets: list[Tokenized | None], cpu_group: dist.ProcessGroup) -> None:
    """Refuse nodes that tokenized different files: each reads its own disk."""
    mine = [data.meta["digest"] if data else None for data in sets]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=cpu_group)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise RuntimeError(
                f"rank {rank} has other training or validation data than rank 0 (checksum, documents, tokens: {other}, "
                f"there {found[0]}): copy the same files, tokenizer and packages to every node"
            )


def validation_steps(config: Config, data: Tokenized, rank: int, ranks: int) -> list[tuple[list[Batch], int]]:
    """The fixed validation set: at most `validation.steps` global batches in file order, the last one padded.

    Raises ValueError at start when not one label is counted.
    """
    packed = PackedData(config, data, rank, ranks, loop=False)
    steps = []
    while len(steps) < config.validation.steps and (step := packed.next_step()) is not None:
        steps.append(step)
    if sum(counted for _, counted in steps) == 0:
        raise ValueError(f"[validation] path = {config.validation.path!r} holds no counted label")
    return steps


def document_mask(positions: torch.Tensor) -> torch.Tensor:
    """positions [B, L], 0 at each document start -> [B, 1, L, L] bool, True where a query may see a key."""
    length = positions.shape[1]
    document = (positions == 0).cumsum(dim=1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()


# ---------------------------------------------------------------------------------------------------------------------
# 4. Safetensors: Hugging Face folder in and out
# ---------------------------------------------------------------------------------------------------------------------


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Piece(NamedTuple):
    """One Hugging Face tensor inside a model parameter: the box at `offset` of the parameter, of size `shape`.

    A stack of experts has leading dims of size 1 in `shape` that the Hugging Face tensor lacks.
    """

    hf_name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if len(self.shape) == 3 else self.shape


Pieces = Callable[[str, tuple[int, ...]], list[Piece]]  # (parameter name, full shape) -> what it is made of


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trained parameters under their plain names, without the prefix that activation checkpointing adds."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # nki_moe keeps transposed copies that no file holds
            yield name.replace("_checkpoint_wrapped_module.", ""), parameter


class HFFolder:
    """The tensors of a Hugging Face folder by name, read lazily and by slice. Only safetensors are ever opened."""

    def __init__(self, folder: Path):
        self.folder, self._open = folder, {}
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                self.file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{index} is not a valid index of safetensors files") from None
            if absent := sorted({f for f in self.file_of.values() if not (folder / f).is_file()}):
                raise ValueError(f"{folder}: the index names files that are not there: {', '.join(absent)}")
            files = set(self.file_of.values())
            held = {(name, file) for file in files for name in self._handle(file).keys()}  # noqa: SIM118 - no iterator
            for name, file in sorted(self.file_of.items() - held):
                raise ValueError(f"{index} places {name} in {file}, but that file does not hold it")
            for name, file in sorted(held - self.file_of.items()):
                raise ValueError(f"{folder / file} holds {name}, but {index.name} does not list it there")
        elif (folder / "model.safetensors").is_file():
            self.file_of = dict.fromkeys(self._handle("model.safetensors").keys(), "model.safetensors")
        else:
            raise ValueError(
                f"{folder} has neither model.safetensors nor model.safetensors.index.json; "
                f"other weight formats (.bin, .pt, .gguf) are not read: convert them with Transformers' save_pretrained"
            )
        self.fused = {n for n in self.file_of if n.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))}

    def _handle(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            path = self.folder / file
            try:
                self._open[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                with open(path, "rb") as handle:
                    pointer = handle.read(40).startswith(b"version https://git-lfs")
                why = "it is a Git LFS pointer, not the file: run `git lfs pull`" if pointer else "incomplete download?"
                raise ValueError(f"{path} is not a readable safetensors file ({error}); {why}") from None
        return self._open[file]

    def _source(self, hf_name: str) -> tuple[str, tuple[int | slice, ...]]:
        """(tensor in the files, index into it): experts may be stored one by one or fused, as Transformers v5 can."""
        if hf_name in self.file_of or not self.fused:
            return hf_name, ()
        match = re.fullmatch(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", hf_name)
        if not match:
            return hf_name, ()
        prefix, expert, kind = match.groups()
        if kind == "down":
            return f"{prefix}.down_proj", (int(expert),)
        fused = f"{prefix}.gate_up_proj"  # [E, 2 I, H]: gate rows first
        half = self._slice(fused).get_shape()[1] // 2 if fused in self.file_of else 0
        return fused, (int(expert), slice(0, half) if kind == "gate" else slice(half, 2 * half))

    def _slice(self, name: str) -> Any:
        return self._handle(self.file_of[name]).get_slice(name)

    def info(self, hf_name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """(shape, dtype) of a Hugging Face tensor, None if the files lack it."""
        name, index = self._source(hf_name)
        if name not in self.file_of:
            return None
        shape = list(self._slice(name).get_shape())
        if index and index[0] >= shape[0]:
            return None
        if index:
            shape = [index[1].stop - index[1].start, *shape[2:]] if len(index) == 2 else shape[1:]
        dtype = self._slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(f"{self.folder}: {name} is of type {dtype}; readable are {', '.join(_DTYPES)}")
        return tuple(shape), _DTYPES[dtype]

    def read(self, hf_name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """The box of one tensor; only these bytes are read."""
        name, index = self._source(hf_name)
        if len(index) == 2:
            start = index[1].start
            box = (slice(box[0].start + start, box[0].stop + start), *box[1:])
        if index:
            return self._slice(name)[(slice(index[0], index[0] + 1), *box)][0]
        return self._slice(name)[box]

    def read_all(self, hf_name: str) -> torch.Tensor:
        """One whole tensor."""
        return self.read(hf_name, tuple(slice(0, n) for n in self.info(hf_name)[0]))

    def _same(self, a: str, b: str, rows_at_once: int = 4096) -> bool:
        """Whether two tensors hold the same values."""
        if self.info(a) != self.info(b):
            return False
        rows, *columns = self.info(a)[0]
        starts = range(0, rows, rows_at_once)
        boxes = [(slice(r, min(r + rows_at_once, rows)), *(slice(0, n) for n in columns)) for r in starts]
        return all(torch.equal(self.read(a, box), self.read(b, box)) for box in boxes)

    def check(self, wanted: dict[str, tuple[int, ...]], tied: bool) -> None:
        """Every wanted tensor there with its shape, every tensor in the files wanted. Raises ValueError with names."""
        sources = {name: self._source(name)[0] for name in wanted}
        missing = [name for name in wanted if self.info(name) is None]
        unexpected = sorted(set(self.file_of) - set(sources.values()))
        if tied and "lm_head.weight" in unexpected:
            if not self._same("lm_head.weight", "model.embed_tokens.weight"):
                raise ValueError(
                    f"{self.folder}: config.json has tie_word_embeddings = true, but lm_head.weight of the files "
                    f"differs from model.embed_tokens.weight. Set it to false to train and export that head, or remove "
                    f"lm_head.weight from the files to use the embedding as head"
                )
            unexpected.remove("lm_head.weight")
        wrong = [
            f"{name} {self.info(name)[0]} instead of {shape}"
            for name, shape in wanted.items()
            if name not in missing and self.info(name)[0] != shape
        ]
        fused_count = {n: self._slice(n).get_shape()[0] for n in self.fused}
        experts = {n: sum(s == n for s in sources.values()) // (2 if "gate_up" in n else 1) for n in self.fused}
        wrong += [
            f"{n} holds {fused_count[n]} experts, not {experts[n]}" for n in self.fused if experts[n] != fused_count[n]
        ]
        backbone = {name for name in missing if name.startswith("model.")}
        if backbone and all(name.removeprefix("model.") in self.file_of for name in backbone):
            raise ValueError(
                f"{self.folder}: its tensors are named as in Qwen3-Embedding, without `model.` and without a language "
                f"head. Train from the language model of that size, such as Qwen/Qwen3-0.6B"
            )
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", wrong)):
            if names:
                some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                raise ValueError(f"{self.folder}: {len(names)} tensors {what} for this config.json: {some}")


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _local_box(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of this rank's part inside the full parameter: always one box, FSDP over TP included."""
    if isinstance(parameter, DTensor):
        return compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(parameter.shape), (0,) * parameter.ndim


def wanted_tensors(model: nn.Module, pieces: Pieces) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that the model is made of."""
    return {p.hf_name: p.hf_shape for name, w in named_parameters(model) for p in pieces(name, tuple(w.shape))}


@torch.no_grad()
def fill_weights(model: nn.Module, pieces: Pieces, read: Callable[[str, tuple[slice, ...]], torch.Tensor]) -> None:
    """Copy into every local shard the boxes it covers; `read(hf_name, box)` gives them.

    Holds at most one shard beside the model. Raises RuntimeError if a shard is not covered exactly.
    """
    for name, parameter in named_parameters(model):
        shape, offset = _local_box(parameter)
        shard = torch.empty(shape, dtype=parameter.dtype)
        filled = 0
        for piece in pieces(name, tuple(parameter.shape)):
            low = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            ends = zip(offset, shape, piece.offset, piece.shape, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(h <= lo for lo, h in zip(low, high, strict=True)):
                continue
            box = tuple(slice(lo - b, h - b) for lo, h, b in zip(low, high, piece.offset, strict=True))
            target = shard[tuple(slice(lo - a, h - a) for lo, h, a in zip(low, high, offset, strict=True))]
            source = read(piece.hf_name, box[len(box) - len(piece.hf_shape) :])
            target.copy_(source.view(target.shape))
            filled += target.numel()
        if filled != shard.numel():
            raise RuntimeError(f"{name}: {filled} of {shard.numel()} values of the local shard were filled")
        to_local(parameter).copy_(shard)


def load_weights(model: nn.Module, pieces: Pieces, folder: Path, tied: bool) -> None:
    """Fill the sharded model from the folder's safetensors; all problems are found before anything is read."""
    files = HFFolder(folder)
    wanted = wanted_tensors(model, pieces)
    files.check(wanted, tied)
    fill_weights(model, pieces, files.read)
    log(f"weights      {len(wanted)} tensors from {folder}")


def random_weights(model: nn.Module, pieces: Pieces, hf_config: Any, seed: int) -> None:
    """Seeded random weights, drawn on CPU per Hugging Face tensor name: the same for every path, mesh and device.

    Norm weights are 1, all others normal with config.json's initializer_range (Transformers' rule for Qwen3). Each row
    has numbers of its own (a counter-based generator), so that a rank draws only the rows of its shards.
    """
    shapes = wanted_tensors(model, pieces)

    def read(hf_name: str, box: tuple[slice, ...]) -> torch.Tensor:
        if len(shapes[hf_name]) == 1:
            return torch.ones(shapes[hf_name])[box]
        key = int.from_bytes(hashlib.sha256(f"{seed} {hf_name}".encode()).digest()[:16], "little")
        out = np.empty((box[0].stop - box[0].start, shapes[hf_name][1]), np.float32)
        for i, row in enumerate(out, start=box[0].start):
            np.random.Generator(np.random.Philox(key=key, counter=i << 128)).standard_normal(dtype=np.float32, out=row)
        return torch.from_numpy(out)[:, box[1]] * hf_config.initializer_range

    fill_weights(model, pieces, read)
    log(f"weights      {len(shapes)} tensors drawn at random from seed {seed}")


TOKENIZER_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(s)) if s.isdigit() else (1, s) for s in re.split(r"(\d+)", name) if s]


@torch.no_grad()
def export_hf_folder(
    model: nn.Module, pieces: Pieces, source: Path, out: Path, dtype: str, cpu_group: dist.ProcessGroup,
    max_file_bytes: int = 5 * 10**9,
) -> None:  # fmt: skip
    """Write a complete Hugging Face folder: weights under Hugging Face names, one tensor per expert, config, tokenizer.

    Parameters are gathered one at a time; files are spread over the ranks. The bytes depend neither on the mesh nor
    on the path. The folder appears under its name when it is complete; an older one is replaced then.
    """
    from safetensors.torch import save_file

    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = wanted_tensors(model, pieces)
    out_dtype = _export_dtypes(wanted, source, dtype)
    files: list[list[str]] = [[]]
    size = 0
    for name in sorted(wanted, key=_natural):
        nbytes = math.prod(wanted[name]) * out_dtype[name].itemsize
        if files[-1] and size + nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    if len(files) == 1:
        file_names = ["model.safetensors"]
    else:
        file_names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    file_of = {name: i for i, names in enumerate(files) for name in names}
    os.umask(umask := os.umask(0))  # can only be read by setting it
    temporary = out.with_name(out.name + ".tmp")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier(group=cpu_group)

    parameters = [(pieces(n, tuple(p.shape)), p) for n, p in named_parameters(model)]
    parameters.sort(key=lambda item: _natural(item[0][0].hf_name))
    waiting: dict[int, dict[str, torch.Tensor]] = {}
    for parts, parameter in progress(parameters, "export"):
        full = parameter.detach()
        narrow = {out_dtype[p.hf_name] for p in parts}
        if len(narrow) == 1:
            full = full.to(narrow.pop())  # before the gather: half the bytes on the wire
        full = full.full_tensor() if isinstance(full, DTensor) else full
        for part in parts:
            index = file_of[part.hf_name]
            if index % world != rank:
                continue
            box = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
            value = full[box].reshape(part.hf_shape).to("cpu", out_dtype[part.hf_name], copy=True).contiguous()
            held = waiting.setdefault(index, {})
            held[part.hf_name] = value
            if len(held) == len(files[index]):
                save_file(held, temporary / file_names[index], metadata={"format": "pt"})
                os.chmod(temporary / file_names[index], 0o666 & ~umask)  # safetensors makes it 0600
                del waiting[index]
    dist.barrier(group=cpu_group)
    if rank == 0:
        if len(files) > 1:
            total = sum(math.prod(wanted[n]) * out_dtype[n].itemsize for n in wanted)
            weight_map = {n: file_names[file_of[n]] for n in sorted(wanted)}
            index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            (temporary / "model.safetensors.index.json").write_text(index_text + "\n")
        _write_config_json(source, temporary, out_dtype)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        replace_folder(temporary, out)
    dist.barrier(group=cpu_group)
    log(f"export       {len(wanted)} tensors in {len(files)} file(s): {out}")
    log("load it with this line:")
    log(f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(out)!r})")


def _export_dtypes(wanted: dict[str, tuple[int, ...]], source: Path, dtype: str) -> dict[str, torch.dtype]:
    if dtype != "source":
        return dict.fromkeys(wanted, getattr(torch, dtype))
    try:
        files = HFFolder(source)
    except ValueError:  # random init from a folder without weights
        return _config_dtype(wanted, source)
    infos = {name: files.info(name) for name in wanted}
    if None in infos.values():  # random init, and the files are of another model
        return _config_dtype(wanted, source)
    return {name: info[1] for name, info in infos.items()}


def _config_dtype(wanted: Iterable[str], source: Path) -> dict[str, torch.dtype]:
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return dict.fromkeys(wanted, getattr(torch, raw.get("dtype") or raw.get("torch_dtype") or "float32"))


def _write_config_json(source: Path, out: Path, out_dtype: dict[str, torch.dtype]) -> None:
    """config.json byte for byte, unless its dtype is not that of the files."""
    text = (source / "config.json").read_text(encoding="utf-8")
    raw = json.loads(text)
    counts: dict[str, int] = {}
    for value in out_dtype.values():
        name = str(value).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + 1
    main = max(counts, key=counts.get)
    if (raw.get("dtype") or raw.get("torch_dtype")) != main:
        # Servers look for the key that they know: those of the source keep their names.
        keys = [key for key in ("dtype", "torch_dtype") if key in raw] or ["dtype"]
        text = json.dumps(raw | dict.fromkeys(keys, main), indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def replace_folder(new: Path, old: Path) -> None:
    """Rename `new` to `old`; what was there is removed only afterwards."""
    aside = old.with_name(old.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)


def progress(items: list, label: str) -> Iterable:
    """A progress bar on rank 0's terminal; none elsewhere."""
    from tqdm import tqdm

    return tqdm(items, desc=label, leave=False, disable=dist.get_rank() != 0 or not sys.stderr.isatty())
