"""What is installed, what each path will use, what is wrong, and what to do about it.

    ./run.sh doctor                                  the table and a verdict
    python tools/doctor.py requirements FILE ...     exit 1, with the line to run, if the environment lacks something

Imports only the standard library, asks torch with its device plug-ins off, and touches no Neuron device: one process
owns the cores, and looking must not break a running job.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
# Packages of these names on the public index install, and fail on import (device_facts#placeholder-packages).
PLACEHOLDERS = {"torch-neuronx": "1.0", "nki": "0.0.1", "neuronx-cc": "1.0.post1"}
# name: (first version, first version too new). torchtitan is pinned exactly: its internals are used.
SUPPORTED = {"torch": ((2, 13), (2, 15)), "transformers": ((5, 24), (6,)), "torchtitan": ((0, 3, 0), (0, 3, 1))}
CORES_PER_CHIP = 4  # logical, at the default NEURON_LOGICAL_NC_CONFIG=2 (device_facts#chip)
HBM_GIB_PER_CORE = 24  # device_facts#chip
CHIPS = {"trn2.48xlarge": 16, "trn2u.48xlarge": 16}  # device_facts#chip
NEURON_ENVIRONMENT = (
    "Activate the environment of the Neuron machine image, on the AWS image 'Deep Learning AMI Neuron torch-neuronx "
    "2.14.0': source /opt/aws_neuronx_venv_torch_neuronx_2_14_0/bin/activate"
)
NEURON_PACKAGES = (
    'Install torch-neuronx "2.14.*", neuronx-cc "2.*" and nki from the Neuron package repository (the Neuron '
    "documentation's PyTorch setup page has the line), or use the machine image. " + NEURON_ENVIRONMENT
)


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
    """Whether torch-neuronx has the native `neuron` device: from 2.13 on (device_facts#native-torch-neuronx)."""
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
    versions = {}
    for found in importlib.metadata.distributions():
        if name := found.metadata["Name"]:  # none: what an interrupted upgrade left of the old version
            versions.setdefault(name.lower().replace("_", "-"), found.version)  # the first on sys.path is imported
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


def requirements(arguments: list[str]) -> int:
    """Check the active environment before run.sh uses it; arguments are requirement files of this repository."""
    problems = version_problems(gather_versions(), tuple(arguments))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def main() -> int:
    """The table and the verdict, or, for run.sh, the requirements."""
    if sys.argv[1:2] == ["requirements"]:
        return requirements(sys.argv[2:])
    return doctor(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
