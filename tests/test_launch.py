"""run.sh, with a stand-in for Python where the real one would take minutes, and the debug models that it makes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import make_debug_models as debug

REPO = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.timeout(90)

# Answers what run.sh asks of a Python and logs its arguments; as torchrun, pytest or a script it prints what it was
# given. A file NAME.torch beside it gives it torch; PIP_FAILS makes pip fail.
STAND_IN = f"""#!/bin/bash
echo "$*" >>"$LOG"
case "$*" in
  "-c "*'find_spec("torch")'*) [ -e "$0.torch" ] && echo "$0" ;;
  "-c "*version_info*) echo "$0" ;;
  "-c ") ;;
  "-c "* | *doctor.py*) exec "{sys.executable}" "$@" ;;
  -V) echo Python 3.13.0 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) [ -z "$PIP_FAILS" ] ;;
  *make_debug_models.py) d="$(dirname "$1")/../debug_models" && mkdir -p "$d/dense" "$d/moe" "$d/text" "$d/chat" ;;
  *) echo "in $PWD"; printf '<%s>\\n' "$@"; env ;;
esac
"""
CONFIG = '[launch]\nnproc_per_node = 2\n[model]\npath = "Qwen/Qwen3-8B"  # or ./debug_models/dense\n'


class Bench:
    """A copy of the launcher at a path with spaces, and a PATH with only system tools and stand-in Pythons."""

    def __init__(self, folder: Path) -> None:
        self.repo, self.cwd, self.bin, self.log = (
            folder / "re po",
            folder / "some where",
            folder / "bin",
            folder / "log",
        )
        for new in (self.repo / "configs", self.repo / "tools", self.cwd, self.bin):
            new.mkdir(parents=True)
        files = "run.sh tools/doctor.py requirements.txt requirements-dev.txt requirements-cpu.txt"
        for name in files.split():
            shutil.copy(REPO / name, self.repo / name)
        self.config = self.repo / "configs" / "debug.toml"
        self.config.write_text(CONFIG)
        tools = "bash cat cksum cp dirname echo env grep ls mkdir mktemp nproc pkill printenv rm uname"
        for tool in tools.split():
            if path := shutil.which(tool):  # not a link: a stand-in that is written over it would reach the real tool
                (self.bin / tool).write_text(f'#!/bin/sh\nexec "{path}" "$@"\n')
                (self.bin / tool).chmod(0o755)
        self.python("python3", torch=True)

    def python(self, name: str, torch: bool = False, text: str = STAND_IN) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        Path(f"{path}.torch").unlink(missing_ok=True)
        if torch:
            Path(f"{path}.torch").touch()
        return path

    def pretend_neuron(self) -> None:
        device = self.repo / "neuron0"
        device.touch()
        script = self.repo / "run.sh"
        assert script.read_text().count("/dev/neuron0") == 2
        script.write_text(script.read_text().replace("/dev/neuron0", f'"{device}"'))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        environment = {"PATH": str(self.bin), "HOME": str(self.cwd), "LOG": str(self.log)} | environment
        command = [str(self.repo / "run.sh"), *arguments]
        return subprocess.run(
            command, cwd=self.cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def calls(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return lines


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def arguments_of(run: subprocess.CompletedProcess) -> list[str]:
    assert run.returncode == 0, run.stderr
    return [line[1:-1] for line in run.stdout.splitlines() if line.startswith("<")]


def environment_of(run: subprocess.CompletedProcess) -> dict[str, str]:
    assert run.returncode == 0, run.stderr
    return dict(line.split("=", 1) for line in run.stdout.splitlines() if line[:1].isupper() and "=" in line)


def test_torchrun_line_is_printed_and_run_from_the_callers_folder(bench: Bench):
    run = bench.run("hf", "configs/debug.toml", "--data.path", "my data/a.jsonl", "--x=$HOME")
    script, config = f"{bench.repo}/train_hf.py", f"{bench.repo}/configs/debug.toml"
    given = [script, config, "--data.path", "my data/a.jsonl", "--x=$HOME"]
    expected = "-m torch.distributed.run --nnodes 1 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint localhost:0"
    assert arguments_of(run) == [*expected.split(), "--local_addr", "localhost", "--redirects", "1:1", *given]
    assert f"in {bench.cwd}\n" in run.stdout
    # the printed line, pasted into a shell, does the same
    again = subprocess.run(
        ["bash", "-c", run.stderr.splitlines()[-1]],
        env={"LOG": str(bench.log), "PATH": str(bench.bin)},
        cwd=bench.cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert arguments_of(again) == arguments_of(run)
    assert environment_of(again)["OMP_NUM_THREADS"] == environment_of(run)["OMP_NUM_THREADS"]


def test_config_is_looked_up_from_the_callers_folder_first(bench: Bench):
    (bench.cwd / "configs").mkdir()
    (bench.cwd / "configs/debug.toml").write_text("launch.nproc_per_node = 3")
    arguments = arguments_of(bench.run("native", "configs/debug.toml"))
    assert arguments[arguments.index("--nproc_per_node") + 1] == "3"
    assert arguments[-1] == "configs/debug.toml"


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ([], {}, "2"),
        (["--launch.nproc_per_node", "3"], {}, "3"),
        (["--launch.nproc-per-node=5"], {}, "5"),
        (["--launch.nproc_per_node", "3"], {"NPROC": "64"}, "64"),
    ],
)
def test_process_count(bench: Bench, arguments: list[str], environment: dict[str, str], expected: str):
    given = arguments_of(bench.run("native", "configs/debug.toml", *arguments, **environment))
    assert given[given.index("--nproc_per_node") + 1] == expected
    others = given[given.index("--redirects") + 1].split(",")
    assert others == [f"{rank}:1" for rank in range(1, int(expected))]


def test_threads_fit_the_cores_and_the_users_setting_wins(bench: Bench):
    bench.python("nproc", text="#!/bin/bash\necho 12")
    for nproc, threads in (("2", "6"), ("5", "2"), ("64", "1")):
        assert environment_of(bench.run("hf", "configs/debug.toml", NPROC=nproc))["OMP_NUM_THREADS"] == threads
    assert environment_of(bench.run("hf", "configs/debug.toml", OMP_NUM_THREADS="7"))["OMP_NUM_THREADS"] == "7"


def test_dry_run_and_help_are_one_plain_process(bench: Bench):
    for flag in ("--dry_run", "--dry-run", "--help"):
        run = bench.run("nki_moe", "configs/debug.toml", flag, NPROC="64")
        assert arguments_of(run) == [f"{bench.repo}/train_nki_moe.py", f"{bench.config}", flag]
    assert arguments_of(bench.run("nki_moe", "--help")) == [f"{bench.repo}/train_nki_moe.py", "--help"]


def test_several_machines(bench: Bench):
    run = bench.run("native", "configs/debug.toml", NNODES="4", NODE_RANK="3", RDZV_ENDPOINT="node0:29500")
    expected = "--nnodes 4 --nproc_per_node 2 --rdzv_backend static --rdzv_endpoint node0:29500 --node_rank 3"
    assert expected in " ".join(arguments_of(run))
    assert "--local_addr" not in arguments_of(run)


def test_slurm_script(bench: Bench):
    """As Slurm runs it, with stand-ins: srun starts the task of both machines, scontrol spreads out their names."""
    script = (REPO / "configs" / "slurm_2nodes.sbatch").read_text()
    assert script.count("source /opt/aws_neuronx_venv_torch_neuronx_2_14_0/bin/activate\n") == 1  # not on this machine
    copy = bench.repo / "slurm.sbatch"
    copy.write_text(script.replace("source /opt/aws_neuronx_venv_torch_neuronx_2_14_0/bin/activate\n", ""))
    shutil.copy(REPO / "configs" / "qwen3_8b_2nodes.toml", bench.repo / "configs")
    bench.python("scontrol", text='#!/bin/bash\n[ "$*" = "show hostnames trn[7-8]" ] && printf "trn7\\ntrn8\\n"\n')
    bench.python(
        "srun", text='#!/bin/bash\nshift\nfor n in 0 1; do SLURM_NODEID=$n "$@" || exit; echo "end of $n"; done\n'
    )
    environment = {"PATH": str(bench.bin), "HOME": str(bench.cwd), "LOG": str(bench.log), "SLURM_NNODES": "2"}
    environment |= {"SLURM_JOB_NODELIST": "trn[7-8]"}
    run = subprocess.run(
        ["bash", str(copy), "--training.steps", "3"],
        cwd=bench.repo, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for number, output in enumerate(run.stdout.split("end of ")[:2]):
        given = " ".join(line[1:-1] for line in output.splitlines() if line.startswith("<"))
        agents = f"--nnodes 2 --nproc_per_node 64 --rdzv_backend static --rdzv_endpoint trn7:29500 --node_rank {number}"
        assert agents in given
        assert given.endswith("configs/qwen3_8b_2nodes.toml --training.steps 3")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["train"], {}, "unknown command 'train'"),
        (["native"], {}, "which config?"),
        (["native", "--dry_run"], {}, "which config?"),
        (["native", "configs/nope.toml"], {}, "Shipped are: configs/debug.toml"),
        (["native", "bad.toml"], {}, "bad.toml: tomllib.TOMLDecodeError"),
        (["native", "empty.toml"], {}, "Set NPROC, or [launch] nproc_per_node in empty.toml"),
        (["native", "configs/debug.toml"], {"NPROC": "two"}, "'two' processes"),
        (["native", "configs/debug.toml"], {"NPROC": "0"}, "'0' processes"),
        (["native", "configs/debug.toml", "--launch.nproc_per_node", "-1"], {}, "'-1' processes"),
        (["native", "configs/debug.toml"], {"NNODES": "x"}, "NNODES='x'"),
        (["native", "configs/debug.toml"], {"NNODES": "2", "NODE_RANK": "0"}, "RDZV_ENDPOINT=host:port"),
        (["native", "configs/debug.toml"], {"NNODES": "2", "NODE_RANK": "2", "RDZV_ENDPOINT": "a:1"}, "below 2"),
        (["native", "configs/debug.toml"], {"PYTHON": "/no/python"}, "among: /no/python"),
    ],
)
def test_wrong_use_says_what_to_do(bench: Bench, arguments: list[str], environment: dict[str, str], message: str):
    (bench.cwd / "bad.toml").write_text("a = = 1")
    (bench.cwd / "empty.toml").write_text("")
    run = bench.run(*arguments, **environment)
    assert run.returncode == 2
    assert run.stdout == ""
    assert message in run.stderr.splitlines()[-1]


def test_help_needs_no_python(bench: Bench):
    (bench.bin / "python3").unlink()
    assert "./run.sh native configs/debug.toml" in bench.run("--help").stdout
    assert bench.run().stdout == bench.run("-h").stdout == bench.run("--help").stdout


def test_bootstrap_once_and_again_when_requirements_change(bench: Bench):
    bench.python("python3")
    run = bench.run("native", "configs/debug.toml")
    assert arguments_of(run)[:2] == ["-m", "torch.distributed.run"]
    assert "making .venv with Python 3.13.0 (once" in run.stderr
    made = [call for call in bench.calls() if call.startswith("-m venv") or " pip " in call]
    assert made[0] == f"-m venv {bench.repo}/.venv"
    assert made[1].endswith("requirements-cpu.txt"), "torch first"
    assert made[2].endswith("requirements-dev.txt")
    assert len(made) == 3

    run = bench.run("native", "configs/debug.toml")
    assert arguments_of(run)
    assert run.stderr.count("\n") == 1, "the torchrun line only"
    assert not [call for call in bench.calls() if " pip " in call]

    (bench.repo / "requirements.txt").write_text("numpy==1.0\n")
    run = bench.run("test")
    assert "updating .venv" in run.stderr
    calls = bench.calls()
    assert sum(" pip " in call for call in calls) == 2
    assert not [call for call in calls if call.startswith("-m venv")]


def test_interrupted_bootstrap_is_not_used(bench: Bench):
    bench.python("python3")
    failed = bench.run("native", "configs/debug.toml", PIP_FAILS="1")
    assert failed.returncode == 2
    assert "The same command tries again" in failed.stderr
    (bench.repo / ".venv/leftover").touch()
    run = bench.run("native", "configs/debug.toml")
    assert "making .venv" in run.stderr
    assert arguments_of(run)
    assert not (bench.repo / ".venv/leftover").exists()
    # the Python that it was made with went away
    (bench.repo / ".venv/bin/python").unlink()
    assert "making .venv" in bench.run("native", "configs/debug.toml").stderr


def test_two_bootstraps_do_not_meet(bench: Bench):
    bench.python("python3")
    lock = bench.repo / ".venv.lock"
    lock.write_text(str(os.getpid()))
    run = bench.run("native", "configs/debug.toml")
    assert run.returncode == 2
    assert f"process {os.getpid()}" in run.stderr
    assert lock.exists()
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock.write_text(str(ended.pid))
    assert arguments_of(bench.run("native", "configs/debug.toml"))
    assert not lock.exists()


def test_python_of_the_environment(bench: Bench):
    # an active environment with torch is used as it is, and PYTHON decides against it
    bench.python("other python", torch=True)
    run = bench.run("native", "configs/debug.toml", PYTHON=f"{bench.bin}/other python")
    assert run.stderr.splitlines()[-1].split(" -m ")[0].endswith("/other\\ python")
    # names on the PATH that do not run, such as a pyenv shim of a version that is not there, are passed over
    bench.python("python3", text="#!/bin/bash\nexit 127")
    bench.python("python3.12")
    run = bench.run("native", "configs/debug.toml")
    assert arguments_of(run)
    assert f"-m venv {bench.repo}/.venv" in bench.calls()
    (bench.bin / "python3.12").unlink()
    (bench.repo / ".venv/complete").unlink()
    run = bench.run("native", "configs/debug.toml")
    assert run.returncode == 2
    assert "no working Python 3.11-3.14 among: python3 python" in run.stderr


def test_missing_requirements_of_an_active_environment(bench: Bench):
    with (bench.repo / "requirements.txt").open("a") as file:
        file.write("not-there-at-all==1.2\n")
    run = bench.run("native", "configs/debug.toml")
    assert run.returncode == 1
    assert run.stderr.endswith("-m pip install not-there-at-all==1.2\n")
    assert not [call for call in bench.calls() if " pip " in call], "an environment that is not ours stays untouched"


def test_no_requirement_replaces_torch():
    names = [line.split("==")[0] for line in (REPO / "requirements.txt").read_text().splitlines() if "==" in line]
    assert "torch" not in names
    assert "triton" not in names
    assert (REPO / "requirements-cpu.txt").read_text().splitlines()[-1].startswith("torch==")


def test_neuron_variables_only_with_a_device(bench: Bench):
    names = ("NEURON", "NKI", "TORCH_", "FI_")
    assert not [name for name in environment_of(bench.run("native", "configs/debug.toml")) if name.startswith(names)]
    bench.pretend_neuron()
    one = environment_of(bench.run("native", "configs/debug.toml", NPROC="64", NKI_COMPILE_CACHE_URL="/scratch/nki"))
    assert one["NEURON_RT_NUM_CORES"] == "64"
    assert one["OMP_NUM_THREADS"] == "2"
    assert one["NKI_COMPILE_CACHE_URL"] == "/scratch/nki", "the user's setting stays"
    assert one["TORCH_NEURONX_NEFF_CACHE_DIR"] == f"{bench.cwd}/.cache/neuron/neff"
    assert "NEURON_RT_VISIBLE_CORES" not in one
    assert "FI_PROVIDER" not in one
    several = {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "a:1"}
    assert environment_of(bench.run("native", "configs/debug.toml", **several))["FI_PROVIDER"] == "efa"


def test_neuron_machine_without_active_environment_gets_no_cpu_environment(bench: Bench):
    bench.pretend_neuron()
    bench.python("python3")
    run = bench.run("native", "configs/debug.toml")
    assert run.returncode == 2
    assert "Activate the Neuron one" in run.stderr
    assert not (bench.repo / ".venv").exists()


def test_debug_models_are_made_once_when_named(bench: Bench):
    assert "making debug_models" not in bench.run("native", "configs/debug.toml").stderr, "named in a comment only"
    arguments = ("native", "configs/debug.toml", "--model.path", "../re po/debug_models/moe")
    assert "making debug_models" in bench.run(*arguments).stderr
    assert "making debug_models" not in bench.run(*arguments).stderr
    (bench.repo / "tools/make_debug_models.py").touch()  # a newer one, as after git pull
    assert "making debug_models" in bench.run(*arguments).stderr
    (bench.repo / "tools/make_debug_models.py").unlink()
    shutil.rmtree(bench.repo / "debug_models/text")
    bench.config.write_text(CONFIG.replace("Qwen/Qwen3-8B", "./debug_models/dense"))
    assert "making debug_models" in bench.run("parity", "configs/debug.toml").stderr


def test_test_command_keeps_the_meaning_of_files(bench: Bench):
    (bench.cwd / "test_mine.py").touch()
    with (bench.repo / "requirements-dev.txt").open("w"):
        pass
    run = bench.run("test", "test_mine.py::test_a", "tests/test_launch.py", "-k", "a b")
    expected = ["-m", "pytest", f"{bench.cwd}/test_mine.py::test_a", "tests/test_launch.py", "-k", "a b"]
    assert arguments_of(run) == expected
    assert f"in {bench.repo}\n" in run.stdout


WORKER = """
import os, signal, sys, time
rank = os.environ["RANK"]
print("stdout of rank", rank, flush=True)
if sys.argv[2] == "fail":
    if rank == "0":
        open("printed", "w").close()
    if rank == "1":
        while not os.path.exists("printed"):  # torchrun ends rank 0 as soon as this one has failed
            time.sleep(0.1)
        print("error: the reason", file=sys.stderr)
        os._exit(3)
