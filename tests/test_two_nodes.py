"""Two torchrun agents on one machine, with one folder between them, as two nodes with a shared file system."""

import json
import os
import shutil
import socket
import subprocess

import checkpoint
from configs import schema

from conftest import REPO, make_config, read_tensors, run_main


def on_two_nodes(toml, *arguments):
    """The same run.sh command with NODE_RANK 0 and 1; returns what node 0 printed."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {"NNODES": "2", "NPROC": "1", "RDZV_ENDPOINT": f"localhost:{port}", "OMP_NUM_THREADS": "1"}
    command = [str(REPO / "run.sh"), "native", str(toml), *arguments]
    # communicate in turn: node 1 prints little
    nodes = [
        subprocess.Popen(
            command, env=shared | {"NODE_RANK": str(n)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for n in (0, 1)
    ]
    try:
        outputs = [node.communicate(timeout=280)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    return outputs[0]


def test_two_nodes_train_checkpoint_resume_and_export_as_one(workers, models, texts, tmp_path):
    sections = dict(
        model=dict(path=str(models["D0"])), data=dict(path=str(texts)), training=dict(steps=4, max_norm=1.0),
        optimizer=dict(name="AdamW", lr=1e-2), checkpoint=dict(enable=True, interval=2),
    )  # fmt: skip
    config = make_config(**sections, job=dict(dump_folder=str(tmp_path / "one")))
    workers.run(2, run_main, "native", config)
    config.job.dump_folder = str(tmp_path / "two")
    toml = tmp_path / "two.toml"
    toml.write_text(schema.toml_text(config))
    on_two_nodes(toml)
    one, two = tmp_path / "one/native", tmp_path / "two/native"

    def losses(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    assert losses(two) == losses(one)
    assert [step for step, problem in checkpoint.list_saved(two / "checkpoints") if problem is None] == [2, 4]
    want, got = read_tensors(one / "export"), read_tensors(two / "export")
    assert want.keys() == got.keys()
    assert all(got[name].equal(w) for name, w in want.items())
    assert (two / "export/config.json").read_bytes() == (one / "export/config.json").read_bytes()
    assert not list((two).glob("*.tmp"))
    # What two nodes wrote, one resumes: steps 3 and 4 again, from the checkpoint of step 2; each is logged once.
    shutil.rmtree(two / "checkpoints/step-4")
    workers.run(2, run_main, "native", config)
    assert losses(two) == losses(one)
