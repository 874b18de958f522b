"""Train Qwen3 MoE with torchtitan's model and the experts computed by NKI kernels.

    ./run.sh nki_moe configs/debug_moe.toml                              # a laptop CPU: the kernels' PyTorch references
    ./run.sh nki_moe configs/debug_moe.toml --nki.kernels interpret      # the kernel source itself, interpreted on CPU
    ./run.sh nki_moe configs/qwen3_30b_a3b.toml                          # one trn2.48xlarge, 64 ranks

What this path shows: how the routed experts of torchtitan's MoE layer are swapped for one operator (`NKIExperts`, two
screens below), and expert parallelism without an all-to-all, which Neuron has only for equal splits. Headings and order
are those of train_native.py: a diff shows what differs.

Expert parallelism inside the TP group: nothing is dropped, no shape depends on the routing. A rank holds L/TP tokens:

    all-gather the tokens      every rank sees all tokens of its group, as attention and a dense FFN would need too
    route                      every rank decides the same for all of them
    NKIExperts                 rank r computes experts r * E/TP .. (r+1) * E/TP - 1 at full width, for all tokens
    reduce-scatter             the partial outputs sum to the layer's output, L/TP tokens each

The mesh of the shipped Trainium configs, one number per rank (a row is one chip, its 4 logical cores are the TP axis):

               tp axis
             0   1   2   3     attention weights are cut over tp, then every piece over fsdp; experts go whole to a
    fsdp     4   5   6   7     tp rank, then over fsdp; the ranks of a row work on the same tokens,
    axis     8  ..             rows work on different ones
            60  61  62  63

Shape suffixes: B batch, L sequence, D model dim, N heads, H head dim, K experts per token, E experts, e experts of this
rank, F expert width, T tokens (B*L).
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

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import SDPBackend
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, decoder_sharding
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config, make_router_config
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

import nki_moe_kernels as kernels

PATH = "nki_moe"

# ---------------------------------------------------------------------------------------------------------------------
# Model: torchtitan's Qwen3, sized by config.json
# ---------------------------------------------------------------------------------------------------------------------


class DocumentAttention(Module):
    """SDPA under a block-causal mask, with the signature of torchtitan's ScaledDotProductAttention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, **_):
        """q [B, L, N, H], k and v with the KV heads, attention_masks [B, 1, L, L] bool -> [B, L, N, H]."""
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        attend = nn.functional.scaled_dot_product_attention
        out = attend(q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


# parameter -> its transpose, which the forward kernel takes
TRANSPOSES = {"w1_EFD": "forward_w1_EDF", "w2_EDF": "forward_w2_EFD", "w3_EFD": "forward_w3_EDF"}


class ExpertWeights(GroupedExperts):
    """torchtitan's expert parameters w1_EFD, w2_EDF, w3_EFD, and a frozen transpose of each for the forward kernel.

    The tensor engine contracts over rows: backward takes the parameters as they are, forward their transposes. Each
    rank transposes its own shard once per step, and FSDP gathers both. For Qwen3-30B-A3B at FSDP 16 x TP 4 by formula:
    0.84 GiB a rank kept, 19 MB a layer transposed in each step, and 302 MB more a layer in each all-gather, 1.1 ms at
    the links' peak (device_facts#chip). To transpose what was gathered
    would move 604 MB of HBM in every forward pass, recomputed ones too; to keep that would take 13.5 GiB a rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        forward_dtype: torch.dtype

    def __init__(self, config: Config):
        super().__init__(config)
        for name, forward_name in TRANSPOSES.items():
            transpose = torch.empty_like(getattr(self, name).transpose(1, 2), dtype=config.forward_dtype)
            self.register_parameter(forward_name, nn.Parameter(transpose.contiguous(), requires_grad=False))

    def refresh(self) -> None:
        """Transpose this rank's shards; to be called whenever the parameters have changed."""
        for name, forward_name in TRANSPOSES.items():
            weight, transpose = getattr(self, name), getattr(self, forward_name)
            shard = common.to_local(weight.detach()).transpose(1, 2)
            fsdp = weight.device_mesh.mesh_dim_names.index("fsdp")
            if weight.placements[fsdp].is_shard(1):  # more FSDP ranks than experts: both are cut along their dim 1
                shard = DTensor.from_local(shard, weight.device_mesh["fsdp"], [Shard(2)])
                shard = shard.redistribute(placements=[Shard(1)]).to_local()
            common.to_local(transpose.detach()).copy_(shard)


class NKIExperts(Module):
    """In the place of torchtitan's RoutedExperts: this rank's experts, computed by `nki_moe_kernels.expert_layer`.

    With TP the forward runs on local tensors (local_map): all tokens of the group in, a partial sum out.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inner_experts: ExpertWeights.Config
        block_tokens: int
        backend: str

    def __init__(self, config: Config):
        super().__init__()
        self.inner_experts = config.inner_experts.build()
        self.block_tokens, self.backend = config.block_tokens, config.backend
        self.first_expert = 0

    def parallelize(self, parallel_dims) -> None:
        """Cut the experts as the sharding configuration says, and note which ones are this rank's."""
        super().parallelize(parallel_dims)
        own = self.inner_experts.num_experts // parallel_dims.tp
        self.first_expert = parallel_dims.get_mesh("tp").get_local_rank() * own
        self.inner_experts.num_experts = own  # torchtitan's FSDP cuts another dim if there are more ranks than these

    def forward(
        self, x_BLD: torch.Tensor, topk_scores_BLK: torch.Tensor, topk_expert_ids_BLK: torch.Tensor
    ) -> torch.Tensor:
        """Tokens and their router decisions -> the sum over this rank's experts, [B, L, D]."""
        if torch.is_grad_enabled() and not x_BLD.requires_grad:
            raise RuntimeError(
                "the routed tokens are cut from autograd: the layers below would lose the gradient through the experts"
            )
        x_TD = x_BLD.flatten(0, 1)
        # The kernels take bf16 only (fp32 runs at a quarter of the rate on trn2); the references compute in x's dtype.
        dtype = x_TD.dtype if self.backend == "reference" else torch.bfloat16
        experts = self.inner_experts
        w1_eFD, w2_eDF, w3_eFD = (common.to_local(getattr(experts, name)).to(dtype) for name in TRANSPOSES)
        ids_TK, scores_TK = topk_expert_ids_BLK.flatten(0, 1).int(), topk_scores_BLK.flatten(0, 1).float()
        out_TD = kernels.expert_layer(
            x_TD.to(dtype), ids_TK, scores_TK, w1_eFD, w2_eDF, w3_eFD,
            first_expert=self.first_expert, block_tokens=self.block_tokens, backend=self.backend,
            forward_weights=tuple(common.to_local(getattr(experts, name)).to(dtype) for name in TRANSPOSES.values()),
        )  # fmt: skip
        return out_TD.to(x_BLD.dtype).view_as(x_BLD)


def experts_sharding(sequence_parallel: bool) -> tuple[ShardingConfig, ShardingConfig]:
    """Expert parallelism inside the TP group, as torchtitan sharding data: (of NKIExperts, of its weights)."""
    replicated, partial = (decoder_sharding.dense_activation_placement(tp=tp) for tp in (spmd.R, spmd.P))
    tokens = dict.fromkeys(("x_BLD", "topk_scores_BLK", "topk_expert_ids_BLK"), replicated)
    layer = ShardingConfig(
        in_src_shardings=tokens,
        in_dst_shardings=tokens,
        out_src_shardings=partial,  # each rank has its own experts' part of the sum ...
        out_dst_shardings=decoder_sharding.dense_sequence_parallel_placement() if sequence_parallel else partial,
        local_map=LocalMapConfig(in_grad_placements=(partial, partial, partial)),  # ... and of the gradients
    )
    whole_experts = decoder_sharding.dense_param_placement(
        tp=spmd.S(0)
    )  # the expert dim, not the width as without these kernels
    names = (*TRANSPOSES, *TRANSPOSES.values())
    return layer, ShardingConfig(state_shardings=dict.fromkeys(names, whole_experts))


class Qwen3MoE(MoE):
    """torchtitan's MoE layer around NKIExperts, keeping what the router decided for the loss and the load counters."""

    routing: Routing | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        if isinstance(x_BLD, DTensor):
            # Under TP the gathered tokens may still be in flight, and local_map, waiting for them, cuts them from
            # autograd (seen with torch 2.13 and 2.14, local batch size 1). A copy waits where autograd sees it.
            x_BLD = x_BLD.clone()
        scores_BLK, ids_BLK, probs_BLE = self.router(x_BLD)
        if not loop.is_recomputed():
            self.routing = Routing(common.to_local(probs_BLE).flatten(0, 1), common.to_local(ids_BLK).flatten(0, 1))
        return self.routed_experts(x_BLD, scores_BLK, ids_BLK)


def model_config(c, config: Config, backend: str) -> Qwen3Model.Config:
    """A Transformers Qwen3MoeConfig as torchtitan's model configuration, with NKIExperts in its MoE layers."""
    seq_len, document_mask = config.training.seq_len, config.data.document_mask

    def norm(width: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=c.rms_norm_eps)

    def moe() -> Qwen3MoE.Config:
        sizes = {"dim": c.hidden_size, "hidden_dim": c.moe_intermediate_size, "num_experts": c.num_experts}
        # The kernels compute in bf16, the references in the dtype of the step.
        dtype = getattr(torch, config.training.mixed_precision_param) if backend == "reference" else torch.bfloat16
        weights, block_tokens = ExpertWeights.Config(**sizes, forward_dtype=dtype), config.nki.block_tokens
        experts = NKIExperts.Config(inner_experts=weights, block_tokens=block_tokens, backend=backend)
        router = make_router_config(
            dim=c.hidden_size, num_experts=c.num_experts, top_k=c.num_experts_per_tok, gate_param_init=None,
            score_func="softmax", route_norm=c.norm_topk_prob,
        )  # fmt: skip
        return Qwen3MoE.Config(
            num_experts=c.num_experts,
            router=router,
            routed_experts=experts,  # <- here the experts are swapped in
            load_balance_coeff=None,  # torchtitan's expert bias would not survive the export to a Hugging Face folder
        )

    def layer(index: int) -> Qwen3TransformerBlock.Config:
        is_moe = common.is_moe_layer(c, index)
        sizes = {"dim": c.hidden_size, "hidden_dim": c.intermediate_size}
        attention = make_gqa_config(
            dim=c.hidden_size, n_heads=c.num_attention_heads, n_kv_heads=c.num_key_value_heads, head_dim=c.head_dim,
            wqkv_param_init=None, wo_param_init=None, qk_norm=norm(c.head_dim),
            inner_attention=DocumentAttention.Config() if document_mask else ScaledDotProductAttention.Config(),
            rope=CosSinRoPE.Config(dim=c.head_dim, max_seq_len=seq_len, theta=c.rope_parameters["rope_theta"]),
            fuse_qkv=False,  # then parameters map one to one to Hugging Face names
        )  # fmt: skip
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(c.hidden_size),
            attention=attention,
            ffn_norm=norm(c.hidden_size),
            feed_forward=None if is_moe else make_ffn_config(**sizes, w1_param_init=None, w2w3_param_init=None),
            moe=moe() if is_moe else None,
        )

    return Qwen3Model.Config(
        vocab_size=c.vocab_size,
        dim=c.hidden_size,
        norm=norm(c.hidden_size),
        tok_embeddings=Embedding.Config(num_embeddings=c.vocab_size, embedding_dim=c.hidden_size),
        lm_head=Linear.Config(in_features=c.hidden_size, out_features=c.vocab_size),
        layers=[layer(i) for i in range(c.num_hidden_layers)],
        enable_weight_tying=c.tie_word_embeddings,
    )


