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
pytestmark = pytest.mark.xdist_group("commands")  # one after the other: the first one makes the debug models


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
    assert len(TRAINING) >= 4


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """One working directory, with a space in its name, for all commands."""
    return tmp_path_factory.mktemp("some where")


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands(command, elsewhere):
    """Each trains from another working directory, its loss falls, and the printed line loads the export."""
    steps = [] if "--training.steps" in command else ["--training.steps", str(STEPS)]
    short = [*steps, "--validation.steps", "1", "--sample.max_new_tokens", "4", "--job.dump_folder", "out folder"]
    done = run(command, *short, cwd=elsewhere)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.distributed.run" in done.stderr  # the line that was executed
    path = command.split()[1]
    metrics = (elsewhere / "out folder" / path / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, metrics) if "loss" in line]
    first = max(i for i, line in enumerate(lines) if line["step"] == 1)  # of this run
    assert lines[-1]["loss"] < lines[first]["loss"]
    line = done.stdout.splitlines()[-1]
    assert line.startswith("from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained('")
    _, loading = AutoModelForCausalLM.from_pretrained(elsewhere / line.split("'")[1], output_loading_info=True)
    assert not any(loading.values()), loading
    if command == TRAINING[0]:  # twice in a row: nothing of the first run is in the way of the second
        again = run(command, *short, cwd=elsewhere)
        assert re.findall(r"loss +([\d.]+)", again.stdout) == re.findall(r"loss +([\d.]+)", done.stdout)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--dry_run" in c])
def test_dry_run_commands(command):
    done = run(command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("./run.sh data ")])
def test_the_data_command_counts_and_marks(command):
    """Against the file itself: rows, answers (each has one <|im_end|>) and what stands between the marks."""
    done = run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (REPO / "debug_models/chat/train.jsonl").read_text().splitlines()]
    assert f"             {len(rows)} documents, " in done.stdout
    shown = re.split(r"^--- .*row (\d+), .*$", done.stdout.split("\nvalidation  ")[0], flags=re.MULTILINE)[1:]
    assert shown[::2] == ["1", "2", "3"]
    for row, text in zip(rows, shown[1::2], strict=False):
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant" and m["content"]]
        marked = re.findall(r"\[\[(.*?)<\|im_end\|>\]\]", text, flags=re.DOTALL)
        marked = [mark for mark in marked if "<tool_call>" not in mark]
        assert all(answer in mark for answer, mark in zip(answers, marked, strict=False))  # long ones end in "..."
        assert len(marked) >= min(len(answers), 2)
        assert "What is" not in "".join(marked)


def test_doctor_prints_a_verdict():
    assert "verdict" in run("./run.sh doctor").stdout
