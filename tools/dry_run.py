"""What one rank of a configuration needs, and whether it fits and keeps every rule of its device.

The training scripts call `dry_run` after sharding, where --dry_run stops them.
"""

import os
import re
from typing import Any

from common import DEVICE_TYPE, is_moe_layer, log, to_local
from loop import LMHead
from metrics import flops_per_token, parameter_counts

import torch.distributed as dist

import nki_moe_kernels as kernels
from tools.doctor import HBM_GIB_PER_CORE

# Counted bytes that leave room for what is not counted: microcode, compiled programs and their constants, buffers of
# collectives, scratchpad, fragmentation. Out of memory was seen at 21.9 of 24 GiB
# (device_facts#memory-ceiling).
PLAN_GIB, CEILING_GIB = 16.0, 21.9
# (ranks, distance between them) of process groups that ran on trn2: TP in a chip, pairs, four chips, one core of every
# chip, the instance (device_facts#process-groups).
KNOWN_GROUPS = {(2, 1), (4, 1), (16, 1), (16, 4), (64, 1)}


def report(path: str, config: Any, hf_config: Any, model: Any, dims: Any) -> None:
    """Print what one rank of this configuration needs, and whether it fits and keeps every rule of its device.

    `model` is the script's sharded meta model on a fake process group. Raises RuntimeError if a rule is broken or the
    memory does not suffice, so that the script ends with status 1.
    """
    t, data_ranks = config.training, dims.dp_replicate * dims.dp_shard
    total, active = parameter_counts(hf_config)
    micro = t.local_batch_size * data_ranks
    step = micro if t.global_batch_size == -1 else t.global_batch_size
    flops = flops_per_token(hf_config, t.seq_len)
    sizes = memory(path, config, hf_config, model, dims)
    needed = sum(sizes.values()) / 2**30
    rules = device_rules(path, config, hf_config, model, dims)
    if is_for_neuron(config):
        rules.insert(0, memory_rule(needed, total, config, dims))
    lines = [
        f"dry run      {path}, {config.model.path}: {total / 1e9:.3f}e9 parameters, "
        f"{active / 1e9:.3f}e9 of them multiply a token",
        f"mesh         replicate {dims.dp_replicate} x fsdp {dims.dp_shard} x tp {dims.tp} = {dims.world_size} ranks",
        f"step         {step} sequences x {t.seq_len} = {step * t.seq_len:,} tokens",
        f"             in {step // micro} micro-steps of {micro * t.seq_len:,} tokens",
        f"             {flops * step * t.seq_len:.3g} FLOPs, {flops / 1e9:.1f}e9 a token (recomputation not counted)",
        "GiB of one rank (exact above `unsharded weights`, formulas from there on; nothing was measured on a device)",
        *(f"  {name:<28}{size / 2**30:8.2f}" for name, size in sizes.items()),
        f"  {'sum':<28}{needed:8.2f}",
        *(f"  {verdict:<8}{name}: {text}" for name, verdict, text in rules),
    ]
    log("\n".join(lines))
    dist.destroy_process_group()
    if broken := [f"{name}: {text}" for name, verdict, text in rules if verdict == "BROKEN"]:
        raise RuntimeError(f"dry run: {'; '.join(broken)}")
    if is_for_neuron(config):
        print(f"verdict      fits: {needed:.1f} GiB counted, of {HBM_GIB_PER_CORE} GiB of a logical core")
    else:
        print("verdict      the layout is valid; no device limits are checked for a file not written for Neuron")


def is_for_neuron(config: Any) -> bool:
    """Whether a configuration is written for Trainium: for the 64 logical cores of an instance, or its compiler."""
    return config.launch.nproc_per_node == 64 or config.compile.backend == "neuron"


def memory_rule(needed: float, parameters: int, config: Any, dims: Any) -> tuple[str, str, str]:
    """The verdict on `needed` GiB: (name, verdict, text)."""
    limits = f"plan for {PLAN_GIB:.0f} GiB of counted bytes, ceiling {CEILING_GIB} of {HBM_GIB_PER_CORE} GiB"
    if needed <= PLAN_GIB:
        return "memory", "ok", f"{needed:.1f} GiB; {limits}"
    how = "does not fit" if needed > CEILING_GIB else "too close"
    shared = dims.dp_shard * dims.tp
    least = f"; 16 bytes a parameter over {shared} ranks alone are {16 * parameters / shared / 2**30:.1f} GiB"
    advice = "use [activation_checkpoint] mode = 'full', a smaller local_batch_size, or more nodes (NNODES=n)"
    return "memory", "BROKEN", f"{needed:.1f} GiB {how}; {limits}{least}. To do: {advice}"


