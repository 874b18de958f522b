"""The parts of a training loop that all three scripts share.

1. loss          the output layer with its cross-entropy in chunks, gradient norm, router statistics
2. optimizer     AdamW or SGD, learning-rate schedule, the stop before a bad update
3. checkpoints   torch.distributed.checkpoint, complete or not there at all
4. afterwards    validation, and a sample of text
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    DEVICE_TYPE,
    IGNORE_INDEX,
    REPO,
    Batch,
    PackedData,
    log,
    named_parameters,
    replace_folder,
    to_local,
)
from configs.schema import Config, changes_on_resume, toml_text
from dataset import document_end_id

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# ---------------------------------------------------------------------------------------------------------------------
# 1. Loss, gradient norm, router statistics
# ---------------------------------------------------------------------------------------------------------------------
# N tokens (B*L), V vocabulary (this TP rank's part where noted), D model dim, E experts, K experts per token


class LMHead(nn.Linear):
    """The output layer: logits, or the summed cross-entropy over chunks of tokens, so that full logits never exist.

    Under tensor parallelism the weight is a DTensor sharded over the vocabulary and the hidden states are replicated
    (or a plain tensor that is the same on all TP ranks); the loss then needs three small all-reduces per chunk.
    """

    num_chunks = 8  # torchtitan's default

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> LMHead:
        head = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        head.weight = linear.weight
        return head

    def forward(self, hidden_BLD: torch.Tensor, labels_BL: torch.Tensor | None = None) -> torch.Tensor:
        """[B, L, D] -> logits [B, L, V] without labels, else the fp32 sum of -log p(label) over counted labels."""
        group, vocab_start = None, 0
        weight_VD, hidden = self.weight, hidden_BLD
        if isinstance(weight_VD, DTensor):  # FSDP has unsharded it: what remains is the TP axis
            mesh = weight_VD.device_mesh
            _, offset = compute_local_shape_and_global_offset(weight_VD.shape, mesh, weight_VD.placements)
            group, vocab_start = mesh.get_group(), offset[0]
            if not isinstance(hidden, DTensor):
                hidden = DTensor.from_local(hidden, mesh, run_check=False)
            hidden = hidden.to_local(grad_placements=[Partial()])  # each rank holds the gradient of its vocabulary
            weight_VD = weight_VD.to_local()
        if labels_BL is None:
            logits = nn.functional.linear(hidden, weight_VD)
            if group is None:
                return logits
            parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, logits.contiguous(), group=group)
            return torch.cat(parts, dim=-1)
        return _ChunkedCrossEntropy.apply(
            hidden.flatten(0, 1),
            weight_VD,
            labels_BL.flatten(),
            vocab_start,
            group,
            self.num_chunks,
            torch.is_grad_enabled(),
        )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies, its gradients computed chunk by chunk in the forward pass."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, vocab_start, group, num_chunks, need_grad):
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        vocab_V = torch.arange(
            vocab_start, vocab_start + weight_VD.shape[0], dtype=torch.int32, device=hidden_ND.device
        )
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_grad else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if need_grad else None
        chunk = math.ceil(hidden_ND.shape[0] / num_chunks)
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            h_nD, labels_n1 = hidden_ND[rows], labels_N[rows, None]
            logits_nV = (h_nD @ weight_VD.T).float()
            highest_n1 = logits_nV.amax(dim=1, keepdim=True)
            if group is not None:
                dist.all_reduce(highest_n1, op=dist.ReduceOp.MAX, group=group)
            exp_nV = (logits_nV - highest_n1).exp()
            # A comparison instead of a gather: no 64-bit index, and a label of another rank's vocabulary adds 0.
            is_label_nV = vocab_V == labels_n1
            sums_2n1 = torch.stack([exp_nV.sum(1, keepdim=True), (logits_nV * is_label_nV).sum(1, keepdim=True)])
            if group is not None:
                dist.all_reduce(sums_2n1, group=group)
            counted_n1 = labels_n1 != IGNORE_INDEX
            nll_n1 = sums_2n1[0].log() + highest_n1 - sums_2n1[1]
            total += torch.where(counted_n1, nll_n1, 0.0).sum()
            if need_grad:
                # In place: 13 bytes per logit at the peak instead of 21, and the same numbers.
                grad_nV = exp_nV.div_(sums_2n1[0]).sub_(is_label_nV.float()).mul_(counted_n1).to(hidden_ND.dtype)
                grad_hidden_ND[rows] = grad_nV @ weight_VD
                grad_weight_VD += grad_nV.T @ h_nD
        if need_grad:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx, grad_total):
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        grad = grad_total.to(grad_hidden_ND.dtype)  # 1 in training, see clip_grad_norm
        return grad_hidden_ND * grad, grad_weight_VD * grad, None, None, None, None, None


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float, counted: int = 1) -> torch.Tensor:
    """Divide the gradients of a sum by `counted`, then scale them so that their norm is at most max_norm.

    Returns the norm before clipping, the same on every layout. The division waits until here, where gradients are
    fp32: in the backward pass 1 / counted would be rounded to bf16, and so be off by up to 0.4 % for all of them.

    Squares are summed on the local shards, then over exactly those mesh axes that shard the gradient. (A replicated
    gradient is counted once. Gradients on different meshes are fine, as expert parallelism and the TP of the hf path
    have them; torchtitan's clip_grad_norm_ raises on the latter.)
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    by_axes: dict[tuple, list[torch.Tensor]] = {}
    for gradient in gradients:
        axes: tuple = ()
        if isinstance(gradient, DTensor):
            if any(p.is_partial() for p in gradient.placements):
                raise RuntimeError(f"a gradient is still a partial sum: {gradient.placements}")
            sharded = [i for i, p in enumerate(gradient.placements) if not p.is_replicate()]
            axes = tuple(gradient.device_mesh.get_group(i) for i in sharded)
        by_axes.setdefault(axes, []).append(to_local(gradient))
    total = torch.zeros((), dtype=torch.float32, device=to_local(gradients[0]).device)
    for axes, locals_ in by_axes.items():
        norms = torch.stack(torch._foreach_norm([g for g in locals_ if g.numel()] or [total]))
        squares = norms.float().square().sum()
        for group in axes:
            dist.all_reduce(squares, group=group)
        total += squares
    norm = total.sqrt() / counted
    clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_'s formula
    torch._foreach_mul_([to_local(g) for g in gradients], clip / counted)
    return norm


class Routing(NamedTuple):
    """What one MoE layer's router decided in the last forward pass, on this data rank's tokens."""

    probs_NE: torch.Tensor  # fp32 softmax over all experts, differentiable
    ids_NK: torch.Tensor  # the chosen experts


def is_recomputed() -> bool:
    """True while the backward pass recomputes a checkpointed block.

    The routing of that second forward must not be kept: its graph would hold the activations of the block's attention
    until the next step, as if there were no checkpointing.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def tokens_per_expert(layers: list[Routing], real_BL: torch.Tensor) -> torch.Tensor:
    """[layers, E] fp32: how many real tokens (not padding) chose each expert, on this data rank."""
    real_N = real_BL.flatten()
    experts = torch.arange(layers[0].probs_NE.shape[1], device=real_N.device)
    counts = []
    for layer in layers:
        chosen_NE = (layer.ids_NK[:, :, None] == experts).any(dim=1)  # a token's K experts differ
        counts.append((chosen_NE & real_N[:, None]).float().sum(dim=0))
    return torch.stack(counts).detach()


def load_balancing_loss(layers: list[Routing], real_BL: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Qwen3's balancing loss (Transformers `load_balancing_loss_func`): E * sum_e f_e * P_e.

    f_e is the mean number of choices of expert e per token, P_e its mean router probability, both over the real tokens
    of all layers and of all data ranks of the micro-step (`group` holds the data ranks). Returns this rank's additive
    part: the parts of all data ranks sum to the loss, so its gradient adds up as the cross-entropy's does.
    """
    real_N = real_BL.flatten()
    counts_E = tokens_per_expert(layers, real_N).sum(dim=0)
    tokens = real_N.float().sum() * len(layers)
    stats = torch.cat([counts_E, tokens[None]])
    if group is not None:
        dist.all_reduce(stats, group=group)
    f_E, tokens = stats[:-1] / stats[-1], stats[-1]
    prob_sum_E = torch.stack([(layer.probs_NE * real_N[:, None]).sum(dim=0) for layer in layers]).sum(dim=0)
    return f_E.shape[0] * (f_E * prob_sum_E).sum() / tokens


# ---------------------------------------------------------------------------------------------------------------------
# 2. Optimizer
# ---------------------------------------------------------------------------------------------------------------------


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW or SGD over the sharded fp32 parameters; norm weights (1-D) are not decayed, embeddings if asked for."""
    o = config.optimizer
    decayed, others = [], []
    for name, p in named_parameters(model):
        spared = p.ndim <= 1 or (not o.decay_embeddings and re.search(r"embed|lm_head", name))
        (others if spared else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if o.name == "SGD":
        return torch.optim.SGD(groups, lr=o.lr, foreach=True)
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Config, step: int) -> float:
    """Set and return the rate of the step with this number (the first is 1).

    Linear warmup, constant, decay over the last share of all steps. A function of the step: nothing to save.
    """
    s, total = config.lr_scheduler, config.training.steps
    decay_steps = round(total * s.decay_ratio)
    factor = min(1.0, step / s.warmup_steps) if s.warmup_steps else 1.0
    if decay_steps and step > total - decay_steps:
        done = (step - 1 - (total - decay_steps)) / decay_steps
        left = 1 - done if s.decay_type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        factor = min(factor, s.min_lr_factor + (1 - s.min_lr_factor) * left)
    lr = config.optimizer.lr * factor
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def check_finite(step: int, loss: float, grad_norm: torch.Tensor, data: PackedData) -> None:
    """Stop before the update when the global loss or gradient norm is not finite (on every rank alike)."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm.item())):
        places = data.places_of_last_step()
        more = f" and {len(places) - 8} more" if len(places) > 8 else ""
        raise RuntimeError(
            f"step {step}: loss {loss}, gradient norm {grad_norm.item()}: not finite, weights were not updated. "
            f"Lower [optimizer] lr, add [lr_scheduler] warmup_steps, or look at the data of this step: "
            f"{', '.join(places[:8])}{more}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# 3. Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def run_identity(path_name: str, hf_config: Any) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit: the training path and the sizes in config.json."""
    names = (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok",
        "tie_word_embeddings",
    )  # fmt: skip
    return {"path": path_name, **{n: getattr(hf_config, n) for n in names if getattr(hf_config, n, None) is not None}}


_run_lock: Any = None  # held by rank 0 until its process ends or starts another run


def prepare_run_folder(config: Config, path_name: str, model: nn.Module, cpu_group: dist.ProcessGroup) -> Path:
    """Create <dump_folder>/<path>, lock it, check its disk, and record config, command and versions in it.

    Raises ValueError when it cannot be written, when another run uses it, and when what will be saved does not fit.
    """
    folder = Path(config.job.dump_folder) / path_name
    problem = [None]
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _lock_run_folder(folder)
            for leftover in (*folder.glob("checkpoints/step-*.tmp"), *folder.glob("export.tmp")):
                shutil.rmtree(leftover)  # of a save that was cut off
            problem = [_disk_problem(config, folder, model)]
            (folder / "config.toml").write_text(toml_text(config), encoding="utf-8")
            (folder / "run.json").write_text(json.dumps(run_record(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            problem = [f"[job] dump_folder = {config.job.dump_folder!r} cannot be written: {error}"]
        except ValueError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0, group=cpu_group)
    if problem[0]:
        raise ValueError(problem[0])
    return folder


def _lock_run_folder(folder: Path) -> None:
    """Refuse a folder that a running process writes to; the operating system frees the lock of one that died."""
    global _run_lock
    from filelock import FileLock, Timeout

    if _run_lock is not None:
        _run_lock.release()
    lock, holder = FileLock(folder / ".lock", timeout=0), folder / ".lock_holder"
    try:
        lock.acquire()
    except Timeout:
        who = holder.read_text(encoding="utf-8") if holder.is_file() else "another process"
        raise ValueError(
            f"{folder} is in use by {who}. Wait for it, stop it, or choose another --job.dump_folder"
        ) from None
    _run_lock = lock
    started = datetime.now().astimezone().isoformat(" ", "seconds")
    holder.write_text(f"process {os.getpid()} on {socket.gethostname()} since {started}", encoding="utf-8")


def _disk_problem(config: Config, folder: Path, model: nn.Module) -> str | None:
    """Whether checkpoints and export will fit: as many of each as lie there at once."""
    parameters = sum(p.numel() for _, p in named_parameters(model))
    one_save = parameters * 4 * (3 if config.optimizer.name == "AdamW" else 1)  # fp32 weights and moments
    held, keep = len([s for s, problem in list_checkpoints(folder / "checkpoints") if problem is None]), 0
    if config.checkpoint.enable:
        every = config.training.steps // config.checkpoint.interval + 1
        keep = min(every, config.checkpoint.keep_latest_k + 1) if config.checkpoint.keep_latest_k else every
    export = parameters * (2 if config.export.dtype == "bfloat16" else 4) if config.export.enable else 0
    needed, free = max(0, keep - held) * one_save + export, shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return (
        f"{folder}: {free / 1e9:.3f} GB free, but {max(0, keep - held)} checkpoints of {one_save / 1e9:.3f} GB and an "
        f"export of {export / 1e9:.3f} GB need {needed / 1e9:.3f} GB: make room, choose another --job.dump_folder, or "
        f"lower [checkpoint] keep_latest_k"
    )


def run_record() -> dict[str, Any]:
    """Command, git commit and versions, for the run folder."""
    from importlib.metadata import PackageNotFoundError, version

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False)
    versions = {}
    for name in ("torch", "torchtitan", "transformers", "safetensors", "torch-neuronx", "nki", "neuronx-cc"):
        with contextlib.suppress(PackageNotFoundError):  # most machines have no Neuron packages
            versions[name] = version(name)
    return {
        "command": sys.argv,
        "git_commit": commit.stdout.strip() or None,
        "python": sys.version.split()[0],
        "versions": versions,
        "device": DEVICE_TYPE,
        "world_size": dist.get_world_size(),
    }


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, train_state: dict[str, Any],
    identity: dict[str, Any], config: Config, cpu_group: dist.ProcessGroup,
) -> None:  # fmt: skip
    """Write step-N.tmp, rename it to step-N when complete, then remove the oldest ones beyond keep_latest_k.

    meta.json lists every file with its size, so that a folder that lost a part is recognised, and the configuration.
    """
    keep = config.checkpoint.keep_latest_k
    final, temporary = folder / f"step-{step}", folder / f"step-{step}.tmp"
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier(group=cpu_group)
    started = time.perf_counter()
    try:
        dcp.save(_model_and_optimizer(model, optimizer), checkpoint_id=temporary, process_group=cpu_group)
        if dist.get_rank() == 0:
            torch.save(train_state, temporary / "train_state.pt")
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is no Exception; every rank raises it
        free = shutil.disk_usage(folder).free
        shutil.rmtree(temporary, ignore_errors=True)
        newest = [s for s, problem in list_checkpoints(folder) if problem is None][-1:]
        state = f"the newest complete one is step-{newest[0]}" if newest else "there is no complete one yet"
        raise RuntimeError(
            f"the checkpoint of step {step} could not be written to {temporary} ({free / 1e9:.3f} GB free): "
            f"{str(error).strip().splitlines()[-1]}. It was removed; {state}. Free space and start again"
        ) from error
    if dist.get_rank() == 0:
        sizes = {str(f.relative_to(temporary)): f.stat().st_size for f in sorted(temporary.rglob("*")) if f.is_file()}
        meta = {"step": step, "identity": identity, "files": sizes, "world_size": dist.get_world_size()}
        meta["config"] = asdict(config)
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        replace_folder(temporary, final)
        complete = [s for s, problem in list_checkpoints(folder) if problem is None]
        for old in complete[:-keep] if keep else []:
            try:
                shutil.rmtree(folder / f"step-{old}")
            except OSError as error:
                log(f"warning      {folder / f'step-{old}'} is older than what is kept, and cannot be removed: {error}")
        seconds, nbytes = time.perf_counter() - started, sum(sizes.values())
        log(f"checkpoint   {final}, {nbytes / 1e9:.3f} GB in {seconds:.1f} s, {nbytes / 1e6 / seconds:,.0f} MB/s")
    dist.barrier(group=cpu_group)


def _model_and_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds of them: sharded tensors by name, those of the model without frozen copies."""
    options = StateDictOptions(ignore_frozen_params=True)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def list_checkpoints(folder: Path) -> list[tuple[int, str | None]]:
    """[(step, None or what is wrong with it)] in rising order; only folders named exactly step-<number> count."""
    found = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir() and re.fullmatch(r"step-(0|[1-9][0-9]*)", entry.name):
            found.append((int(entry.name[5:]), _checkpoint_problem(entry)))
    return sorted(found)


def _checkpoint_problem(entry: Path) -> str | None:
    try:
        meta = json.loads((entry / "meta.json").read_text())
        files, *_ = meta["files"].items(), meta["identity"], meta["config"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "no readable meta.json"
    for name, size in files:
        if not (entry / name).is_file():
            return f"{name} is missing"
        if (entry / name).stat().st_size != size:
            return f"{name} has {(entry / name).stat().st_size} bytes instead of {size}"
    return None


def find_checkpoint(folder: Path, config: Config, identity: dict[str, Any], source: Path) -> Path | None:
    """The checkpoint to resume from, None to start from `source`. Logs one line that says which, and why.

    Raises ValueError for a step that is not there, RuntimeError for a checkpoint of another model or path.
    """
    if not config.checkpoint.enable:
        log(f"start        fresh, from {source}; [checkpoint] enable = false")
        return None
    load_step = config.checkpoint.load_step
    found = list_checkpoints(folder)
    complete = [step for step, problem in found if problem is None]
    for step, problem in found:
        if problem is not None:
            log(f"warning      {folder / f'step-{step}'} is incomplete and not used: {problem}")
    if load_step != -1 and load_step not in complete:
        raise ValueError(
            f"[checkpoint] load_step = {load_step}: complete checkpoints in {folder}: {complete or 'none'}"
        )
    if not complete:
        log(f"start        fresh, from {source}; no complete checkpoint in {folder}")
        return None
    step = complete[-1] if load_step == -1 else load_step
    path = folder / f"step-{step}"
    if step > config.training.steps:
        raise ValueError(f"{path} is beyond [training] steps = {config.training.steps}: raise it, or set load_step")
    if step != complete[-1] and step < config.training.steps:
        raise ValueError(
            f"[checkpoint] load_step = {step}: {folder} holds later checkpoints {[s for s in complete if s > step]}, "
            f"and the next start would resume from those. Move them away first, or use another --job.dump_folder"
        )
    meta = json.loads((path / "meta.json").read_text())
    saved = meta["identity"]
    if saved != identity:
        names = sorted(k for k in {*saved, *identity} if saved.get(k) != identity.get(k))
        differ = "; ".join(f"{k}: {saved.get(k)} there, {identity.get(k)} here" for k in names)
        raise RuntimeError(f"{path} belongs to another run ({differ}); choose another --job.dump_folder or remove it")
    changed = changes_on_resume(meta["config"], config)
    log(f"start        resumed from {path}; not used: {source}" + (f"; changed: {changed}" if changed else ""))
    return path


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, cpu_group: dist.ProcessGroup
) -> dict[str, Any]:
    """Restore model and optimizer in place, on any mesh; returns the train_state that was saved.

    The optimizer's settings stay those of the configuration: only its moments are restored.
    """
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = _model_and_optimizer(model, optimizer)
    dcp.load(state, checkpoint_id=path, process_group=cpu_group)  # strict: a missing tensor is an error
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))  # lacks the frozen copies
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for group, ours in zip(optimizer.param_groups, settings, strict=True):
        group.update(ours)
    return torch.load(path / "train_state.pt", weights_only=True)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Validation, sample
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(loss_sum: Callable[[Batch], torch.Tensor], steps: list[tuple[list[Batch], int]], dims: Any) -> float:
    """Mean loss per counted label over the whole validation set: sums are divided once, at the end.

    `loss_sum` gives this data rank's summed loss of one batch; every rank must call this.
    """
    device = torch.device(DEVICE_TYPE)
    total = torch.zeros((), device=device)
    for batches, _ in steps:
        for batch in batches:
            total += loss_sum(batch.to(device))
    dist.all_reduce(total)
    return total.item() / dims.tp / sum(counted for _, counted in steps)  # TP ranks hold the same loss


@torch.no_grad()
def greedy_sample(hidden_states: Callable[[Batch], torch.Tensor], head: LMHead, tokenizer: Any, config: Config) -> str:
    """Continue `sample.prompt` greedily; every forward pass has the shape of a training micro-batch."""
    device = torch.device(DEVICE_TYPE)
    shape = (config.training.local_batch_size, config.training.seq_len)
    ids = tokenizer.encode(config.sample.prompt, add_special_tokens=False)[: shape[1] - 1] or [tokenizer.eos_token_id]
    prompt_length, end_ids = len(ids), {tokenizer.eos_token_id, document_end_id(tokenizer)}
    positions = torch.arange(shape[1]).expand(shape)
    while len(ids) < min(shape[1], prompt_length + config.sample.max_new_tokens):
        row = torch.zeros(shape, dtype=torch.int32)
        row[0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        hidden_BLD = to_local(hidden_states(Batch(row, row, positions, row > 0).to(device)))
        last = torch.tensor([len(ids) - 1], device=device)  # an index tensor: the graph does not depend on its value
        next_id = int(head(hidden_BLD.index_select(1, last))[0, 0].argmax())
        ids.append(next_id)
        if next_id in end_ids:
            break
    return tokenizer.decode(ids[prompt_length:])
