"""The parts of a training loop that all three scripts share.

1. loss          the output layer with its cross-entropy in chunks, gradient norm, router statistics
2. optimizer     AdamW or SGD, learning-rate schedule, the stop before a bad update
3. afterwards    validation, and a sample of text
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from common import (
    DEVICE_TYPE,
    IGNORE_INDEX,
    Batch,
    PackedData,
    named_parameters,
    to_local,
)
from configs.schema import Config
from dataset import document_end_id

import torch
import torch.distributed as dist
from torch import nn
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
# 3. Validation, sample
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
