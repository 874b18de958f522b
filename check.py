"""What one runs around training: the environment, the paths side by side, and the report of a dry run.

    ./run.sh doctor                          what is installed, what each path will use, and what is wrong
    ./run.sh parity CONFIG                   the training paths on several meshes, compared number by number
    python check.py requirements FILE ...    exit 1, with the line to run, if the active environment lacks something

The doctor imports only the standard library, asks torch with its device plug-ins off, and touches no Neuron device: one
process owns the cores, and looking must not break a running job.
"""

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
import platform
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent
# Packages of these names on the public index install, and fail on import (trainium_facts 1: torch-neuronx 1.0 was
# unpacked; of the other two only the version was seen).
PLACEHOLDERS = {"torch-neuronx": "1.0", "nki": "0.0.1", "neuronx-cc": "1.0.post1"}
# name: (first version, first version too new). torchtitan is pinned exactly: its internals are used.
SUPPORTED = {"torch": ((2, 13), (2, 15)), "transformers": ((5, 24), (6,)), "torchtitan": ((0, 3, 0), (0, 3, 1))}
CORES_PER_CHIP = 4  # logical, at the default NEURON_LOGICAL_NC_CONFIG=2 (trainium_facts 3: Neuron documentation)
HBM_GIB_PER_CORE = 24  # trainium_facts 3: 96 GiB a chip (Neuron documentation)
CHIPS = {"trn2.48xlarge": 16, "trn2u.48xlarge": 16}  # trainium_facts 3: Neuron documentation
NEURON_ENVIRONMENT = (
    "Activate the environment of the Neuron machine image, on the AWS image 'Deep Learning AMI Neuron torch-neuronx "
    "2.14.0': source /opt/aws_neuronx_venv_torch_neuronx_2_14_0/bin/activate"
)
NEURON_PACKAGES = (
    'Install torch-neuronx "2.14.*", neuronx-cc "2.*" and nki from the Neuron package repository (the Neuron '
    "documentation's PyTorch setup page has the line), or use the machine image. " + NEURON_ENVIRONMENT
)


# ---------------------------------------------------------------------------------------------------------------------
# doctor
# ---------------------------------------------------------------------------------------------------------------------


def version_tuple(version: str) -> tuple[int, ...]:
    """The release part of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def supported(name: str, version: str) -> bool:
    """Whether a version of torch, transformers or torchtitan is one that this repository works with."""
    first, too_new = SUPPORTED[name]
    return first <= version_tuple(version) < too_new


def is_placeholder(facts: dict[str, Any], name: str) -> bool:
    """Whether an installed package is the public index's placeholder: by version, or by what its __init__ raises."""
    version = facts["versions"].get(name)
    return version is not None and (
        version == PLACEHOLDERS[name] or "WRONG PACKAGE" in facts["init_text"].get(name, "")
    )


def is_native_neuron(facts: dict[str, Any]) -> bool:
    """Whether torch-neuronx is one with the native `neuron` device: 2.13 or 2.14 (trainium_facts 1: release notes)."""
    version = facts["versions"].get("torch-neuronx")
    return bool(version) and not is_placeholder(facts, "torch-neuronx") and version_tuple(version) >= (2, 13)


def device(facts: dict[str, Any]) -> str:
    """The device that training will pick: neuron, else cuda, else cpu."""
    if facts["chips"] and is_native_neuron(facts):
        return "neuron"
    return "cuda" if facts["cuda_devices"] else "cpu"


def diagnose(facts: dict[str, Any]) -> list[str]:
    """Return what is wrong with an environment, each with what to do. Pure: see `gather_facts` for the facts."""
    return version_problems(facts) + machine_problems(facts)