else:
    if sys.argv[2] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as common.launch does
    else:
        signal.signal(signal.SIGTERM, lambda *_: (os.write(2, f"saved by rank {rank}\\n".encode()), sys.exit(0)))
    print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.fixture
def torchrun(bench: Bench):
    """Start the launcher with the real torchrun and a worker that needs no torch."""
    (bench.repo / "train_native.py").write_text(WORKER)

    def start(mode: str, **options) -> subprocess.Popen:
        command = [str(bench.repo / "run.sh"), "native", "configs/debug.toml", mode]
        environment = os.environ | {"PYTHON": sys.executable}
        return subprocess.Popen(
            command,
            cwd=bench.cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return start


def test_the_reason_of_a_failing_rank_reaches_the_terminal(torchrun):
    out, err = (process := torchrun("fail")).communicate(timeout=60)
    assert process.returncode == 1
    assert out == "stdout of rank 0\n"
    assert err.count("error: the reason") == 1


def test_sigterm_reaches_every_rank(torchrun):
    process = torchrun("wait")
    wait_until_ready(process)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert process.returncode == 0
    assert out == "stdout of rank 0\n"
    assert "saved by rank 0" in err
    assert "saved by rank 1" in err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("whole_group", [False, True])
def test_ctrl_c_and_a_closed_terminal_are_like_sigterm(torchrun, sent, whole_group):
    """To run.sh alone, or as a terminal sends it: to all processes of the foreground group (FN-12)."""
    process = torchrun("wait", start_new_session=True)
    wait_until_ready(process)
    (os.killpg if whole_group else os.kill)(process.pid, sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "saved by rank 0" in err
    assert "saved by rank 1" in err
    assert "Traceback" not in err


def test_nohup_keeps_the_run_alive(torchrun):
    process = torchrun("wait", start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_until_ready(process)
    os.killpg(process.pid, signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


def test_a_second_signal_ends_at_once(torchrun):
    process = torchrun("deaf")
    wait_until_ready(process)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 10
    assert process.returncode != 0
    assert "stopped at once" in err


def wait_until_ready(process: subprocess.Popen) -> None:
    lines: list[str] = []
    while sum(line == "ready\n" for line in lines) < 2:
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)


ABORTS = """
import atexit, os, sys
import common
class Thread:  # as a C++ thread that reaches for the interpreter while it is taken apart
    def __del__(self, abort=os.abort):
        abort()
thread = Thread()
atexit.register(print, "closed")
common.launch(lambda config: print(config.training.steps))
"""


def test_a_complete_run_cannot_be_aborted_while_the_interpreter_ends():
    command = [sys.executable, "-c", ABORTS, str(REPO / "configs/debug.toml"), "--training.steps", "7"]
    run = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "7\nclosed\n"), run.stderr


# --- debug models ---


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("debug") / "mod els"
    debug.make_debug_models(folder)
    return folder


def test_debug_folders_are_complete_and_load(models: Path):
    common = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    shards = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)} | {"model.safetensors.index.json"}
    assert {path.name for path in (models / "dense").iterdir()} == common | {"model.safetensors"}
    assert {path.name for path in (models / "moe").iterdir()} == common | shards
    for name, tied in (("dense", True), ("moe", False)):
        config = json.loads((models / name / "config.json").read_text())
        sizes = [config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")]
        sizes += [config["num_attention_heads"] * config["head_dim"], config.get("moe_intermediate_size", 0)]
        assert len(set(sizes)) == len(sizes), "a transposed size must not hide"
        assert config["tie_word_embeddings"] == tied
        model, info = AutoModelForCausalLM.from_pretrained(models / name, output_loading_info=True)
        assert not any(info.values()), info
        assert model.generation_config.eos_token_id == [1393, 1391]
    keys = []
    for shard in sorted((models / "moe").glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            keys += file.keys()
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in keys, "the layout of the hub: one tensor for each expert"
    assert sorted(keys) == sorted(json.loads((models / "moe/model.safetensors.index.json").read_text())["weight_map"])


def test_debug_models_are_made_once_with_the_same_bytes(models: Path, tmp_path: Path):
    def contents(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    times = {path: path.stat().st_mtime_ns for path in models.rglob("*")}
    debug.make_debug_models(models)
    assert times == {path: path.stat().st_mtime_ns for path in models.rglob("*")}
    shutil.copytree(models, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/dense")
    shutil.rmtree(tmp_path / "copy/text")
    (tmp_path / "copy/moe/config.json").write_text("of an older make_debug_models.py")
    os.utime(tmp_path / "copy/moe", (0, 0))
    torch.manual_seed(7)  # what was drawn before must not matter
    debug.make_debug_models(tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(models)


def test_interrupted_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(debug, "tiny_tokenizer", lambda texts: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        debug.make_debug_models(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_debug_text_is_real_and_split(models: Path):
    texts = {
        name: [json.loads(line)["text"] for line in (models / f"text/{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("train", "validation")
    }
    assert 0.5e6 < sum(map(len, texts["train"])) < 1.1e6
    assert not set(texts["train"]) & set(texts["validation"])
    assert any("def bisect_left(" in text for text in texts["validation"])
    assert not any("def bisect_left(" in text for text in texts["train"])
    with pytest.raises(FileNotFoundError, match=r"no_such_module\.py is missing: the debug text is made of"):
        debug.stdlib_documents("ast no_such_module")


def test_debug_tokenizer_has_qwens_roles(models: Path):
    tokenizer = AutoTokenizer.from_pretrained(models / "dense")
    assert len(tokenizer) == 1400
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    text = "def f(x):\n    return 'héllo 42' # 世界\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()), "merges were learnt"
    for token in debug.SPECIAL_TOKENS + debug.ADDED_TOKENS:
        assert len(tokenizer(token).input_ids) == 1
    think = tokenizer("<think>a<|im_end|>").input_ids
    assert tokenizer.decode(think, skip_special_tokens=True) == "<think>a"


def test_chat_template(models: Path):
    tokenizer = AutoTokenizer.from_pretrained(models / "moe")
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nA1"},
        {"role": "user", "content": "U2"},
        {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "A2"},
    ]
    expected = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n<think>\nR\n</think>\n\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nA2<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(chat, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert prompt.endswith("U1<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(Exception, match="unknown role robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": ""}], tokenize=False)
