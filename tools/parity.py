"""The training paths on several meshes, compared number by number: `./run.sh parity CONFIG`."""

import contextlib
import copy
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import logging
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from configs.schema import parse_config

import torch
import torch.distributed as dist

REPO = Path(__file__).resolve().parent.parent

# Meshes on which the paths must agree: (processes, overrides of [parallelism])
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "1 process": (1, {}),
    "fsdp 2": (2, {}),
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "fsdp 2 x tp 2": (4, {"tensor_parallel_degree": 2}),
}
# Largest allowed relative differences to the first row: loss and gradients of the first step, losses and exported
# weights of all steps. The first two are rounding alone. The last two grow with every step of AdamW, which turns the
# sign of a tiny gradient into a whole step.
TOLERANCES = {"float32": (1e-5, 1e-4, 2e-3, 2e-2), "bfloat16": (1e-2, 5e-2, 2e-2, 1e-1)}


class Workers:
    """Processes for many small distributed jobs (parity, and the tests), forked from one that has imported everything.

    They are replaced after some jobs: process groups that have ended leave threads behind.
    """

    jobs_per_process = 30

    def __init__(self, timeout_seconds: float = 120):
        self.timeout_seconds = timeout_seconds
        self.context = multiprocessing.get_context("forkserver")
        paths = [str(REPO), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)  # for the fork server's imports
        self.context.set_forkserver_preload(["common", "train_hf", "train_native", "train_nki_moe", "datasets"])
        self.queues: dict[int, Any] = {}
        self.processes: dict[int, Any] = {}
        self.results = self.context.Queue()
        self.jobs_done = 0

    def run(self, world: int, function: Callable, *arguments: Any) -> list[Any]:
        """function(*arguments) on `world` ranks; the values in rank order. Raises JobError; never waits for ever."""
        if self.jobs_done == self.jobs_per_process:
            self.stop()
        self.jobs_done += 1
        for rank in range(world):
            if rank not in self.processes:
                self.queues[rank] = self.context.Queue()
                target = (rank, self.queues[rank], self.results)
                self.processes[rank] = self.context.Process(target=_worker, args=target, daemon=True)
                self.processes[rank].start()
        # The store lives here, as it does in torchrun's agent: no rank has to wait for the first one to open it.
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for rank in range(world):
            self.queues[rank].put((world, self.store.port, function, arguments))
        values, errors, details = {}, {}, ""
        deadline = time.monotonic() + self.timeout_seconds
        while len(values) + len(errors) < world:
            try:
                rank, error, value = self.results.get(timeout=1)
            except queue.Empty:
                died = {r: p.exitcode for r, p in self.processes.items() if p.exitcode is not None}
                if not died and time.monotonic() < deadline:
                    continue
                why = f"ranks ended with exit codes {died}" if died else f"no answer within {self.timeout_seconds} s"
                errors = errors or {-1: why}
                self.stop()
                break
            if error is None:
                values[rank] = value
            else:
                errors[rank] = error
                details += f"\n--- rank {rank} ---\n{value}"
                # the others may wait in a collective for ever: torchrun would end them
                deadline = min(deadline, time.monotonic() + 5)
        if errors:
            raise JobError(errors, details or errors[-1])
        return [values[rank] for rank in range(world)]

    def stop(self, timeout_seconds: float = 0) -> None:
        """End all processes, those at work after a timeout by force; the next run starts new ones."""
        for rank, process in self.processes.items():
            self.queues[rank].put(None)
            process.join(timeout_seconds)  # a killed one leaves semaphores, of which Python warns at the end
            process.kill()
        self.processes, self.jobs_done = {}, 0
        self.results = self.context.Queue()


class JobError(Exception):
    """A job failed; `messages` holds the message of each rank that did, -1 stands for a timeout."""

    def __init__(self, messages: dict[int, str], details: str):
        super().__init__(details)
        self.messages = messages


def _worker(rank: int, jobs: Any, results: Any) -> None:
    warnings.filterwarnings("ignore")  # each rank would repeat them
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()  # a parent that is killed cannot stop its workers
    threading.Thread(target=lambda: parent.join() or os._exit(1), daemon=True).start()
    caches, layout = torch_caches(), None
    gc.freeze()  # what is imported stays: collections then look at the objects of the jobs only
    while True:
        if (job := jobs.get()) is None:
            return
        world, port, function, arguments = job
        before, layout = layout, (world, [a.parallelism for a in arguments if hasattr(a, "parallelism")])
        if layout != before:
            # DTensor's caches hold meshes. One of equal shape but of other axes would get the last job's group names.
            for cached in caches + torch_caches():
                cached.cache_clear()
            torch._C._clear_DTensor_sharding_propagator_cache()
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
        os.environ |= {name: str(value) for name, value in variables.items()}
        try:
            results.put((rank, None, function(*arguments)))
        except BaseException as error:  # reported to the parent, which raises
            results.put((rank, f"{type(error).__name__}: {error}", traceback.format_exc()))
            layout = None
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            gc.collect()  # models hold their process groups in cycles


