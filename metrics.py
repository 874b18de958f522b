"""What a person sees of a run: parameter and FLOP counts, memory, the summary, one aligned line a step.

The same numbers go to metrics.jsonl and TensorBoard; the profiler writes a trace.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from common import DEVICE_TYPE, PackedData, data_rank_and_size, is_moe_layer, log, named_parameters, to_local
from configs.schema import Config

import torch
import torch.distributed as dist
from torch import nn


def parameter_counts(hf_config: Any) -> tuple[int, int]:
    """(all parameters, parameters that multiply one token), from config.json alone.

    The second leaves out the embedding lookup and the experts that a token does not visit.
    """
    c = hf_config
    attention = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    total = active = 0
    for layer in range(c.num_hidden_layers):
        total += attention + 2 * c.head_dim + 2 * c.hidden_size
        active += attention
        if is_moe_layer(c, layer):
            expert = 3 * c.hidden_size * c.moe_intermediate_size
            total += c.num_experts * (expert + c.hidden_size)
            active += c.num_experts_per_tok * expert + c.num_experts * c.hidden_size
        else:
            total += 3 * c.hidden_size * c.intermediate_size
            active += 3 * c.hidden_size * c.intermediate_size
    vocabulary = c.vocab_size * c.hidden_size
    total += c.hidden_size + vocabulary * (1 if c.tie_word_embeddings else 2)
    return total, active + vocabulary


def flops_per_token(hf_config: Any, seq_len: int) -> float:
    """Training FLOPs per token: 6 per active parameter, plus causal attention (PaLM, arXiv:2204.02311, appendix B).

    Attention: forward 2 matmuls of 2 * heads * head_dim * seq_len / 2 on average, backward twice that.
    """
    _, active = parameter_counts(hf_config)
    width = hf_config.num_attention_heads * hf_config.head_dim
    return 6 * active + 6 * hf_config.num_hidden_layers * width * seq_len


def print_summary(config: Config, hf_config: Any, model: nn.Module, dims: Any, data: PackedData) -> None:
    """One block before the first step: what is about to run."""
    t, p = config.training, config.parallelism
    total, active = parameter_counts(hf_config)
    local = sum(to_local(w).numel() for _, w in named_parameters(model))
    state_bytes = local * 4 * (4 if config.optimizer.name == "AdamW" else 2)  # fp32 weight, gradient, two moments
    axes = [("replicate", dims.dp_replicate), ("fsdp", dims.dp_shard), ("tp", dims.tp), ("ep", dims.ep)]
    mesh = " x ".join(f"{name} {size}" for name, size in axes if size > 1) or "1 process"
    _, ranks = data_rank_and_size(dims)
    accumulation = data.step_size // (t.local_batch_size * ranks)
    experts = f", {active / 1e6:,.1f}M active per token" if getattr(hf_config, "num_experts", 0) else ""
    log(f"model        {hf_config.model_type}, {total / 1e6:,.1f}M parameters{experts}")
    log(f"mesh         {mesh} on {DEVICE_TYPE}, {dist.get_world_size()} processes, compute {t.mixed_precision_param}")
    log(f"step         {data.step_size} sequences x {t.seq_len} = {data.step_size * t.seq_len:,} tokens")
    log(f"             {accumulation} micro-steps of {t.local_batch_size} x {t.seq_len} on each of {ranks} data ranks")
    device = f" of {memory:.0f} GiB" if (memory := device_memory_gib(DEVICE_TYPE)) else ""
    states = f"weights, gradients and {config.optimizer.name} states"
    log(f"memory       {state_bytes / 2**30:.3f} GiB{device} a rank for {states}")
    attention = "block-causal per document" if config.data.document_mask else "causal, documents run on"
    log(f"data         {config.data.path}, {data_line(data)}, {attention}")
    for problem in data_problems(config, data):
        log(f"             {problem}")
    extras = [f"activation checkpointing {config.activation_checkpoint.mode}"]
    if config.compile.enable:
        extras.append(f"compiled blocks ({config.compile.backend})")
    if p.tensor_parallel_degree > 1:
        extras.append("sequence parallel" if p.enable_sequence_parallel else "no sequence parallel")
    log(f"             {', '.join(extras)}")


def data_line(data: PackedData) -> str:
    """How much there is to train on, and how long it lasts."""
    meta = data.data.meta
    epochs = f"{data.sequences_per_epoch / data.step_size:,.1f} steps an epoch"
    if not data.data.whole_documents:
        return f"{meta['documents']:,} documents, {meta['tokens']:,} tokens, {epochs}"
    packed = data.lengths[data.lengths <= data.seq_len].sum()
    padding = 1 - packed / (data.sequences_per_epoch * data.seq_len)
    kept = f"packed whole into {len(data.bins):,} sequences, {padding:.1%} padding"
    return (
        f"{meta['documents']:,} documents, {meta['counted']:,} of {meta['tokens']:,} tokens counted, {kept}, {epochs}"
    )


def data_problems(config: Config, data: PackedData) -> list[str]:
    """What a person should know before training on it."""
    meta, lines = data.data.meta, []
    if meta["skipped"]:
        lines.append(f"{meta['skipped']:,} bad rows skipped, such as {meta['skipped_examples'][0]}")
    if data.too_long:
        what = {"skip": "left out", "truncate": "cut at their end"}[config.data.too_long]
        lines.append(f"{data.too_long:,} documents longer than {data.seq_len} tokens {what}")
    lines += [f"{note}: {count:,} conversations" for note, count in meta["notes"].items()]
    if meta["left_out"]:
        more = f" and {len(meta['left_out']) - 3} more" if len(meta["left_out"]) > 3 else ""
        lines.append(f"not read: {', '.join(meta['left_out'][:3])}{more}")
    if data.data.whole_documents and not config.data.document_mask:
        lines.append("document_mask = false: packed documents see those before them in the sequence")
    return lines


# Dense bf16 peaks per device that a rank owns, in FLOP/s; the first name that matches counts. MFU on Neuron is against
# AWS's data sheet: torchtitan 0.3.0 has 158e12 in its own table, so its percentages are 1.055 times ours.
PEAK_FLOPS = {
    "neuron": 166.75e12,  # trn2: 667 TFLOP/s a chip, 4 logical cores at LNC=2 (AWS Trainium2 architecture page)
    "B200": 2250e12,  # NVIDIA HGX B200 data sheet
    "H200": 989e12,  # NVIDIA H200 data sheet
    "H100 PCIe": 756e12,  # NVIDIA H100 data sheet, PCIe column
    "H100": 989e12,  # NVIDIA H100 data sheet, SXM column
    "A100": 312e12,  # NVIDIA A100 data sheet
    "L40S": 362e12,  # NVIDIA L40S data sheet
}


def peak_flops(device: torch.device) -> float | None:
    """Peak of this rank's device, None when it is not in the table."""
    name = device.type if device.type != "cuda" else torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def peak_memory_gib(device: torch.device) -> float | None:
    """Highest memory in use so far on this rank's device in GiB (on CPU: of the whole process), None if unknown."""
    if device.type == "cpu":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes on macOS, KiB on Linux
    module = getattr(torch, device.type)
    if hasattr(module, "synchronize"):
        module.synchronize()  # counters lag on Neuron (device_facts#counters-lag)
    if hasattr(module, "max_memory_allocated"):
        return module.max_memory_allocated() / 2**30
    stats = module.memory_stats() if hasattr(module, "memory_stats") else {}
    nested = stats.get("allocated_bytes", {})  # Neuron's keys were flat in one build and nested in another
    peak = stats.get("allocated_bytes.all.peak", nested.get("all", nested).get("peak"))
    return None if peak is None else peak / 2**30


