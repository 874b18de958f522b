"""Train Qwen3 (dense and MoE) with Hugging Face Transformers' own modeling code.

    ./run.sh hf configs/debug.toml          # a laptop CPU, 2 gloo processes
    ./run.sh hf configs/qwen3_8b.toml       # one trn2.48xlarge, 64 ranks (dense models)

What this path shows: AutoModelForCausalLM built on the meta device, a tensor-parallel plan written as data, FSDP2, and
the training loop, all on one page. Headings and order are those of train_native.py: a diff shows what differs.

Attention stays on SDPA. torchtitan's own modeling backend for Transformers forces FlexAttention
(torchtitan/experiments/transformers_modeling_backend), which neither CPU training nor Neuron runs.

MoE on Neuron: not with this path. Transformers' expert implementations sort the (token, expert) pairs and cut them at
data-dependent offsets, which Neuron's grouped matmul refuses unless they are multiples of 128; use nki_moe there.

The mesh of the shipped Trainium configs, one number per rank (a row is one chip, its 4 logical cores are the TP axis):

               tp axis
             0   1   2   3     each weight matrix is cut over tp, then every piece over fsdp;
    fsdp     4   5   6   7     the ranks of a row work on the same tokens,
    axis     8  ..             rows work on different ones
            60  61  62  63

Shape suffixes: B batch, L sequence, D model dim, K experts per token, E experts, F expert width, T tokens (B*L).
"""

from dataclasses import dataclass
from pathlib import Path

import checkpoint
import common
import loop
from common import Batch, Piece, log
from configs.schema import Config
from dataset import prepare_data
from loop import LMHead, Routing
from metrics import Metrics, print_summary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

PATH = "hf"

# ---------------------------------------------------------------------------------------------------------------------
# Model: Transformers' Qwen3, sized by config.json
# ---------------------------------------------------------------------------------------------------------------------