def version_problems(facts: dict[str, Any], files: tuple[str, ...] = ("requirements.txt",)) -> list[str]:
    """The part of `diagnose` that needs no device: Python and packages, the latter against the pins in files."""
    problems, versions = [], facts["versions"]
    torch, neuronx = versions.get("torch"), versions.get("torch-neuronx")
    if not (3, 11) <= facts["python"] < (3, 15):
        problems.append(f"Python {dotted(facts['python'])}: 3.11-3.14 is needed. Activate an environment that has it.")
    elif is_native_neuron(facts) and facts["python"] < (3, 12):
        problems.append(f"Python {dotted(facts['python'])}: Neuron packages exist for 3.12-3.14. {NEURON_ENVIRONMENT}")

    placeholders = [name for name in PLACEHOLDERS if is_placeholder(facts, name)]
    if placeholders:
        problems.append(
            f"{', '.join(f'{name} {versions[name]}' for name in placeholders)}: placeholders from the public package "
            f"index, which fail on import. Run: pip uninstall {' '.join(placeholders)}. {NEURON_PACKAGES}"
        )
    if neuronx and "torch-neuronx" not in placeholders:
        if "torch-xla" in versions or version_tuple(neuronx) < (2, 10):
            xla = f" with torch-xla {versions['torch-xla']}" if "torch-xla" in versions else ""
            problems.append(
                f"torch-neuronx {neuronx}{xla}: the XLA generation, whose last training release is Neuron SDK 2.29. "
                "These scripts use the native neuron device of SDK 2.33 (torch 2.14). The package name is the same, so "
                f"both cannot share an environment: take a fresh one. {NEURON_PACKAGES}"
            )
        elif not is_native_neuron(facts):
            problems.append(f"torch-neuronx {neuronx}: a pre-release; 2.14 (or 2.13) is needed. {NEURON_PACKAGES}")
        elif torch and version_tuple(torch)[:2] != version_tuple(neuronx)[:2]:
            problems.append(
                f"torch {torch} with torch-neuronx {neuronx}: the first two numbers must agree. Run: "
                f'pip install "torch=={dotted(version_tuple(neuronx)[:2])}.*" with the index of PyTorch\'s CPU wheels.'
            )
    elif torch and not supported("torch", torch):
        problems.append(
            f"torch {torch}: 2.13 or 2.14 is needed. Activate an environment that has it, or one without torch: then "
            "./run.sh makes .venv."
        )
    return problems + (package_problems(facts, files) if torch else [])


def package_problems(facts: dict[str, Any], files: tuple[str, ...]) -> list[str]:
    """What is missing or unsupported beside torch, with one pip line for all of it; the line never names torch."""
    lines = [line for file in files for line in (REPO / file).read_text(encoding="utf-8").splitlines()]
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    wanted, reasons = [], []
    for name, pin in pins.items():
        version = facts["versions"].get(name.lower().replace("_", "-"))
        if version is None or (name in SUPPORTED and not supported(name, version)):
            wanted.append(f"{name}=={pin}")
            reasons.append(f"{name} {version or 'is missing'}")
    if not wanted:
        return []
    # only what is needed: the other pins could displace versions that a Neuron environment wants
    return [f"{', '.join(reasons)}. Run: {shlex.quote(facts['executable'])} -m pip install {' '.join(wanted)}"]


def machine_problems(facts: dict[str, Any]) -> list[str]:
    """The part of `diagnose` about devices, driver, the build of torch and variables."""
    problems = []
    versions, chips, environment = facts["versions"], facts["chips"], facts["environment"]
    torch, native = versions.get("torch"), is_native_neuron(facts)
    if torch is None:
        without = NEURON_ENVIRONMENT if chips else "The first ./run.sh test (or training run) makes .venv with it."
        problems.append(f"no torch in this environment. {without}")
    elif facts["torch_error"]:
        problems.append(f"torch {torch} cannot be imported ({facts['torch_error']}). Install it again.")
    if chips and "torch-neuronx" not in versions and torch:
        problems.append(f"{chips} Neuron devices, but no torch-neuronx here. {NEURON_ENVIRONMENT}")
    missing = [name for name in ("neuronx-cc", "nki") if name not in versions]
    if native and missing:
        problems.append(f"{', '.join(missing)} missing beside torch-neuronx. {NEURON_PACKAGES}")
    if (chips or native) and facts["torch_cuda"]:
        problems.append(
            f"torch {torch} is a CUDA {facts['torch_cuda']} build on a Neuron machine; another package pulled it in. "
            f'Run: pip install --force-reinstall --no-deps "torch=={dotted(version_tuple(torch))}" '
            "with the index of PyTorch's CPU wheels."
        )
    if native and not chips:
        problems.append(
            "torch-neuronx is here, but no /dev/neuron* device: no driver, or a container that was not given it. "
            "On a Trainium instance install aws-neuronx-dkms (then: sudo modprobe neuron), or start the container with "
            "--device for every /dev/neuron*. On any other machine use an environment without torch-neuronx."
        )
    expected = CHIPS.get(facts["instance"])
    if chips and expected and chips != expected:
        problems.append(
            f"{chips} Neuron devices on {facts['instance']}: expected are {expected} with {expected * CORES_PER_CHIP} "
            "logical cores. Run neuron-ls; pass every /dev/neuron* to the container; reboot if the driver lost some."
        )
    config = environment.get("NEURON_LOGICAL_NC_CONFIG", "2")
    if chips and config != "2":
        problems.append(
            f"NEURON_LOGICAL_NC_CONFIG={config}: torch's neuron device and the shipped configs mean 2 (64 cores on a "
            "trn2.48xlarge, not 128). Run: unset NEURON_LOGICAL_NC_CONFIG"
        )
    visible = environment.get("NEURON_RT_VISIBLE_CORES")
    if chips and visible is not None:
        problems.append(
            f"NEURON_RT_VISIBLE_CORES={visible} hides cores from the ranks; the process group gives each its core. "
            "Run: unset NEURON_RT_VISIBLE_CORES"
        )
    return problems


