"""Bring-up on Neuron, with a stand-in module under `torch.neuron`: selection, order, strings, fallbacks.

What the stand-in does not have fails as it would on a build that lacks it. Nothing here says how a real device behaves.
"""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import common
import metrics
from configs import schema

import pytest
import torch
from conftest import REPO

SOURCES = sorted(REPO.glob("*.py"))

# Runs in a process of its own: common.py chooses the device when it is imported.
BRING_UP = """
import json, sys, types
import torch, torch.distributed as dist

calls = []

class Neuron(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") or name == "_is_in_bad_fork":
            raise AttributeError(name)
        def call(*args, **kwargs):
            calls.append(f"torch.neuron.{name}")
            return {"is_available": True, "device_count": 64}.get(name)
        return call

torch.utils.rename_privateuse1_backend("neuron")
torch._register_device_module("neuron", Neuron("torch.neuron"))
start, new_group = dist.init_process_group, dist.new_group

def record_start(backend, **options):
    calls.append(f"init_process_group {backend}")
    return start("gloo", **options)

def record_group(**options):
    calls.append(f"new_group {options['backend']}")
    return new_group(**options)

dist.init_process_group, dist.new_group = record_start, record_group
import common
from configs import schema
chosen = list(calls)
calls.clear()
from torchtitan.tools import utils
config = schema.Config()
config.comm.timeout_seconds = 77
device, group = common.init_distributed(config)
json.dump({
    "type": common.DEVICE_TYPE, "device": str(device), "index": device.index, "chosen": chosen, "calls": calls,
    "torchtitan": [utils.device_type, utils.device_module.__name__], "group": dist.get_backend(group),
    "separate": group is not dist.group.WORLD,
    "timeout": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
}, sys.stdout)
"""


def bring_up(**environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")}
    environment = clean | {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "64"} | environment
    command = [sys.executable, "-c", BRING_UP]
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)


def test_order_strings_and_groups():
    run = bring_up()
    assert run.returncode == 0, run.stderr
    got = json.loads(run.stdout)
    assert got["type"] == "neuron"
    assert set(got["chosen"]) == {"torch.neuron.is_available"}  # choosing the device does not touch it
    assert got["calls"][0] == "init_process_group neuron"  # before anything of the device
    assert "new_group gloo" in got["calls"]
    assert not [c for c in got["calls"] if c.startswith("torch.neuron.")]
    assert (got["device"], got["index"]) == ("neuron", None)
    assert got["torchtitan"] == ["neuron", "torch.neuron"]
    assert (got["group"], got["separate"], got["timeout"]) == ("gloo", True, 77)


def test_a_wrong_number_of_ranks_is_refused_before_the_process_group():
    run = bring_up(LOCAL_WORLD_SIZE="6")
    assert run.returncode == 1
    assert "6 processes on this machine: Neuron needs one per logical core, 64 on a trn2.48xlarge" in run.stderr
    for allowed in (4, 16, 64):
        common.check_neuron_ranks(allowed)
    for refused in (1, 2, 3, 8, 63, 128):
        with pytest.raises(ValueError, match="Set NPROC"):
            common.check_neuron_ranks(refused)


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: f.name)
def test_no_cuda_method_and_no_index_on_neuron(file):
    text = file.read_text()
    assert not re.search(r"neuron:\d", text)
    assert not re.search(r"(?<!torch)\.cuda\b", text.replace("version.cuda", ""))  # tensors go to the chosen device
    if file.name.startswith(("train_", "nki_")):
        assert ".cuda" not in text


