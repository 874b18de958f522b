"""The rooms of the repository: imports run down only, and one training path can be copied out."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import REPO

# A room may import those of a lower floor, nothing of its own. The interpreter stands low: it knows nothing of ours.
FLOORS = [
    ["configs.schema", "chat", "tools.doctor", "tools.nki_interpreter", "tools.make_debug_models"],
    ["dataset"],
    ["common"],
    ["checkpoint", "loop", "metrics"],
    ["nki_moe_kernels"],
    ["tools.dry_run", "tools.prepare_data", "tools.configuration_page"],
    ["train_hf", "train_native", "train_nki_moe"],
    ["tools.parity"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = [f for pattern in ("*.py", "configs/*.py", "tools/*.py") for f in REPO.glob(pattern)]
ROOMS = {
    ".".join(f.relative_to(REPO).with_suffix("").parts): f
    for f in FILES
    if f.name not in ("__init__.py", "test_smoke.py")
}


def imports(source: str) -> set[str]:
    """Every module that the source imports, at the top, in functions, or by name in importlib."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_file_has_a_floor():
    assert set(ROOMS) == set(FLOOR)


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_imports_run_down(room):
    ours = imports(ROOMS[room].read_text()) & set(ROOMS)
    assert all(FLOOR[other] < FLOOR[room] for other in ours), f"{room} imports {ours}"


def test_the_check_sees_an_import_that_runs_up():
    assert imports("def f():\n    from tools import parity\n") >= {"tools.parity"}
    assert imports("import loop") == {"loop"}


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_a_name_is_imported_from_the_room_that_defines_it(room):
    """No re-export: what a stranger looks up is in the file that the import names."""
    for node in ast.walk(ast.parse(ROOMS[room].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ROOMS:
            text = ROOMS[node.module].read_text()
            for alias in node.names:
                definition = rf"^(def|class) {alias.name}\b|^{alias.name}\b.*? = "
                assert re.search(definition, text, re.M), f"{room}: {alias.name} is not defined in {node.module}"


@pytest.mark.parametrize(("name", "limit"), [("train_hf", 450), ("train_native", 450), ("train_nki_moe", 550)])
def test_a_path_can_be_read_in_one_sitting(name, limit):
    assert len(ROOMS[name].read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", ["hf", "native", "nki_moe"])
def test_readmes_files_are_enough_for_one_path(path, models, texts, tmp_path):
    """README: which files to copy. They train, elsewhere, with nothing else of the repository."""
    readme = (REPO / "README.md").read_text()
    line = re.search(r"\*\*one path of your own\*\*: copy (.+?);", readme, re.S)[1]
    names = re.findall(r"`([^`]+)`", line.replace("train_X", f"train_{path}"))
    if path == "nki_moe":
        names += ["nki_moe_kernels.py", "tools/nki_interpreter.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    arguments = [f"--model.path={models['M128']}", f"--data.path={texts}", "--training.seq_len=32"]
    arguments += ["--training.steps=1", "--activation_checkpoint.mode=none", "--nki.block_tokens=128"]
    command = [sys.executable, f"train_{path}.py", *arguments]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # as set for the workers
    run = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / f"runs/default/{path}/export/model.safetensors").is_file()