def build_model(hf_config, config: Config) -> Qwen3Model:
    """The model on the meta device: shapes only, no memory."""
    t, p = config.training, config.parallelism
    if common.DEVICE_TYPE == "neuron":
        # sdpa_kernel must leave the device's own backend on (device_facts#torchtitan-on-neuron)
        ScaledDotProductAttention.sdpa_backends = [SDPBackend.OVERRIDEABLE, SDPBackend.MATH]
    if not getattr(hf_config, "num_experts", 0):
        raise ValueError(f"{config.model.path} is a dense model and has no experts: use ./run.sh native or ./run.sh hf")
    if p.expert_parallel_degree > 1:
        raise ValueError(
            f"[parallelism] expert_parallel_degree = {p.expert_parallel_degree}: the nki_moe path spreads experts over "
            f"the tensor-parallel axis and has no other expert parallelism; set it to 1"
        )
    if config.compile.enable and config.compile.backend == "inductor":
        raise ValueError(
            "[compile] backend = 'inductor' cannot compile the nki_moe path's slot tables (its C++ fails to build, "
            "seen with torch 2.13 on CPU): use 'neuron' on Trainium, 'aot_eager' on CPU, or enable = false"
        )
    backend = kernels.resolve_backend(config.nki.kernels, common.DEVICE_TYPE)
    kernels.check_shapes(
        n_tokens=t.local_batch_size * t.seq_len, top_k=hf_config.num_experts_per_tok,
        hidden=hf_config.hidden_size, expert_width=hf_config.moe_intermediate_size,
        n_experts=hf_config.num_experts, n_local_experts=hf_config.num_experts // p.tensor_parallel_degree,
        block_tokens=config.nki.block_tokens,
    )  # fmt: skip
    log(f"kernels      {backend} ([nki] kernels = {config.nki.kernels!r}), blocks of {config.nki.block_tokens} tokens")
    titan = model_config(hf_config, config, backend)
    set_qwen3_sharding_config(titan, enable_sp=p.enable_sequence_parallel, enable_ep=False)
    for layer in titan.layers:
        if layer.moe is not None:
            experts = layer.moe.routed_experts
            sharding = experts_sharding(p.enable_sequence_parallel)
            experts.sharding_config, experts.inner_experts.sharding_config = sharding
    with torch.device("meta"):
        model = titan.build()
    model._skip_lm_head = True  # the model returns hidden states: the head computes the loss in chunks
    model.lm_head = LMHead.from_linear(model.lm_head)
    return model