class OwnExperts(Qwen3MoeExperts):
    """Transformers' experts on one rank of a TP group: its own slice of them, applied to all tokens of the group.

    `num_experts` is the number of own experts. A token's choice of somebody else's expert becomes the id
    `num_experts`, which Transformers skips. The outputs of the ranks sum to the layer's output.
    """

    def forward(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        own_TK = ids_TK - self.first_expert
        mine_TK = (own_TK >= 0) & (own_TK < self.num_experts)
        own_TK = torch.where(mine_TK, own_TK, self.num_experts)
        sharded = dict(self._parameters)
        self._parameters.update({name: w.to_local() for name, w in sharded.items()})  # DTensors meet plain tokens
        try:
            return super().forward(hidden_TD, own_TK, weights_TK * mine_TK)
        finally:
            self._parameters.update(sharded)


def build_model(hf_config, config: Config) -> nn.Module:
    """The model on the meta device: shapes only, no memory."""
    if common.DEVICE_TYPE == "neuron" and hasattr(hf_config, "num_experts"):
        raise ValueError(
            "the hf path does not run MoE models on Neuron: Transformers' experts need data-dependent offsets. "
            "Use ./run.sh nki_moe with the same TOML file"
        )
    p = config.parallelism
    if p.expert_parallel_degree > 1:
        raise ValueError(
            f"[parallelism] expert_parallel_degree = {p.expert_parallel_degree}: the hf path spreads experts over the "
            f"tensor-parallel axis and has no other expert parallelism; set it to 1 (the native path has it)"
        )
    if p.tensor_parallel_degree > 1 and not p.enable_sequence_parallel:
        raise ValueError(
            "[parallelism] enable_sequence_parallel = false: the hf path's tensor-parallel plan needs true"
        )
    with torch.device("meta"):
        # grouped_mm gives every expert a gradient, zeros if it had no token; the eager loop would leave some out.
        options = {"experts_implementation": "grouped_mm"} if hasattr(hf_config, "num_experts") else {}
        model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa", dtype=torch.float32, **options)
    model.config.use_cache = False
    # Transformers gives the row of pad_token_id no gradient. Qwen pads with <|endoftext|>, which also ends documents.
    model.model.embed_tokens.padding_idx = None
    model.lm_head = LMHead.from_linear(model.lm_head)
    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.register_forward_hook(keep_routing)
    return model


def keep_routing(router: Qwen3MoeTopKRouter, _, output: tuple[torch.Tensor, ...]) -> None:
    """Keep what the router decided, for the balancing loss and the load counters."""
    logits_TE, _, ids_TK = output
    kept = Routing(logits_TE.float().softmax(dim=-1), ids_TK)
    if not loop.is_recomputed():
        router.routing = kept


def hf_pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """Which Hugging Face tensors a parameter is made of: itself, or the experts that Transformers fuses in memory."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [Piece(name, (0,) * len(shape), shape)]
    prefix, kind = name.rsplit(".", 1)
    experts, rows, columns = shape
    if kind == "down_proj":
        return [Piece(f"{prefix}.{e}.down_proj.weight", (e, 0, 0), (1, rows, columns)) for e in range(experts)]
    half = (1, rows // 2, columns)  # [E, 2F, D]: gate rows first, then up rows
    gate = [Piece(f"{prefix}.{e}.gate_proj.weight", (e, 0, 0), half) for e in range(experts)]
    return gate + [Piece(f"{prefix}.{e}.up_proj.weight", (e, rows // 2, 0), half) for e in range(experts)]


# ---------------------------------------------------------------------------------------------------------------------
# Sharding: tensor parallel -> activation checkpointing -> compile -> FSDP2
# ---------------------------------------------------------------------------------------------------------------------

# Tensor parallelism with sequence parallelism: between the blocks every rank holds L/TP tokens, Shard(1). Attention and
# MLP gather all tokens, work on their own heads or columns, and reduce-scatter the partial sums back.
TP_PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),  # vocabulary rows
    "model.layers.*.self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    ),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "model.norm": PrepareModuleOutput(  # the head's vocabulary parts need all tokens
        output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
    ),
}
TP_PLAN_MLP = {  # of a dense layer
    "": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "gate_proj": ColwiseParallel(),
    "up_proj": ColwiseParallel(),
    "down_proj": RowwiseParallel(output_layouts=Shard(1)),
}
# Everything else (norms, q_norm and k_norm, the router) is replicated over tp without being a DTensor there. Each rank
# sees only its tokens, heads or experts, so its gradient is a partial sum: sum_replicated_gradients adds them up.


class SelectiveACWithoutTopK(SelectiveAC):
    """torchtitan's policy, but the router's top-k is computed again: Transformers changes its result in place."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() - {torch.ops.aten.topk.default}


def apply_tensor_parallel(model: nn.Module, mesh) -> None:
    """Apply the plan above in place; `mesh` is the tp axis."""
    parallelize_module(model, mesh, TP_PLAN)
    for layer in model.model.layers:
        if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock):
            apply_expert_parallel(layer.mlp, mesh)
        else:
            parallelize_module(layer.mlp, mesh, TP_PLAN_MLP)
    if not model.config.tie_word_embeddings:
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight, mesh, [Shard(0)]))


