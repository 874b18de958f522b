"""Configuration: what is wrong is refused by name before a disk or a process group is touched (FR-25, FR-34)."""

import dataclasses
import types
from pathlib import Path

import common
from configs import schema

import pytest
from conftest import REPO, JobError, make_config

GOOD = '[model]\npath = "x"\n[data]\npath = "README.md"\n'


def write(tmp_path, text):
    file = tmp_path / "config.toml"
    file.write_text(GOOD + text)
    return [str(file)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[training]\nstepps = 3", ["'stepps'", "[training]", "did you mean 'steps'"]),
        ("[trainin]\nsteps = 3", ["[trainin]", "did you mean 'training'"]),
        ("[optimizer]\nsteps = 3", ["'steps'", "[optimizer]", "[training]"]),
        ('[training]\nsteps = "3"', ["[training] steps", "'3'", "str", "expected int"]),
        ("[training]\nsteps = true", ["[training] steps", "bool", "expected int"]),
        ("[training]\nmax_norm = false", ["[training] max_norm", "bool", "expected float"]),
        ("[checkpoint]\nenable = 1", ["[checkpoint] enable", "int", "expected bool"]),
        ('[optimizer]\nname = "Adam"', ["[optimizer] name", "'Adam'", "'AdamW'", "'SGD'"]),
        ("[optimizer]\nlr = -1e-3", ["[optimizer] lr = -0.001", "greater than 0"]),
        ("[optimizer]\nlr = nan", ["[optimizer] lr = nan"]),
        ("[training]\nsteps = -1", ["[training] steps = -1", "0 or more"]),
        ("[training]\nseq_len = 0", ["[training] seq_len = 0"]),
        ("[training]\nglobal_batch_size = 0", ["[training] global_batch_size = 0"]),
        ("[lr_scheduler]\ndecay_ratio = 1.5", ["decay_ratio = 1.5"]),
        ("[training]\nsteps = 3\nsteps = 4", ["not valid TOML"]),
        ("steps = 3", ["steps"]),
        ("[debug]\nseed = 4294967296", ["[debug] seed = 4294967296", "2**32 - 1"]),
        ("[debug]\nseed = -1", ["[debug] seed = -1"]),
        ("[data.more]\nx = 1", ["more"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, words):
    with pytest.raises(ValueError, match=r".") as error:
        schema.parse_config(write(tmp_path, text))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--training.stepz", "3"], "training.steps"),
        (["--training.steps", "three"], "three"),
        (["--optimizer.name", "Adam"], "AdamW"),
        (["--optimizer.lr", "-1"], "lr = -1"),
        (["--model.path", ""], "[model] path is empty"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(tmp_path, arguments, word):
    with pytest.raises(ValueError, match=r".") as error:
        schema.parse_config(write(tmp_path, "") + arguments)
    assert word in str(error.value).replace("-", "_" if "stepz" in str(arguments) else "-")


def test_command_line_beats_file_beats_default(tmp_path):
    config = schema.parse_config([*write(tmp_path, "[training]\nsteps = 7\nseq_len = 64"), "--training.steps", "9"])
    assert config.training.steps == 9
    assert config.training.seq_len == 64
    assert config.optimizer.lr == schema.Optimizer().lr


def test_an_integer_may_stand_for_a_float(tmp_path):
    assert schema.parse_config(write(tmp_path, "[training]\nmax_norm = 1")).training.max_norm == 1.0


def test_relative_paths_count_from_the_repository_or_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    arguments = write(tmp_path, '[job]\ndump_folder = "runs/x"\n[validation]\npath = "./v.jsonl"')
    config = schema.parse_config([*arguments, "--model.path", "./here", "--data.path", "~"])
    assert config.job.dump_folder == str(REPO / "runs/x")
    assert config.validation.path == str(REPO / "v.jsonl")
    assert config.model.path == str(tmp_path / "here")
    assert Path(config.data.path) == Path.home()


def test_a_hub_id_stays_as_it_is(tmp_path):
    config = schema.parse_config([*write(tmp_path, ""), "--model.path", "Qwen/Qwen3-0.6B"])
    assert config.model.path == "Qwen/Qwen3-0.6B"


def test_the_resolved_configuration_reads_back_as_itself(tmp_path):
    config = schema.parse_config([*write(tmp_path, "[training]\nsteps = 7"), "--job.dump_folder", 'a "b" \\ c'])
    saved = tmp_path / "saved.toml"
    saved.write_text(schema.toml_text(config))
    assert dataclasses.asdict(schema.parse_config([str(saved)])) == dataclasses.asdict(config)


@pytest.mark.parametrize("file", sorted(REPO.glob("configs/*.toml")), ids=lambda f: f.name)
def test_every_shipped_file_is_valid(file):
    schema.parse_config([str(file), "--dry_run"])  # which needs no data


SIZES = dict(
    num_attention_heads=4, num_key_value_heads=2, vocab_size=384, intermediate_size=80, num_hidden_layers=2,
    max_position_embeddings=256,
)  # fmt: skip
EXPERTS = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[], decoder_sparse_step=1
)


@pytest.mark.parametrize(
    ("world", "parallelism", "changes", "words"),
    [
        (4, dict(tensor_parallel_degree=4), {}, ["tensor_parallel_degree = 4", "num_key_value_heads = 2", "[1, 2]"]),
        (3, dict(tensor_parallel_degree=3), dict(num_attention_heads=6), ["num_key_value_heads = 2"]),
        (2, dict(tensor_parallel_degree=2), dict(vocab_size=385), ["vocab_size = 385"]),
        (2, dict(tensor_parallel_degree=2), dict(intermediate_size=81), ["intermediate_size = 81"]),
        (6, dict(tensor_parallel_degree=2, data_parallel_shard_degree=2), {}, ["shard 2", "6 processes"]),
        (4, dict(data_parallel_replicate_degree=3), {}, ["replicate 3", "4 processes"]),
        (2, dict(tensor_parallel_degree=2), EXPERTS | dict(num_experts_per_tok=3), ["num_experts_per_tok"]),
        (2, dict(expert_parallel_degree=2), {}, ["expert_parallel_degree = 2", "no experts"]),
        (3, dict(expert_parallel_degree=3), EXPERTS, ["expert_parallel_degree = 3", "num_experts = 8"]),
        (4, dict(expert_parallel_degree=8), EXPERTS, ["expert_parallel_degree = 8"]),
    ],
)
def test_degrees_that_do_not_divide_are_refused(world, parallelism, changes, words):
    config = make_config(model=dict(path="x"), data=dict(path="y"), parallelism=parallelism)
    model = types.SimpleNamespace(**SIZES | changes)
    with pytest.raises(ValueError, match=r".") as error:
        common.check_parallelism(config, model, world, "native")
    for word in words:
        assert word in str(error.value)


def test_sequences_and_batches_that_do_not_divide_are_refused():
    model = types.SimpleNamespace(**SIZES)
    for training, words in (
        (dict(seq_len=512), "max_position_embeddings = 256"),
        (dict(global_batch_size=6, local_batch_size=4), "global_batch_size = 6"),
    ):
        config = make_config(model=dict(path="x"), data=dict(path="y"), training=training)
        with pytest.raises(ValueError, match=words):
            common.check_parallelism(config, model, 1, "native")


def test_every_rank_refuses_with_the_same_message(train, models):
    with pytest.raises(JobError) as error:
        train("native", models["D0"], 4, parallelism=dict(tensor_parallel_degree=4))
    assert len(error.value.messages) == 4
    assert len(set(error.value.messages.values())) == 1
    assert "num_key_value_heads = 2" in error.value.messages[0]


@pytest.mark.parametrize(
    ("path", "model", "sections", "words"),
    [
        ("hf", "M0", dict(parallelism=dict(expert_parallel_degree=2)), "expert_parallel_degree = 2"),
        (
            "hf",
            "D0",
            dict(parallelism=dict(tensor_parallel_degree=2, enable_sequence_parallel=False)),
            "enable_sequence_parallel",
        ),
        ("nki_moe", "D0", {}, "dense model"),
        ("nki_moe", "M0", {}, "hidden = 48"),
        ("nki_moe", "M128", dict(nki=dict(block_tokens=100)), "block_tokens = 100"),
        ("nki_moe", "M128", dict(nki=dict(kernels="nki")), "nki"),
        ("nki_moe", "M128", dict(parallelism=dict(expert_parallel_degree=2)), "expert_parallel_degree = 2"),
        ("nki_moe", "M128", dict(compile=dict(enable=True)), "inductor"),
        ("native", "M0", dict(compile=dict(enable=True)), "bfloat16"),
    ],
)
def test_what_a_path_cannot_do_is_refused(train, models, path, model, sections, words):
    with pytest.raises(JobError) as error:
        train(path, models[model], 2, **sections)
    assert all(words in message for message in error.value.messages.values())


@pytest.mark.parametrize(
    ("path", "model", "sections", "words"),
    [
        ("native", "M0", dict(nki=dict(block_tokens=128)), "[nki]"),
        ("native", "D0", dict(moe=dict(router_aux_loss_coef=0.1)), "router_aux_loss_coef"),
        ("hf", "D0", dict(compile=dict(backend="neuron")), "[compile] backend"),
    ],
)
def test_a_key_without_effect_is_logged(train, models, path, model, sections, words):
    run = train(path, models[model], 1, training=dict(steps=0), export=dict(enable=False), **sections)
    assert any(line.startswith("no effect") and words in line for line in run.log.splitlines())