def memory(path: str, config: Any, hf_config: Any, model: Any, dims: Any) -> dict[str, int]:
    """Bytes of this rank by purpose: `state_bytes` exactly, the others by formulas (device_facts#memory-formulas)."""
    compute = 2 if config.training.mixed_precision_param == "bfloat16" else 4
    blocks, outside, head = fsdp_groups(model, hf_config, dims.tp)
    # Gathered at once: the block at work, the one fetched ahead, embedding and head. A tied weight counts twice: FSDP2
    # gathers into one buffer and copies out of it.
    whole_blocks, _, _ = fsdp_groups(model, hf_config, dims.tp, frozen=True)
    never = config.parallelism.fsdp_reshard_after_forward == "never"
    gathered = sum(whole_blocks) if never else 2 * max(whole_blocks)
    # Of a block or the head: the gradient in the compute dtype, and its fp32 copy for the reduce-scatter. (The chunked
    # loss sums the head's gradient in fp32 too, and adds one chunk's product: as much, at another time.) The gradient
    # of a tied weight waits through the whole backward pass for the embedding's part.
    tied = hf_config.tie_word_embeddings
    waiting = compute * head if tied else 0
    return {
        **state_bytes(model, config.optimizer.name),
        "unsharded weights": compute * (gathered + outside + (head if tied else 0)),
        "gradient before reduction": max((compute + 4) * max(blocks) + waiting, (compute + 4) * head),
        **activation_bytes(path, config, hf_config, dims.tp),
    }


def fsdp_groups(model: Any, hf_config: Any, tp: int, frozen: bool = False) -> tuple[list[int], int, int]:
    """Values that one rank holds unsharded: (of each block, of all outside the blocks, of the output layer).

    Those that have a gradient; with `frozen` all that are gathered.
    """
    blocks, outside = [0] * hf_config.num_hidden_layers, 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not frozen:
            continue
        if match := re.match(r"(?:model\.)?layers\.(\d+)\.", name):
            blocks[int(match[1])] += unsharded_numel(parameter)
        else:
            outside += unsharded_numel(parameter)
    return blocks, outside, hf_config.vocab_size * hf_config.hidden_size // tp


def state_bytes(model: Any, optimizer: str) -> dict[str, int]:
    """Bytes that stay on this rank from step to step: the fp32 shards, their gradients, AdamW's two moments.

    AdamW also keeps one fp32 step counter per parameter, nki_moe the transposes of the experts (`ExpertWeights`).
    """
    nbytes = [(p.requires_grad, to_local(p).numel() * p.element_size()) for p in model.parameters()]
    local, frozen = sum(n for trained, n in nbytes if trained), sum(n for trained, n in nbytes if not trained)
    states = 2 * local + 4 * sum(trained for trained, _ in nbytes) if optimizer == "AdamW" else 0
    sizes = {"parameters": local, "gradients": local, "optimizer states": states}
    return sizes | ({"transposed weights": frozen} if frozen else {})


def unsharded_numel(parameter: Any) -> int:
    """Values of a parameter that one rank holds after FSDP's all-gather: all, but for the axes of TP and EP."""
    numel = parameter.numel()
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if mesh.mesh_dim_names[axis] in ("tp", "ep") and not placement.is_replicate():
            numel //= mesh.size(axis)
    return numel