def device_memory_gib(device_type: str) -> float | None:
    """Memory of this rank's device, None for the CPU or if unknown. Neuron reports 0 on some ranks: then 24."""
    module = getattr(torch, device_type)
    if device_type == "cpu" or not hasattr(module, "get_device_properties"):
        return 24.0 if device_type == "neuron" else None
    total = module.get_device_properties(torch.device(device_type)).total_memory / 2**30
    return total or (24.0 if device_type == "neuron" else None)


def start_profiler(config: Config, folder: Path, start: int) -> torch.profiler.profile | None:
    """The profiler of rank 0, if asked for: one Chrome trace of the chosen steps. `step()` it after every step.

    On Neuron this shows the host only. The documented way to see the device is activities [CPU, PrivateUse1] with a
    NeuronConfig (torch_neuronx.profiling; its DEVICE mode takes about 5 GB of HBM), whose output the Neuron Explorer
    opens (device_facts#profiling). It was never run here, so it is described and not called.
    """
    p = config.profiling
    if not p.enable or dist.get_rank() != 0:
        return None
    first = max(p.step, start + 1)
    file = folder / "profile" / f"steps-{first}-{first + p.steps - 1}.json"
    file.parent.mkdir(exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE_TYPE == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=first - start - 1, warmup=0, active=p.steps, repeat=1),
        on_trace_ready=lambda trace: (trace.export_chrome_trace(str(file)), log(f"profile      {file}")),
    )
    profiler.start()
    return profiler