def apply_expert_parallel(block: Qwen3MoeSparseMoeBlock, mesh) -> None:
    """Whole experts over the tp axis: gather the tokens, compute the own experts, reduce-scatter the partial sums."""

    def gather(_, args):
        x_BLD = DTensor.from_local(args[0], mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        return (x_BLD.to_local(grad_placements=[Partial()]).contiguous(),)

    def reduce(_, args, out_BLD):
        return DTensor.from_local(out_BLD, mesh, [Partial()]).redistribute(placements=[Shard(1)]).to_local()

    block.register_forward_pre_hook(gather)
    block.register_forward_hook(reduce)
    experts = block.experts
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    experts.num_experts //= mesh.size()
    experts.first_expert = experts.num_experts * mesh.get_local_rank()
    experts._is_expert_parallel = True  # Transformers then zeroes the rows that no own expert computes
    experts.__class__ = OwnExperts


@torch.no_grad()
def sum_replicated_gradients(model: nn.Module, dims) -> None:
    """Add up the partial gradients of all parameters that are not cut over the tp axis, in one all-reduce."""
    if not dims.tp_enabled:
        return
    cut = [p.grad.to_local() for p in model.parameters() if "tp" not in p.device_mesh.mesh_dim_names]
    flat = torch.cat([g.flatten() for g in cut])
    dist.all_reduce(flat, group=dims.get_mesh("tp").get_group())
    for gradient, part in zip(cut, flat.split([g.numel() for g in cut]), strict=True):
        gradient.copy_(part.view_as(gradient))


def shard_model(model: nn.Module, dims, config: Config) -> None:
    """Apply every parallelism in place; the order matters, each wraps what the one before made."""
    if dims.tp_enabled:
        apply_tensor_parallel(model, dims.get_mesh("tp"))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight

    policies = {"selective": SelectiveACWithoutTopK, "full": FullAC}
    if policy := policies.get(config.activation_checkpoint.mode):
        policy.Config().build().apply(model.model)

    if config.compile.enable:
        # Per block: one small graph, compiled once. dynamic=False: a new shape must be an error, not a slow surprise.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # do not store routing twice
        for block in model.model.layers:
            block.compile(backend=config.compile.backend, fullgraph=True, dynamic=False)

    replicate = ["dp_replicate"] if dims.dp_replicate_enabled else []
    options = {
        "mesh": dims.get_mesh([*replicate, "fsdp"]),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.training.mixed_precision_param),
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
    }
    policy = config.parallelism.fsdp_reshard_after_forward
    reshard, reshard_last = policy != "never", policy == "always"  # the last group is needed again at once
    if model.config.tie_word_embeddings:  # one parameter must be in one group
        group = [model.model.embed_tokens, model.model.norm, model.lm_head]
        fully_shard(group, reshard_after_forward=reshard_last, **options)
    else:
        fully_shard(model.model.embed_tokens, reshard_after_forward=reshard, **options)
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=reshard_last, **options)
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model.model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # No division by the number of ranks (clip_grad_norm divides by the global token count), and a plain sum
            # for it instead of PREMUL_SUM (device_facts#premul-sum).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate the local shards on the device and compute the rotary table, which no file holds."""
    model.to_empty(device=device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)


def hidden_states(model: nn.Module, batch: Batch, document_mask: bool) -> torch.Tensor:
    """[B, L] tokens -> [B, L, D] after the last norm. Without a document mask: plain causal, running positions."""
    mask = common.document_mask(batch.positions) if document_mask else None
    if not hasattr(model.config, "num_experts"):
        mask = {"full_attention": mask}  # as a dict Transformers takes it as it is, None too, and guesses nothing
    return model.model(batch.input_ids, attention_mask=mask, position_ids=batch.positions).last_hidden_state