def activation_bytes(path: str, config: Any, hf_config: Any, tp: int) -> dict[str, int]:
    """Bytes of activations of one micro-step, by purpose; their peaks are added although they differ in time.

    Formulas of device_facts#memory-formulas, corrected for this code: `block_bytes` and the loss below.
    """
    c, t = hf_config, config.training
    w = 2 if t.mixed_precision_param == "bfloat16" else 4
    tokens = t.local_batch_size * t.seq_len  # of this data rank; every rank of its TP group works on all of them
    kept = one_block = routing = slots = 0
    for layer in range(c.num_hidden_layers):
        moe = is_moe_layer(c, layer)
        by_mode = block_bytes(path, config, c, tp, moe)
        kept += tokens * by_mode[config.activation_checkpoint.mode]
        one_block = max(one_block, tokens * (by_mode["none"] - by_mode[config.activation_checkpoint.mode]))
        if moe:  # every layer keeps its router's probabilities and choices (int64) until the next forward pass
            # fp32, but on a CPU torchtitan's router stays in the compute dtype: it asks autocast, which is not there
            on_cpu = DEVICE_TYPE == "cpu" and not is_for_neuron(config) and path != "hf"
            routing += tokens * ((w if on_cpu else 4) * c.num_experts + 8 * c.num_experts_per_tok)
        if moe and path == "nki_moe":
            layer_slots = expert_slots(config, c, tp)
            keeps_all = config.activation_checkpoint.mode == "none"
            slots = max(slots, layer_slots["saved"]) if not keeps_all else slots + layer_slots["saved"]
    sizes = {f"activations kept ({config.activation_checkpoint.mode})": kept}
    if config.activation_checkpoint.mode != "none":
        sizes["one block recomputed"] = one_block
    # One of 8 chunks: logits and probabilities in fp32, the labels' comparison, one fp32 temporary: 13 bytes a logit.
    # Beside it the gathered hidden states, their gradient, and that again when it is scaled in the backward pass.
    chunk = -(-tokens // LMHead.num_chunks) * (c.vocab_size // tp) * 13
    sizes["loss"] = chunk + 3 * tokens * c.hidden_size * w
    if routing:
        sizes["routing"] = routing
    if slots:
        sizes["expert slots"] = slots + max(layer_slots["forward"], layer_slots["backward"])
    return sizes


def block_bytes(path: str, config: Any, c: Any, tp: int, moe: bool) -> dict[str, int]:
    """Bytes per token that one transformer block keeps for its backward pass, by activation checkpointing mode.

    With w bytes a value, h hidden, q and k the widths of queries and keys, f the feed-forward width (all but h on this
    TP rank), r the residual stream (h / TP under sequence parallelism):

    full       the input: r
    selective  r; of the matmuls every second one in order, so queries, values, gate, down: q + k + f + h (h is whole:
               the partial sum before the reduce-scatter); attention output q and its fp32 log-sum-exp; under TP the
               two reduced outputs 2 r (torchtitan/distributed/activation_checkpoint.py)
    none       what autograd saves: inputs of the four norms 2 r + q + k; inputs of the matmuls 2 h + q + f; queries,
               keys, values into attention q + 2 k, its output; gate, up and silu(gate): 3 f
    """
    neuron, compute = is_for_neuron(config), config.training.mixed_precision_param
    w = 2 if compute == "bfloat16" else 4
    h = c.hidden_size
    r = h // tp if config.parallelism.enable_sequence_parallel else h
    q, k = c.num_attention_heads * c.head_dim // tp, c.num_key_value_heads * c.head_dim // tp
    f = c.intermediate_size // tp
    log_sum_exp = 4 * c.num_attention_heads // tp
    # A fused norm saves its input. Transformers' own saves an fp32 copy and the normalized values, as does torch's on
    # CPU, there in fp32.
    norm = w if neuron and path != "hf" else (4 + w if path == "hf" else 8)
    none = norm * (2 * r + q + k) + w * (2 * h + 2 * q + 2 * k) + log_sum_exp
    selective = w * (r + q + k + (2 * r if tp > 1 else 0))
    if neuron or DEVICE_TYPE != "cpu":  # the CPU's attention is not among the operators that the policy saves
        selective += w * q + log_sum_exp
    if not moe:
        none += w * 4 * f
        selective += w * (f + h)
    else:
        # K rows of each token, once per chosen expert: in, gate, up, silu, product, out. The native path cuts f over TP
        # and weights the outputs in fp32; the kernels' rows are counted as slots.
        chosen, width = c.num_experts_per_tok, c.moe_intermediate_size
        rows = {"native": w * (h + 4 * width // tp) + 4 * h, "hf": w * (2 * h + 4 * width), "nki_moe": 0}
        none += chosen * rows[path] + 8 * c.num_experts
        # top-k values and int64 ids; the hf path computes them again, but its router counts as a matmul
        selective += w * c.num_experts if path == "hf" else 12 * chosen
    return {"none": none, "selective": selective, "full": w * r}


def expert_slots(config: Any, c: Any, tp: int) -> dict[str, int]:
    """Bytes of the slot tensors of one MoE layer of the nki_moe path (`nki_moe_kernels.slot_bytes`)."""
    return kernels.slot_bytes(
        n_tokens=config.training.local_batch_size * config.training.seq_len,
        hidden=c.hidden_size,
        expert_width=c.moe_intermediate_size,
        n_experts=c.num_experts,
        n_local_experts=c.num_experts // tp,
        top_k=c.num_experts_per_tok,
        block_tokens=config.nki.block_tokens,
    )


def device_rules(path: str, config: Any, hf_config: Any, model: Any, dims: Any) -> list[tuple[str, str, str]]:
    """(name, "ok" | "note" | "BROKEN", text) of every rule; those of the device only for a file written for it.

    Divisibility was checked before the model was built (`common.check_parallelism`): getting here means that it holds.
    """
    t, c, tp = config.training, hf_config, dims.tp
    rules = [("divisibility", "ok", "heads, KV heads, widths, vocabulary, experts, sequence, batch and ranks")]

    def rule(name: str, kept: bool, text: str, allowed: str) -> None:
        rules.append((name, "ok", text) if kept else (name, "BROKEN", f"{text}; {allowed}"))

    def note(name: str, text: str) -> None:
        rules.append((name, "note", text))

    if not is_for_neuron(config):
        return rules
    # device_facts#attention-kernel: what the kernels take; all else computes dense L x L scores.
    rule("attention", t.seq_len % 512 == 0, f"[training] seq_len = {t.seq_len}", "must be a multiple of 512")
    rule("attention", c.head_dim <= 128, f"head_dim = {c.head_dim}", "must be at most 128")
    if t.seq_len > 4096:  # device_facts#long-sequences
        note("attention", "one public report has NaN gradients from sequences above about 5000 tokens")
    if config.data.document_mask:
        scores = t.local_batch_size * c.num_attention_heads // tp * t.seq_len**2 * 4 / 2**30
        text = "a mask leaves the kernel for the dense path: slow, and not counted above are"
        note("attention", f"[data] document_mask = true: {text} {scores:.1f} GiB for one fp32 copy of a layer's scores")
    # device_facts#chip: 4 logical cores. device_facts#process-groups: groups should have a shape that is known to run.
    nodes = int(os.environ.get("NNODES") or 1)
    cores = dims.world_size // nodes
    rule("processes", cores in (4, 16, 64), f"{cores} on a node", "must be 64, or whole chips: 4 or 16")
    rule("tp", tp in (1, 2, 4), f"[parallelism] tensor_parallel_degree = {tp}", "must be 1, 2 or 4: inside a chip")
    for name, size, apart in (("fsdp", dims.dp_shard, tp), ("replicate", dims.dp_replicate, tp * dims.dp_shard)):
        text = f"{size} ranks, {apart} apart"
        if size > 1 and (size - 1) * apart >= cores:
            note(f"{name} group", f"{text}: over several nodes, of which no public report was found")
        elif size > 1:
            known = "; ".join(f"{a}, {b} apart" for a, b in sorted(KNOWN_GROUPS))
            rule(f"{name} group", (size, apart) in KNOWN_GROUPS, text, f"known to run are {known}")
    # device_facts#collective-size: collectives above 512 MiB are split, those of 4 GiB failed.
    blocks, outside, head = fsdp_groups(model, c, tp)
    largest = max(*blocks, outside if c.tie_word_embeddings else head) * 4 / 2**30
    rule(
        "collectives", largest < 4, f"the largest reduce-scatter has {largest:.2f} GiB (fp32)", "must stay below 4 GiB"
    )
    backend = config.compile.backend
    text = f"[compile] backend = {backend!r}" + ("" if config.compile.enable else ", not enabled")
    rule("compile", backend == "neuron" or not config.compile.enable, text, "must be 'neuron', the device's own")
    if config.compile.enable:
        note("compile", "no public report of compiled blocks under FSDP2 on Neuron: bring up in eager mode first")
    if getattr(c, "num_experts", 0):
        rule("experts", path == "nki_moe", f"path {path}", "on Neuron experts need static shapes: ./run.sh nki_moe")
    if t.mixed_precision_param == "float32":
        note("precision", "float32 matmuls run at about a quarter of the bf16 rate")
    return rules