HF_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "moe.router.gate": "mlp.gate",
    "moe.routed_experts.inner_experts.w1_EFD": "mlp.experts.{}.gate_proj",
    "moe.routed_experts.inner_experts.w3_EFD": "mlp.experts.{}.up_proj",
    "moe.routed_experts.inner_experts.w2_EDF": "mlp.experts.{}.down_proj",
}


def hf_pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """Which Hugging Face tensors a parameter is made of: one each, or one per expert stacked along dim 0."""
    name, prefix = name.removesuffix(".weight"), ""
    if name.startswith("layers."):
        _, index, name = name.split(".", 2)
        prefix = f"model.layers.{index}."
    hf_name = f"{prefix}{HF_NAMES[name]}.weight"
    if "{}" not in hf_name:
        return [Piece(hf_name, (0,) * len(shape), shape)]
    return [Piece(hf_name.format(e), (e, 0, 0), (1, *shape[1:])) for e in range(shape[0])]


# ---------------------------------------------------------------------------------------------------------------------
# Sharding: tensor parallel -> activation checkpointing -> compile -> FSDP2
# ---------------------------------------------------------------------------------------------------------------------


def shard_model(model: Qwen3Model, dims, config: Config) -> None:
    """Apply every parallelism in place; the order matters, each wraps what the one before made."""
    p = config.parallelism
    if dims.tp_enabled:
        # The plan is torchtitan's (models/qwen3/sharding.py): q, k, v and the vocabulary are cut by columns, o by rows;
        # with sequence parallelism norms work on L/TP tokens. That of the experts is `experts_sharding` above.
        model.parallelize(dims)
    if model.enable_weight_tying:
        model.lm_head.weight = model.tok_embeddings.weight
    elif dims.tp_enabled:
        weight = distribute_tensor(model.lm_head.weight, dims.get_mesh("tp"), [Shard(0)])
        model.lm_head.weight = nn.Parameter(weight)

    policies = {"selective": SelectiveAC, "full": FullAC}
    if policy := policies.get(config.activation_checkpoint.mode):
        policy.Config().build().apply(model)

    if config.compile.enable:
        # Per block: one small graph, compiled once. dynamic=False: a new shape must be an error, not a slow surprise.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # do not store routing twice
        for block in model.layers.values():
            block.compile(backend=config.compile.backend, fullgraph=True, dynamic=False)

    replicate = ["dp_replicate"] if dims.dp_replicate_enabled else []
    apply_fsdp_to_decoder(
        model,
        dims.get_mesh([*replicate, "fsdp"]),
        param_dtype=getattr(torch, config.training.mixed_precision_param),
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy=p.fsdp_reshard_after_forward,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # torchtitan asks for no division (clip_grad_norm divides by the global token count), which FSDP2 would do
            # with PREMUL_SUM. A plain sum is the same (device_facts#premul-sum).
            module.set_force_sum_reduction_for_comms(True)


def materialize(model: Qwen3Model, device: torch.device) -> None:
    """Allocate the local shards on the device and compute the rotary tables, which no file holds."""
    model.to_empty(device=device)
    if model.enable_weight_tying:
        model.lm_head.weight = model.tok_embeddings.weight
    for module in model.modules():
        if isinstance(module, CosSinRoPE):
            common.to_local(module.cache).copy_(module._precompute_cache())


def hidden_states(model: Qwen3Model, batch: Batch, document_mask: bool) -> torch.Tensor:
    """[B, L] tokens -> [B, L, D] after the last norm. Without a document mask: plain causal, running positions."""
    if not document_mask:
        return model(batch.input_ids)
    return model(batch.input_ids, batch.positions, common.document_mask(batch.positions))


def routing(model: Qwen3Model) -> list[Routing]:
    """The routing of every MoE layer in the last forward pass."""
    return [m.routing for m in model.modules() if isinstance(m, Qwen3MoE)]


def refresh_expert_weights(model: Qwen3Model) -> None:
    """Bring the forward kernel's transposes up to date: after the weights were loaded, and once per optimizer step."""
    for module in model.modules():
        if isinstance(module, ExpertWeights):
            module.refresh()


def padding_share(loads: list[torch.Tensor], block_tokens: int) -> float:
    """Share of the slots in visited blocks that hold no token, on this data rank; every expert visits one at least."""
    counts = torch.stack(loads)
    slots = (counts / block_tokens).ceil().clamp(min=1) * block_tokens
    return 1 - (counts.sum() / slots.sum()).item()


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
    refresh_expert_weights(model)
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
                    objective = loss + counted * config.moe.router_aux_loss_coef * aux
                    totals[1] += aux.detach()
            objective.backward()
            totals[0] += loss.detach() / counted
        totals[2] = float(sigterm.is_set())
        norm = loop.clip_grad_norm(model.parameters(), t.max_norm, counted)
        dist.all_reduce(totals)
        loss, aux, wish = (totals / dims.tp).tolist()  # the ranks of a TP group hold the same numbers
        loop.check_finite(step + 1, loss, norm, data)
        lr = loop.set_learning_rate(optimizer, config, step + 1)
        optimizer.step()
        optimizer.zero_grad()
        refresh_expert_weights(model)
        # ----------------------------------------------------------------------------------------------------------
        stop = wish > 0
        extra = {}
        if loads and metrics.due(step + 1):
            extra = metrics.expert_load(step + 1, loads, data_group)
            extra |= {"balance_loss": aux} if config.moe.router_aux_loss_coef else {}
            extra["padding_share"] = padding_share(loads, config.nki.block_tokens)
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