def test_every_call_of_torch_neuron_is_in_the_tested_list():
    """A new call on the device module needs a fallback and a test here."""
    used = set(re.findall(r"torch\.neuron\.(\w+)", "".join(f.read_text() for f in SOURCES)))
    text = (REPO / "metrics.py").read_text()
    used |= set(
        re.findall(r"\bmodule\.(\w+)\(", text[text.index("def peak_memory_gib") : text.index("class Metrics:")])
    )
    assert used <= {"synchronize", "max_memory_allocated", "memory_stats", "get_device_properties"}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (SimpleNamespace(synchronize=lambda: None, max_memory_allocated=lambda: 3 * 2**30), 3.0),
        (SimpleNamespace(memory_stats=lambda: {"allocated_bytes.all.peak": 2**30}), 1.0),  # flat keys
        (SimpleNamespace(memory_stats=lambda: {"allocated_bytes": {"peak": 2**31}}), 2.0),  # nested keys
        (SimpleNamespace(memory_stats=lambda: {"allocated_bytes": {"all": {"peak": 2**32}}}), 4.0),
        (SimpleNamespace(memory_stats=lambda: {"something": 1}), None),
        (SimpleNamespace(), None),
    ],
)
def test_peak_memory_with_every_build(monkeypatch, module, expected):
    monkeypatch.setattr(torch, "neuron", module, raising=False)
    assert metrics.peak_memory_gib(SimpleNamespace(type="neuron")) == expected


@pytest.mark.parametrize(("reported", "expected"), [(24 * 2**30, 24.0), (0, 24.0), (96 * 2**30, 96.0)])
def test_total_memory_zero_means_unknown(monkeypatch, reported, expected):
    properties = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(total_memory=reported))
    monkeypatch.setattr(torch, "neuron", properties, raising=False)
    monkeypatch.setattr(torch, "device", lambda name: name)
    assert metrics.device_memory_gib("neuron") == expected
    monkeypatch.setattr(torch, "neuron", SimpleNamespace())
    assert metrics.device_memory_gib("neuron") == 24.0


def test_memory_that_is_unknown_is_printed_as_such(monkeypatch, capsys, tmp_path):
    config = schema.Config()
    config.metrics.enable_tensorboard = False
    monkeypatch.setattr(metrics, "peak_memory_gib", lambda device: None)
    monkeypatch.setattr(common.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(common.dist, "get_world_size", lambda: 1)
    hf_config = common.load_hf_config(REPO / "configs/hf/Qwen3-0.6B")
    log = metrics.Metrics(config, tmp_path, hf_config, torch.device("cpu"), 100, 0)
    log.step(1, 2.0, 1.0, 1e-3, {})
    log.close()
    assert "mem n/a" in capsys.readouterr().out


@pytest.mark.parametrize(("rank", "far"), [(0, True), (15, True), (16, False), (47, False), (48, True), (63, True)])
def test_pinning_follows_the_measured_map(monkeypatch, rank, far):
    pinned = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: pinned.append(set(cpus)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    common.pin_to_numa_node(rank)
    near = {*range(48), *range(96, 144)}
    assert pinned == [set(range(192)) - near if far else near]
    monkeypatch.setenv("NUMA_PINNING", "0")
    common.pin_to_numa_node(rank)
    monkeypatch.delenv("NUMA_PINNING")
    monkeypatch.setattr(os, "cpu_count", lambda: 128)  # another machine: the map says nothing about it
    common.pin_to_numa_node(rank)
    assert len(pinned) == 1


def test_neuron_devices_that_torch_does_not_see_stop_the_run(monkeypatch):
    """A placeholder package, an XLA-era one or none at all: training on the CPU of a Trainium must not go unnoticed."""
    from tools import doctor

    exists = common.Path.exists
    monkeypatch.setattr(common.Path, "exists", lambda self: str(self) == "/dev/neuron0" or exists(self))
    monkeypatch.setattr(doctor, "gather_facts", dict)
    monkeypatch.setattr(doctor, "diagnose", lambda facts: ["torch-neuronx 1.0: placeholders. Run: pip uninstall"])
    monkeypatch.delenv("IGNORE_NEURON", raising=False)
    with pytest.raises(RuntimeError, match=r"torch-neuronx 1\.0: placeholders\. Run: pip uninstall"):
        common.init_distributed(schema.Config())