def routing(model: nn.Module) -> list[Routing]:
    """The routing of every MoE layer in the last forward pass."""
    return [m.routing for m in model.modules() if isinstance(m, Qwen3MoeTopKRouter)]


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def main(config: Config) -> None:
    """Train as the configuration says; raises ValueError or RuntimeError with what to do about it."""
    # 1. Configuration: everything that can be wrong without a device is found here.
    t = config.training
    folder = common.fetch_model(config.model.path, config.model.init == "pretrained", config.dry_run)
    hf_config = common.load_hf_config(folder)
    common.check_parallelism(config, hf_config, common.world_size(config), PATH)
    tokenizer = None if config.dry_run else common.load_tokenizer(folder, hf_config)
    train_data, validation_data = prepare_data(config, tokenizer, hf_config.vocab_size)

    # 2. Process group, device, mesh.
    device, cpu_group = common.init_distributed(config)
    dims = common.build_mesh(config, dist.get_world_size())
    rank, ranks = common.data_rank_and_size(dims)
    data_group = dims.get_mesh("batch").get_group() if ranks > 1 else None
    torch.manual_seed(config.debug.seed)
    common.log_unused(config, hf_config, PATH)

    # 3. Model on the meta device.
    model = build_model(hf_config, config)

    # 4. Sharding.
    shard_model(model, dims, config)
    if config.dry_run:
        from tools import dry_run

        return dry_run.report(PATH, config, hf_config, model, dims)

    # 5. Weights: a Hugging Face folder, or seeded random ones.
    materialize(model, device)
    identity = checkpoint.run_identity(PATH, hf_config)
    checkpoints = Path(config.job.dump_folder) / PATH / "checkpoints"
    resume = checkpoint.find(checkpoints, config, identity, folder)
    run_folder = checkpoint.prepare_run_folder(config, PATH, model, cpu_group)
    if resume is None and config.model.init == "random":
        common.random_weights(model, hf_pieces, hf_config, config.debug.seed)
    elif resume is None:
        common.load_weights(model, hf_pieces, folder, hf_config.tie_word_embeddings)

    # 6. Data, optimizer, resume.
    common.check_same_data([train_data, validation_data], cpu_group)
    data = common.PackedData(config, train_data, rank, ranks)
    validation = common.validation_steps(config, validation_data, rank, ranks) if validation_data else []
    optimizer = loop.build_optimizer(config, model)
    start = 0
    if resume is not None:
        state = checkpoint.load(resume, model, optimizer, cpu_group)
        start = state["step"]
        data.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
    print_summary(config, hf_config, model, dims, data)
    metrics = Metrics(config, run_folder, hf_config, device, data.step_size * t.seq_len, start)
    sigterm = common.catch_sigterm()

    def loss_sum(batch: Batch) -> torch.Tensor:
        return model.lm_head(hidden_states(model, batch, config.data.document_mask), batch.labels)

    # 7. Loop. It runs once more than there are steps, so that the last one too is saved and validated.
    stop = False
    for step in range(start, t.steps + 1):
        last = step == t.steps or stop
        if config.checkpoint.enable and step > start and (last or step % config.checkpoint.interval == 0):
            # Saved before anything else: an error in validation must not lose the steps.
            state = {"step": step, "data": data.state_dict(), "rng": torch.get_rng_state()}
            checkpoint.save(checkpoints, step, model, optimizer, state, identity, config, cpu_group)
        due = config.validation.freq and step % config.validation.freq == 0 and step > start
        if validation and not stop and (last or due):
            loss = loop.evaluate(loss_sum, validation, dims)
            log(f"validation   step {step}  loss {loss:.4f}")
            metrics.write(step, {"validation_loss": loss})
        if last:
            break
        if step % config.checkpoint.interval == 0 or due:
            metrics.restart_clock(step)

        # ----- one training step ----------------------------------------------------------------------------------
        # The loss is the sum over all counted tokens of the step divided by their number: over every micro-batch and
        # data rank, so that layouts and accumulation give the same gradient however ragged the counts are. The sum
        # goes backward; its gradients are divided in clip_grad_norm.
        batches, counted = data.next_step()
        totals = torch.zeros(3, device=device)  # loss, balancing loss, wish to stop
        loads = []
        for batch in batches:
            batch = batch.to(device)
            loss = loss_sum(batch)
            objective = loss
            if layers := routing(model):
                loads.append(loop.tokens_per_expert(layers, batch.real))
                if config.moe.router_aux_loss_coef:
                    aux = loop.load_balancing_loss(layers, batch.real, data_group) / len(batches)
                    # Every rank of a TP group computes it, and their gradients are summed.
                    objective = loss + counted * config.moe.router_aux_loss_coef * aux / dims.tp
                    totals[1] += aux.detach()
            objective.backward()
            totals[0] += loss.detach() / counted
        totals[2] = float(sigterm.is_set())
        sum_replicated_gradients(model, dims)
        norm = loop.clip_grad_norm(model.parameters(), t.max_norm, counted)
        dist.all_reduce(totals)
        loss, aux, wish = (totals / dims.tp).tolist()  # the ranks of a TP group hold the same numbers
        loop.check_finite(step + 1, loss, norm, data)
        lr = loop.set_learning_rate(optimizer, config, step + 1)
        optimizer.step()
        optimizer.zero_grad()
        # ----------------------------------------------------------------------------------------------------------
        stop = wish > 0
        extra = {}
        if loads and metrics.due(step + 1):
            extra = metrics.expert_load(step + 1, loads, data_group)
            extra |= {"balance_loss": aux} if config.moe.router_aux_loss_coef else {}
        metrics.step(step + 1, loss, norm.item(), lr, extra)
    if stop:
        log(f"stopped      SIGTERM after step {step}" + (", checkpoint saved" if config.checkpoint.enable else ""))
    else:
        # 8. A sample, and the Hugging Face folder.
        if config.sample.prompt:
            text = loop.greedy_sample(
                lambda batch: hidden_states(model, batch, config.data.document_mask), model.lm_head, tokenizer, config
            )
            log(f"sample       {config.sample.prompt!r} -> {text!r}")
        if config.export.enable:
            common.export_hf_folder(model, hf_pieces, folder, run_folder / "export", config.export.dtype, cpu_group)
    metrics.close()
    dist.barrier(group=cpu_group)
    dist.destroy_process_group()


if __name__ == "__main__":
    common.launch(main)
