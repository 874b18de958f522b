"""What the doctor recognises, each case as a dictionary of facts, without hardware."""

import subprocess
import sys
from typing import Any

import pytest

from tools import doctor

pytestmark = pytest.mark.timeout(60)

PINS = {"torchtitan": "0.3.0", "transformers": "5.24.0", "tokenizers": "0.23.3", "safetensors": "0.8.0"}
PINS |= {"huggingface-hub": "1.33.0", "datasets": "4.7.0", "tyro": "1.0.17", "tensorboard": "2.21.0", "numpy": "2.4.6"}
NEURON = {"torch": "2.14.0+cpu", "torch-neuronx": "2.14.3.0.1", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0"}


def laptop(**changes: Any) -> dict[str, Any]:
    """Facts of a healthy CPU machine."""
    versions = PINS | {"torch": "2.13.0+cpu"} | changes.pop("versions", {})
    facts = {"python": (3, 13, 1), "executable": "python", "init_text": {}, "torch_error": "", "torch_cuda": ""}
    facts |= {"cuda_devices": 0, "chips": 0, "driver": "", "instance": "", "environment": {}}
    return facts | {"versions": {name: version for name, version in versions.items() if version}} | changes


def trn2(**changes: Any) -> dict[str, Any]:
    """Facts of a healthy trn2.48xlarge."""
    changes["versions"] = NEURON | changes.get("versions", {})
    return laptop(**({"chips": 16, "instance": "trn2.48xlarge", "driver": "2.31.7.0"} | changes))


def test_healthy_machines_have_no_problem_and_the_right_device():
    cuda = laptop(versions={"torch": "2.13.0"}, torch_cuda="13.0", cuda_devices=8)
    for facts, expected in ((laptop(), "cpu"), (cuda, "cuda"), (trn2(), "neuron")):
        assert doctor.diagnose(facts) == []
        assert doctor.device(facts) == expected
    older_family = trn2(versions={"torch": "2.13.0+cpu", "torch-neuronx": "2.13.3.0.1"})
    assert doctor.diagnose(older_family) == []


CASES = {
    "old python": (laptop(python=(3, 10, 13)), "Python 3.10.13: 3.11-3.14"),
    "new python": (laptop(python=(3, 15, 0)), "Python 3.15.0"),
    "python 3.11 on neuron": (trn2(python=(3, 11, 7)), "3.12-3.14"),
    "placeholder torch-neuronx": (trn2(versions={"torch-neuronx": "1.0"}), "uninstall torch-neuronx. "),
    "placeholder nki": (trn2(versions={"nki": "0.0.1"}), "uninstall nki. "),
    "placeholder neuronx-cc": (trn2(versions={"neuronx-cc": "1.0.post1"}), "uninstall neuronx-cc. "),
    "placeholder by its text": (trn2(init_text={"nki": "raise ImportError('WRONG PACKAGE')"}), "uninstall nki. "),
    "xla by version": (trn2(versions={"torch": "2.9.0", "torch-neuronx": "2.9.0.2.11"}), "XLA generation"),
    "xla by torch-xla": (trn2(versions={"torch-xla": "2.9.0"}), "torch-xla 2.9.0: the XLA generation"),
    "pre-release": (trn2(versions={"torch-neuronx": "2.12.3"}), "pre-release"),
    "torch newer than torch-neuronx": (trn2(versions={"torch-neuronx": "2.13.3.0"}), '"torch==2.13.*"'),
    "torch older than torch-neuronx": (trn2(versions={"torch": "2.13.0+cpu"}), '"torch==2.14.*"'),
    "no driver": (trn2(chips=0), "aws-neuronx-dkms"),
    "no torch-neuronx": (trn2(versions={"torch-neuronx": ""}), "no torch-neuronx here"),
    "no nki": (trn2(versions={"nki": ""}), "nki missing beside torch-neuronx"),
    "few devices": (trn2(chips=12), "expected are 16 with 64 logical cores"),
    "logical core config": (trn2(environment={"NEURON_LOGICAL_NC_CONFIG": "1"}), "unset NEURON_LOGICAL_NC_CONFIG"),
    "visible cores": (trn2(environment={"NEURON_RT_VISIBLE_CORES": "0"}), "unset NEURON_RT_VISIBLE_CORES"),
    "cuda torch on neuron": (
        trn2(versions={"torch": "2.14.0"}, torch_cuda="13.0"),
        '--no-deps "torch==2.14.0"',
    ),
    "no torch": (laptop(versions={"torch": ""}), "makes .venv"),
    "broken torch": (laptop(torch_error="ImportError: libfoo"), "ImportError: libfoo"),
    "old torch": (laptop(versions={"torch": "2.9.1"}), "torch 2.9.1: 2.13 or 2.14"),
    "too new torch": (laptop(versions={"torch": "2.15.0"}), "torch 2.15.0: 2.13 or 2.14"),
    "missing requirement": (laptop(versions={"huggingface-hub": ""}), "pip install huggingface_hub==1.33.0"),
    "other torchtitan": (laptop(versions={"torchtitan": "0.2.2"}), "pip install torchtitan==0.3.0"),
    "transformers 4": (laptop(versions={"transformers": "4.57.1"}), "pip install transformers==5.24.0"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_named_with_a_way_out(name: str):
    facts, expected = CASES[name]
    problems = doctor.diagnose(facts)
    assert len(problems) == 1, problems
    assert expected in problems[0]


def test_faults_add_up_and_share_one_pip_line():
    broken = laptop(versions={"tyro": "", "datasets": "", "torch": "2.9.0"})
    old_torch, missing = doctor.diagnose(broken)
    assert "torch 2.9.0" in old_torch
    assert missing.endswith("python -m pip install datasets==4.7.0 tyro==1.0.17")
    # a fitting newer version stays: replacing it could break what else is in the environment
    assert doctor.diagnose(laptop(versions={"numpy": "1.26.4", "transformers": "5.30.0"})) == []


def test_placeholder_is_not_taken_for_a_device():
    assert doctor.device(trn2(versions={"torch-neuronx": "1.0"})) == "cpu"
    assert doctor.device(trn2(chips=0)) == "cpu"


def test_an_unknown_instance_with_devices_is_fine():
    assert doctor.diagnose(trn2(instance="", chips=4)) == []


def test_table_tells_where_the_caches_are_and_what_each_path_uses():
    environment = {"TORCH_NEURONX_NEFF_CACHE_DIR": "/tmp/neff", "HF_HUB_OFFLINE": "1", "HF_HOME": "/data/hf"}
    rows = dict(doctor.table(trn2(environment=environment)))
    assert rows["neff cache"] == "/tmp/neff  lost at reboot"
    assert rows["hub cache"] == "/data/hf/hub, offline: HF_HUB_OFFLINE"
    assert rows["neuron devices"] == "16 chips, 64 logical cores of 16 and 64"
    assert rows["path nki_moe"] == "device neuron, process group neuron, attention SDPA, expert kernels NKI"
    assert dict(doctor.table(laptop()))["path hf"] == "device cpu, process group gloo, attention SDPA"


def test_doctor_runs_here_and_its_exit_code_is_its_verdict():
    run = subprocess.run([sys.executable, doctor.__file__], capture_output=True, text=True, check=False)
    assert run.stderr == ""
    rows = run.stdout.split("\n\n")[0].splitlines()
    assert all(line[15] == " " and line[16] != " " for line in rows), "one aligned table"
    assert f"python          {doctor.dotted(sys.version_info[:3])}" in run.stdout
    verdict = run.stdout.splitlines()[-1]
    assert (run.returncode == 0) == verdict.startswith("verdict: ready to train on ")
    assert ("problem 1:" in run.stdout) == (run.returncode == 1)


@pytest.mark.parametrize("arguments", [["doctor"], ["--fix"]])
def test_wrong_use_is_an_error(arguments: list[str]):
    run = subprocess.run([sys.executable, doctor.__file__, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")


def test_versions_are_those_that_would_be_imported(tmp_path, monkeypatch):
    """The first of two on sys.path counts, and a folder that an interrupted upgrade left behind does not."""
    for folder, version in (("first", "5.25.0"), ("second", "5.24.0")):
        metadata = tmp_path / folder / f"transformers-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    (tmp_path / "first/safetensors-0.7.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert doctor.gather_versions()["versions"] == {"transformers": "5.25.0"}