class Metrics:
    """One aligned line per logged step on rank 0; the same numbers in metrics.jsonl and TensorBoard."""

    def __init__(
        self, config: Config, folder: Path, hf_config: Any, device: torch.device, tokens_per_step: int, start: int
    ):
        self.config, self.device, self.tokens_per_step, self.first = config, device, tokens_per_step, start + 1
        self.flops_per_token = flops_per_token(hf_config, config.training.seq_len)
        self.peak = peak_flops(device)
        self.file = self.board = None
        if dist.get_rank() == 0:
            file = folder / "metrics.jsonl"
            if start and file.is_file():  # steps after the checkpoint come again
                lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
                file.write_text("".join(line for line in lines if json.loads(line)["step"] <= start), encoding="utf-8")
            self.file = open(file, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run
            if config.metrics.enable_tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)
        self.profiler = start_profiler(config, folder, start)
        self.restart_clock(start)

    def restart_clock(self, step: int) -> None:
        """Time from here on counts as training (after a validation, a checkpoint, the first step)."""
        self.clock, self.clock_step = time.perf_counter(), step

    def due(self, step: int) -> bool:
        """Is this step logged? The same answer on every rank."""
        return step in (self.first, self.config.training.steps) or step % self.config.metrics.log_freq == 0

    def expert_load(
        self, step: int, loads: list[torch.Tensor], data_group: dist.ProcessGroup | None
    ) -> dict[str, float]:
        """From the [layers, E] token counts of each micro-step: imbalance for the log line, histogram for TensorBoard.

        1 means that every expert of every layer has the same load, E that one expert has it all.
        """
        counts = torch.stack(loads).sum(dim=0)
        if data_group is not None:
            dist.all_reduce(counts, group=data_group)
        if self.board:
            self.board.add_histogram("tokens_per_expert", counts.flatten().cpu(), step)
        return {"expert_max_over_mean": (counts.amax(dim=1) / counts.mean(dim=1)).mean().item()}

    def step(self, step: int, loss: float, grad_norm: float, lr: float, extra: dict[str, float]) -> None:
        """Log the step if it is due. Call it on every rank; `loss` and `grad_norm` are global numbers."""
        if self.profiler:
            self.profiler.step()
        if not self.due(step):
            return
        seconds = (time.perf_counter() - self.clock) / max(1, step - self.clock_step)
        tokens_per_second = self.tokens_per_step / seconds
        tflops = tokens_per_second * self.flops_per_token / dist.get_world_size() / 1e12
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "step_seconds": seconds}
        values |= {"tokens_per_second": tokens_per_second, "tflops_per_device": tflops}
        if self.peak:
            values["mfu"] = tflops * 1e12 / self.peak
        memory = peak_memory_gib(self.device)
        if memory is not None:
            values["memory_gib"] = memory
        self.write(step, values | extra)
        mfu = f"{100 * values['mfu']:4.1f}%" if self.peak else "n/a"
        line = (
            f"step {step:>6}/{self.config.training.steps}  loss {loss:8.4f}  grad norm {grad_norm:8.4f}  lr {lr:.2e}  "
            f"tok/s {tokens_per_second:>9,.0f}  TFLOP/s {tflops:6.2f}  MFU {mfu}  "
            f"mem {'n/a' if memory is None else f'{memory:5.2f} GiB'}"
        )
        line += "".join(f"  {name.replace('_', ' ')} {value:.2f}" for name, value in extra.items())
        log(line + (f"  (first step: {seconds:.1f} s)" if step == self.first else ""))
        self.restart_clock(step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """To metrics.jsonl and TensorBoard only."""
        if self.file:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
            self.file.flush()
        for name, value in values.items() if self.board else ():
            self.board.add_scalar(name, value, step)

    def close(self) -> None:
        if self.profiler:
            self.profiler.stop()
        for sink in (self.file, self.board):
            if sink:
                sink.close()
