"""What a run leaves behind: its folder, locked and with room to save, and checkpoints in it.

A checkpoint is written by torch.distributed.checkpoint, and is complete or not there at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from common import (
    DEVICE_TYPE,
    REPO,
    log,
    named_parameters,
    replace_folder,
)
from configs.schema import Config, changes_on_resume, toml_text

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
    held, keep = len([s for s, problem in list_saved(folder / "checkpoints") if problem is None]), 0
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


def save(
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
        newest = [s for s, problem in list_saved(folder) if problem is None][-1:]
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
        complete = [s for s, problem in list_saved(folder) if problem is None]
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


def list_saved(folder: Path) -> list[tuple[int, str | None]]:
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


def find(folder: Path, config: Config, identity: dict[str, Any], source: Path) -> Path | None:
    """The checkpoint to resume from, None to start from `source`. Logs one line that says which, and why.

    Raises ValueError for a step that is not there, RuntimeError for a checkpoint of another model or path.
    """
    if not config.checkpoint.enable:
        log(f"start        fresh, from {source}; [checkpoint] enable = false")
        return None
    load_step = config.checkpoint.load_step
    found = list_saved(folder)
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


def load(
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
