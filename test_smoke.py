"""README's commands, end to end, as a newcomer would run them (fewer steps): ./run.sh test test_smoke.py"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

REPO = Path(__file__).resolve().parent
README = (REPO / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.startswith("./run.sh")
]
TRAINING = [c for c in COMMANDS if re.match(r"\./run\.sh (hf|native|nki_moe) configs/debug", c)]
STEPS = 4


def run(command: str, *arguments: str, cwd: Path = REPO, timeout: int = 240) -> subprocess.CompletedProcess:
    program, *rest = command.split()
    environment = os.environ | {"PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [str(REPO / program), *rest, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_readme_has_commands_for_every_path():
    assert {c.split()[1] for c in COMMANDS} >= {"hf", "native", "nki_moe", "test", "doctor"}
    assert len(TRAINING) >= 6


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands(command, tmp_path):
    """Each trains from another working directory, its loss falls, and the printed line loads the export."""
    steps = [] if "--training.steps" in command else ["--training.steps", str(STEPS)]
    short = [*steps, "--sample.max_new_tokens", "4", "--job.dump_folder", "out folder"]
    arguments = [command.replace("configs/", f"{REPO}/configs/"), *short]
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.distributed.run" in done.stderr  # the line that was executed
    path = command.split()[1]
    folder = tmp_path / "out folder" / path
    losses = [r["loss"] for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in r]
    assert losses[-1] < losses[0]
    line = done.stdout.splitlines()[-1]
    assert line.startswith("from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained('")
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / line.split("'")[1], output_loading_info=True)
    assert not any(loading.values()), loading
    if command == TRAINING[0]:  # twice in a row: nothing of the first run is in the way of the second
        again = run(*arguments, cwd=tmp_path)
        assert re.findall(r"loss +([\d.]+)", again.stdout) == re.findall(r"loss +([\d.]+)", done.stdout)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--dry_run" in c])
def test_dry_run_commands(command):
    done = run(command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_doctor_prints_a_verdict():
    assert "verdict" in run("./run.sh doctor").stdout