def dotted(version: tuple[int, ...]) -> str:
    """(3, 11, 7) -> "3.11.7"."""
    return ".".join(map(str, version))


def gather_versions() -> dict[str, Any]:
    """The facts that `version_problems` needs. Names of distributions are in lower case, with dashes."""
    versions = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    init_texts = {name: init_text(name) for name in PLACEHOLDERS if name in versions}
    facts = {"python": sys.version_info[:3], "executable": sys.executable}
    return facts | {"versions": versions, "init_text": init_texts}


def gather_facts() -> dict[str, Any]:
    """Read this machine: packages from their metadata, devices and driver from /dev and /sys, the rest from torch."""
    facts = gather_versions() | {"torch_error": "", "torch_cuda": "", "cuda_devices": 0}
    if "torch" in facts["versions"]:
        # in a process of its own, with torch's device plug-ins off: a broken torch must not take the doctor along
        code = "import torch; print(torch.version.cuda or '', torch.cuda.device_count(), sep=',')"
        plain = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain, check=False)
        if run.returncode:
            facts["torch_error"] = (run.stderr.strip().splitlines() or ["no message"])[-1]
        else:
            facts["torch_cuda"], devices = run.stdout.strip().split(",")
            facts["cuda_devices"] = int(devices)
    return facts | {
        "chips": sum(bool(re.fullmatch(r"neuron\d+", name)) for name in os.listdir("/dev")),
        "driver": first_line("/sys/module/neuron/version"),
        "instance": first_line("/sys/devices/virtual/dmi/id/product_name"),  # the instance type on EC2
        "environment": dict(os.environ),
    }


def init_text(name: str) -> str:
    """The source of a package's __init__.py, read and not run; empty if there is none."""
    spec = importlib.util.find_spec({"neuronx-cc": "neuronxcc"}.get(name, name.replace("-", "_")))
    return Path(spec.origin).read_text(encoding="utf-8", errors="replace") if spec and spec.origin else ""


