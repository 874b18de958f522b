"""Step time of the native path against the same model stepped by torchtitan's own components in a bare loop.

    torchrun --nproc_per_node 2 tests/bench_step_time.py [pairs]

A: this repository's step: data, model, LMHead's chunked loss, gradient norm, AdamW.
B: torchtitan's model, parallelize_qwen3, ChunkedLossWrapper, clip_grad_norm_, torch's fused AdamW, ready-made batches.
Steps alternate A B A B ..., so that a drifting machine hits both; the ratio of each pair is printed as quartiles.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common
import loop
from configs import schema
from dataset import prepare_data

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

import train_native


def main(pairs: int) -> None:
    config = schema.parse_config([str(common.REPO / "configs/debug.toml")])
    config.data.document_mask = False  # torchtitan's SDPA takes no mask
    t = config.training
    folder = common.fetch_model(config.model.path)
    hf_config = common.load_hf_config(folder)
    tokenizer = common.load_tokenizer(folder, hf_config)
    train_data, _ = prepare_data(config, tokenizer, hf_config.vocab_size)
    device, _ = common.init_distributed(config)
    dims = common.build_mesh(config, dist.get_world_size())
    rank, ranks = common.data_rank_and_size(dims)
    data = common.PackedData(config, train_data, rank, ranks)
    ready, counted = common.PackedData(config, train_data, rank, ranks).next_step()

    ours = train_native.build_model(hf_config, config)
    train_native.shard_model(ours, dims, config)
    train_native.materialize(ours, device)
    common.load_weights(ours, train_native.hf_pieces, folder, hf_config.tie_word_embeddings)
    our_optimizer = loop.build_optimizer(config, ours)

    titan_config = train_native.model_config(hf_config, t.seq_len, document_mask=False)
    set_qwen3_sharding_config(titan_config, enable_sp=True, enable_ep=False)
    with torch.device("meta"):
        theirs = titan_config.build()
    theirs._skip_lm_head = True
    parallelize_qwen3(
        theirs,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=t.mixed_precision_param),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for module in theirs.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    theirs.to_empty(device=device)
    theirs.lm_head.weight = theirs.tok_embeddings.weight
    for module in theirs.modules():
        if isinstance(module, CosSinRoPE):
            common.to_local(module.cache).copy_(module._precompute_cache())
    common.load_weights(theirs, train_native.hf_pieces, folder, hf_config.tie_word_embeddings)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=config.optimizer.lr, fused=True)
    their_loss = ChunkedLossWrapper.Config().build()
    their_loss.set_lm_head(theirs.lm_head)

    def step_ours() -> float:
        batches, counted = data.next_step()
        total = torch.zeros(())
        for batch in batches:
            loss = ours.lm_head(train_native.hidden_states(ours, batch, False), batch.labels)
            loss.backward()
            total += loss.detach()
        norm = loop.clip_grad_norm(ours.parameters(), t.max_norm, counted)
        dist.all_reduce(total)
        loop.check_finite(1, total.item(), norm, data)
        our_optimizer.step()
        our_optimizer.zero_grad()
        return total.item()

    def step_theirs() -> float:
        total = torch.zeros(())
        for batch in ready:
            loss, _ = their_loss(theirs(batch.input_ids.long()), batch.labels.long(), counted)
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(theirs.parameters(), t.max_norm)
        dist.all_reduce(total)
        their_optimizer.step()
        their_optimizer.zero_grad()
        return total.item()

    ratios = []
    for pair in range(pairs + 3):
        seconds = []
        for step in (step_ours, step_theirs):
            dist.barrier()
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
            if pair == 0:
                common.log(f"first loss of {step.__name__}: {loss:.4f}")
        if pair >= 3:  # the first steps warm up
            ratios.append(seconds[0] / seconds[1])
    quartiles = torch.tensor(ratios).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    common.log(f"ours / torchtitan over {pairs} pairs: quartiles {' '.join(f'{q:.3f}' for q in quartiles)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