def torch_caches() -> list[Any]:
    """The lru_caches of torch.distributed that the garbage collector knows."""
    # `type`, not isinstance: asking a weak proxy for its class fails when its object is gone
    caches = [o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper]
    return [cached for cached in caches if cached.__module__.startswith("torch.distributed")]


def train_quietly(path: str, config: Any) -> str:
    """Train through the script's own main() and return what this rank printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        importlib.import_module(f"train_{path}").main(config)
    return out.getvalue()


def parity(arguments: list[str]) -> int:
    """Train every path on every mesh from the same folder and data, and print how far they are apart.

    Two runs each: one SGD step, whose change of the exported weights is the gradient of every parameter, and the
    configured training for 20 steps (or --training.steps). Exit status 1 if a difference exceeds TOLERANCES.
    """
    if not any(a.startswith("--training.steps") for a in arguments):
        arguments = [*arguments, "--training.steps", "20"]
    config = parse_config(arguments)
    hf_config = common.load_hf_config(common.fetch_model(config.model.path))
    paths = ["hf", "native"] + (["nki_moe"] if hasattr(hf_config, "num_experts") else [])
    workers, rows, failed = Workers(timeout_seconds=1200), [], False
    print(f"{config.model.path}, {config.training.steps} steps, compute {config.training.mixed_precision_param}")
    print(f"{'path':<9}{'mesh':<15}{'loss 1':>10}{'loss last':>11}    relative differences to the first row")
    print(f"{'':45}{'loss 1':>12}{'gradients':>12}{'losses':>12}{'weights':>12}")
    with tempfile.TemporaryDirectory() as folder:
        start = common.HFFolder(common.fetch_model(config.model.path))
        for mesh, path in itertools.product(MESHES, paths):
            world, parallelism = MESHES[mesh]
            one, many = (_parity_run(workers, path, config, world, parallelism, folder, single) for single in (1, 0))
            gradients = {n: start.read_all(n).float() - w for n, w in one[1].items()}
            rows.append((one[0][0], gradients, many[0], many[1]))
            first, row = rows[0], rows[-1]
            differences = (
                abs(row[0] / first[0] - 1),
                max(_difference(row[1][n], first[1][n]) for n in first[1]),
                max(abs(a / b - 1) for a, b in zip(row[2], first[2], strict=True)),
                max(_difference(row[3][n], first[3][n]) for n in first[3]),
            )
            rounds = path == "nki_moe" and config.nki.kernels not in ("auto", "reference")  # the kernels take bf16 only
            tolerance = TOLERANCES["bfloat16" if rounds else config.training.mixed_precision_param]
            good = all(d <= t for d, t in zip(differences, tolerance, strict=True))
            failed |= not good
            numbers = "".join(f"{d:12.1e}" for d in differences)
            verdict = "" if good else "  DIFFERS"
            print(f"{path:<9}{mesh:<15}{row[0]:10.5f}{row[2][-1]:11.5f}{numbers}{verdict}", flush=True)
    workers.stop(timeout_seconds=5)
    for dtype in ("float32", "bfloat16"):
        print(f"{f'allowed in {dtype}':<45}{''.join(f'{t:12.1e}' for t in TOLERANCES[dtype])}")
    print("the paths differ" if failed else "all paths and meshes agree")
    return 1 if failed else 0


def _parity_run(
    workers: Workers, path: str, config: Any, world: int, parallelism: dict[str, int], folder: str, single_step: bool
) -> tuple[list[float], dict[str, Any]]:
    """(losses, exported tensors) of one training run."""
    config = copy.deepcopy(config)
    config.job.dump_folder, config.export.dtype = f"{folder}/run", "float32"
    config.metrics.log_freq, config.metrics.enable_tensorboard = 1, False
    config.validation.path = config.sample.prompt = ""
    config.checkpoint.enable = False
    for key, value in parallelism.items():
        setattr(config.parallelism, key, value)
    # The balancing loss is defined over a micro-step of all data ranks (at most 2 here): the same tokens on every mesh.
    if config.training.global_batch_size == -1:
        config.training.global_batch_size = 2 * config.training.local_batch_size
    config.training.local_batch_size *= 2 * config.parallelism.tensor_parallel_degree // world
    if single_step:
        config.training.steps, config.training.max_norm = 1, 1e9
        config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay = "SGD", 1.0, 0.0
        config.lr_scheduler.warmup_steps = 0
        config.lr_scheduler.decay_ratio = 0.0
    try:
        workers.run(world, train_quietly, path, config)
        out = Path(folder) / "run" / path
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        tensors = common.HFFolder(out / "export")
        return [line["loss"] for line in lines if "loss" in line], {n: tensors.read_all(n) for n in tensors.file_of}
    finally:
        shutil.rmtree(f"{folder}/run", ignore_errors=True)


def _difference(got: Any, want: Any) -> float:
    return ((got - want).norm() / want.norm().clamp_min(1e-12)).item()


if __name__ == "__main__":
    sys.exit(parity(sys.argv[1:]))