def first_line(path: str) -> str:
    """The first line of a file, empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, UnicodeDecodeError, IndexError):
        return ""


def table(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows that `doctor` prints."""
    versions, environment, chips = facts["versions"], facts["environment"], facts["chips"]
    used = device(facts)
    build = f"CUDA {facts['torch_cuda']} build" if facts["torch_cuda"] else "CPU build"
    rows = [
        ("machine", ", ".join(filter(None, [facts["instance"], platform.platform(), f"{os.cpu_count()} CPUs"]))),
        ("python", f"{dotted(facts['python'])}  {facts['executable']}"),
        ("torch", f"{versions['torch']}, {build}" if "torch" in versions else "not installed"),
    ]
    for name in ("torch-neuronx", "neuronx-cc", "nki", "torch-xla"):
        note = "  placeholder" if name in PLACEHOLDERS and is_placeholder(facts, name) else ""
        rows.append((name, versions.get(name, "not installed") + note))
    for name in ("torchtitan", "transformers", "safetensors", "datasets"):
        rows.append((name, versions.get(name, "not installed")))
    tools = (
        shutil.which("neuron-ls") or "not on the PATH (they are in /opt/aws/neuron/bin)"
        if chips
        else "no Neuron device"
    )
    expected = CHIPS.get(facts["instance"])
    cores = f"{chips} chips, {chips * CORES_PER_CHIP} logical cores"
    rows += [
        ("neuron driver", facts["driver"] or ("version not readable" if chips else "not loaded")),
        ("neuron devices", cores + (f" of {expected} and {expected * CORES_PER_CHIP}" if expected else "")),
        ("neuron memory", f"{HBM_GIB_PER_CORE} GiB a core" if chips else "-"),
        ("neuron tools", tools),
        ("cuda devices", str(facts["cuda_devices"])),
    ]
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuron"  # run.sh sets the same
    for name, folder in (("TORCH_NEURONX_NEFF_CACHE_DIR", "neff"), ("NKI_COMPILE_CACHE_URL", "nki")):
        path = environment.get(name, str(cache / folder))
        rows.append((f"{folder} cache", path + ("  lost at reboot" if path.startswith("/tmp") else "")))
    hub = environment.get("HF_HUB_CACHE") or str(Path(environment.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    offline = [
        name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if environment.get(name, "0") not in ("", "0")
    ]
    rows += [
        ("hub cache", f"{hub}, {'offline: ' + ', '.join(offline) if offline else 'online'}"),
        ("free disk", f"{shutil.disk_usage(REPO).free / 2**30:.0f} GiB here"),
    ]
    if Path("/dev/shm").is_dir():
        rows.append(("/dev/shm", f"{shutil.disk_usage('/dev/shm').total / 2**30:.1f} GiB"))
    backend = {"neuron": "neuron", "cuda": "nccl", "cpu": "gloo"}[used]
    kernels = "NKI" if used == "neuron" else "PyTorch reference"
    for path in ("hf", "native", "nki_moe"):
        experts = f", expert kernels {kernels}" if path == "nki_moe" else ""
        rows.append((f"path {path}", f"device {used}, process group {backend}, attention SDPA{experts}"))
    return rows


def doctor(arguments: list[str]) -> int:
    """Print the environment and a verdict; 1 if something has to be done before training."""
    if arguments:
        print(f"error: doctor takes no arguments, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    facts = gather_facts()
    for name, value in table(facts):
        print(f"{name:<16}{value}")
    problems = diagnose(facts)
    for number, problem in enumerate(problems, 1):
        print(f"\nproblem {number}: {problem}")
    print(f"\nverdict: {f'{len(problems)} to solve' if problems else f'ready to train on {device(facts)}'}")
    return 1 if problems else 0


# ---------------------------------------------------------------------------------------------------------------------
# requirements (for run.sh)
# ---------------------------------------------------------------------------------------------------------------------


def requirements(arguments: list[str]) -> int:
    """Check the active environment before run.sh uses it; arguments are requirement files of this repository."""
    problems = version_problems(gather_versions(), tuple(arguments))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


# ---------------------------------------------------------------------------------------------------------------------
# parity
# ---------------------------------------------------------------------------------------------------------------------

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
        import torch.distributed as dist

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
    import torch

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
    import common

    if not any(a.startswith("--training.steps") for a in arguments):
        arguments = [*arguments, "--training.steps", "20"]
    config = common.parse_config(arguments)
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
        import common

        tensors = common.HFFolder(out / "export")
        return [line["loss"] for line in lines if "loss" in line], {n: tensors.read_all(n) for n in tensors.file_of}
    finally:
        shutil.rmtree(f"{folder}/run", ignore_errors=True)


def _difference(got: Any, want: Any) -> float:
    return ((got - want).norm() / want.norm().clamp_min(1e-12)).item()


# ---------------------------------------------------------------------------------------------------------------------
# dry run (the training scripts call it after sharding, where --dry_run stops them)
# ---------------------------------------------------------------------------------------------------------------------

# Counted bytes that leave room for what is not counted: microcode, compiled programs and their constants, buffers of
# collectives, scratchpad, fragmentation. Out of memory was seen at 21.9 of 24 GiB (trainium_facts 3 and 8: public
# measurements of trn2, Neuron documentation).
PLAN_GIB, CEILING_GIB = 16.0, 21.9
# (ranks, distance between them) of process groups that ran on trn2: TP in a chip, pairs, four chips, one core of every
# chip, the instance (trainium_facts 4b: AWS's recipes and public measurements).
KNOWN_GROUPS = {(2, 1), (4, 1), (16, 1), (16, 4), (64, 1)}


def dry_run(path: str, config: Any, hf_config: Any, model: Any, dims: Any) -> None:
    """Print what one rank of this configuration needs, and whether it fits and keeps every rule of its device.

    `model` is the script's sharded meta model on a fake process group. Raises RuntimeError if a rule is broken or the
    memory does not suffice, so that the script ends with status 1.
    """
    import common

    t, data_ranks = config.training, dims.dp_replicate * dims.dp_shard
    total, active = common.parameter_counts(hf_config)
    micro = t.local_batch_size * data_ranks
    step = micro if t.global_batch_size == -1 else t.global_batch_size
    flops = common.flops_per_token(hf_config, t.seq_len)
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
    common.log("\n".join(lines))
    common.dist.destroy_process_group()
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
    """Bytes of this rank by purpose: `state_bytes` exactly, the others by formulas (trainium_facts 8, corrected)."""
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
    from common import to_local

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

    Formulas of trainium_facts 8 (Megatron's activation accounting, arXiv:2205.05198, with torchtitan's checkpointing
    policies), corrected for this code: `block_bytes` and the loss below.
    """
    import common

    c, t = hf_config, config.training
    w = 2 if t.mixed_precision_param == "bfloat16" else 4
    tokens = t.local_batch_size * t.seq_len  # of this data rank; every rank of its TP group works on all of them
    kept = one_block = routing = slots = 0
    for layer in range(c.num_hidden_layers):
        moe = common.is_moe_layer(c, layer)
        by_mode = block_bytes(path, config, c, tp, moe)
        kept += tokens * by_mode[config.activation_checkpoint.mode]
        one_block = max(one_block, tokens * (by_mode["none"] - by_mode[config.activation_checkpoint.mode]))
        if moe:  # every layer keeps its router's probabilities and choices (int64) until the next forward pass
            # fp32, but on a CPU torchtitan's router stays in the compute dtype: it asks autocast, which is not there
            on_cpu = common.DEVICE_TYPE == "cpu" and not is_for_neuron(config) and path != "hf"
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
    chunk = -(-tokens // common.LMHead.num_chunks) * (c.vocab_size // tp) * 13
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
    import common

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
    if neuron or common.DEVICE_TYPE != "cpu":  # the CPU's attention is not among the operators that the policy saves
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
    import nki_moe_kernels as kernels

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
    # trainium_facts 2 (TorchNeuron source): what its attention kernels take; all else computes dense L x L scores.
    rule("attention", t.seq_len % 512 == 0, f"[training] seq_len = {t.seq_len}", "must be a multiple of 512")
    rule("attention", c.head_dim <= 128, f"head_dim = {c.head_dim}", "must be at most 128")
    if t.seq_len > 4096:
        note("attention", "one public report has NaN gradients from sequences above about 5000 tokens")
    if config.data.document_mask:
        scores = t.local_batch_size * c.num_attention_heads // tp * t.seq_len**2 * 4 / 2**30
        text = "a mask leaves the kernel for the dense path: slow, and not counted above are"
        note("attention", f"[data] document_mask = true: {text} {scores:.1f} GiB for one fp32 copy of a layer's scores")
    # trainium_facts 3 and 4: a chip has 4 logical cores, and process groups should have a shape that is known to run.
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
    # trainium_facts 4b (TorchNeuron source): collectives above 512 MiB are split, those of 4 GiB failed.
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


COMMANDS: dict[str, Callable[[list[str]], int]] = {"doctor": doctor, "requirements": requirements, "parity": parity}


def main() -> int:
    """Run the command that argv[1] names."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        given = f"unknown command {sys.argv[1]!r}" if len(sys.argv) > 1 else "no command"
        print(f"error: {given}. There are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
