"""Hugging Face folder in, Hugging Face folder out: strict, bit for bit, the same on every path and mesh."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import common
import dataset

import pytest
import torch
from conftest import (
    CASES,
    M0,
    M128,
    MOE_CASES,
    ONE_PER_PATH,
    SMALL_CASES,
    TOKENIZER,
    hf_oracle,
    make_config,
    make_model,
    read_tensors,
    refused,
    relative_error,
    rewrite_weights,
    run_main,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

MESHES = [(1, {}), (2, {}), (2, dict(tensor_parallel_degree=2)), (4, dict(tensor_parallel_degree=2))]
NO_STEPS = dict(training=dict(steps=0), export=dict(dtype="source"))


def meshes(path: str, name: str):
    """MESHES, and for the native MoE torchtitan's expert parallelism too."""
    own = [(2, dict(expert_parallel_degree=2)), (4, dict(tensor_parallel_degree=2, expert_parallel_degree=2))]
    return MESHES + (own if path == "native" and name.startswith("M") else [])


def reshape_files(source: Path, out: Path, files: int | None, dtype: torch.dtype = torch.float32) -> Path:
    """A copy of a one-file folder with its tensors in `files` files and an index; None: one file, no index."""
    shutil.copytree(source, out)
    tensors = {n: w.to(dtype) for n, w in load_file(out / "model.safetensors").items()}
    (out / "model.safetensors").unlink()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")
    names = ["model.safetensors"]
    if files and files > 1:
        names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    weight_map = {name: names[i % len(names)] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({n: tensors[n] for n, f in weight_map.items() if f == file}, out / file, metadata={"format": "pt"})
    if files:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def assert_same_tensors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, w in want.items():
        assert got[name].dtype == w.dtype, name
        assert torch.equal(got[name], w), name


# ----- in, and out again (FR-02) -----


@pytest.mark.parametrize(
    ("dtype", "name"),
    [*((torch.float32, name) for name in ("D0t", "M0", "M128")), (torch.bfloat16, "M0")],
)
def test_without_a_step_the_export_is_the_input_on_every_path_and_mesh(train, models, tmp_path, name, dtype):
    source = reshape_files(models[name], tmp_path / "in", 5, dtype)
    first = None
    for path in [p for p, n in CASES if n == name]:
        for world, parallelism in meshes(path, name) if dtype == torch.float32 else MESHES[1:2]:
            run = train(path, source, world, parallelism=parallelism, **NO_STEPS)
            out = run.folder / "export"
            assert not [f for f in run.folder.iterdir() if f.name.endswith((".tmp", ".old"))]
            exported = folder_bytes(out)
            first = first or exported
            assert exported == first, (path, world, parallelism)
    assert_same_tensors(read_tensors(out), read_tensors(source))
    for file in source.iterdir():
        if "safetensors" not in file.name:
            assert exported[file.name] == file.read_bytes(), file.name
    assert set(exported) == {f.name for f in source.iterdir() if "safetensors" not in f.name} | {"model.safetensors"}


@pytest.mark.parametrize("files", [None, 1, 5])
@pytest.mark.parametrize(("path", "name"), SMALL_CASES)
def test_every_file_layout_is_read(train, models, tmp_path, path, name, files):
    source = reshape_files(models[name], tmp_path / "in", files)
    run = train(path, source, 2, **NO_STEPS)
    assert_same_tensors(run.tensors(), read_tensors(source))
    assert f"{len(run.tensors())} tensors from {source}" in run.log


@pytest.mark.parametrize(("path", "name"), ONE_PER_PATH)
def test_trained_export_loads_in_transformers_and_computes_what_the_trainer_did(train, models, texts, path, name):
    """The validation loss of the run's end is that of the exported folder in vanilla Transformers."""
    validation = dict(path=str(texts), steps=2)
    sections = dict(training=dict(steps=2), optimizer=dict(lr=0.1), validation=validation)
    sections |= dict(data=dict(document_mask=False), parallelism=dict(tensor_parallel_degree=2))
    run = train(path, models[name], 2, **sections)
    out = run.folder / "export"
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, attn_implementation="sdpa")
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "for i in range(3):\n    print('é')  # <|im_start|>"
    assert tokenizer.encode(text) == TOKENIZER().encode(text)
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (models[name] / file).read_bytes()
    assert json.loads((out / "config.json").read_text()) == json.loads((models[name] / "config.json").read_text())
    config = make_config(model=dict(path="x"), **sections_of(sections, texts))
    steps = common.validation_steps(config, dataset.tokenize(config, "validation", tokenizer, 384), 0, 1)
    total = counted = 0
    for batches, count in steps:
        for batch in batches:
            logits = model(input_ids=batch.input_ids.long()).logits
            labels = batch.labels.long().flatten()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum").item()
        counted += count
    assert run.validation == [pytest.approx(total / counted, rel=1e-5)]


@pytest.mark.parametrize(
    ("path", "other", "name"), [("native", "hf", "M0"), ("hf", "native", "D0t"), ("nki_moe", "hf", "M128")]
)
def test_the_export_of_one_path_starts_another(train, models, path, other, name):
    """Step 2 after step 1 and an export in fp32 is step 2 of the same run, on either path."""
    two = train(path, models[name], 2, training=dict(steps=2))
    one = train(path, models[name], 2, training=dict(steps=1))
    data_of_step_2 = functools.partial(skipping, 1)
    for next_path in (path, other):
        again = train(next_path, one.folder / "export", 2, data_of_step_2, training=dict(steps=1))
        assert again.losses == pytest.approx(two.losses[1:], rel=1e-5)
        for tensor, w in two.tensors().items():
            assert relative_error(again.tensors()[tensor], w) < 1e-5, tensor


@contextlib.contextmanager
def skipping(steps: int):
    """In a worker: training starts that many steps into the data."""
    next_step, skipped = common.PackedData.next_step, []

    def later(self):
        while len(skipped) < steps:
            skipped.append(next_step(self))
        return next_step(self)

    with mock.patch.object(common.PackedData, "next_step", later):
        yield


def sections_of(sections: dict, texts: Path) -> dict:
    """Sections of a run, for make_config outside of `train`."""
    return sections | dict(data=sections.get("data", {}) | dict(path=str(texts)))


def test_several_export_files_have_an_index_that_names_every_tensor(workers, models, tmp_path):
    """Files are written by different ranks; no tensor is lost, none is written twice."""
    for world in (1, 2):
        out = tmp_path / f"export{world}"
        workers.run(world, export_in_small_files, models["M0"], tmp_path / f"run{world}", out)
    assert folder_bytes(tmp_path / "export1") == folder_bytes(tmp_path / "export2")
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    held = {file.name: set(load_file(file)) for file in out.glob("*.safetensors")}
    assert len(held) > 4
    assert sorted(weight_map) == sorted(n for names in held.values() for n in names)
    assert all(name in held[file] for name, file in weight_map.items())
    assert_same_tensors(read_tensors(out), read_tensors(models["M0"]))
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())


def export_in_small_files(source: Path, run: Path, out: Path) -> None:
    """In a worker: train_native with no step, exporting files of at most 50 kB."""
    import functools
    from unittest import mock

    small = functools.partial(common.export_hf_folder, max_file_bytes=50_000)
    config = make_config(**NO_STEPS, model=dict(path=str(source)), data=dict(path=__file__.replace(".py", ".txt")))
    config.job.dump_folder, config.data.path = str(run), str(run / "text.txt")
    run.mkdir(exist_ok=True)
    (run / "text.txt").write_text("x = 1\n" * 500)
    with mock.patch.object(common, "export_hf_folder", small):
        run_main("native", config)
    if os.environ["RANK"] == "0":
        shutil.move(run / "native" / "export", out)


@pytest.mark.parametrize(("path", "name"), [("native", "D0t"), ("hf", "M0"), ("nki_moe", "M128")])
def test_random_start_is_the_same_on_every_path_and_mesh(train, models, tmp_path, path, name):
    """No weights needed in the folder, and its config.json alone decides: here it has one layer more than the files."""
    source = tmp_path / "in"
    shutil.copytree(models[name], source)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (source / "config.json").write_text(json.dumps(config))
    runs = [("native", 1, {}), (path, 2, {}), (path, 2, dict(tensor_parallel_degree=2))]
    sections = dict(training=dict(steps=0), debug=dict(seed=3))
    exports = [
        train(p, source, world, parallelism=parallelism, model=dict(init="random"), **sections).tensors()
        for p, world, parallelism in runs
    ]
    for other in exports[1:]:
        assert_same_tensors(other, exports[0])
    matrices = [w for w in exports[0].values() if w.ndim == 2]
    assert all(w.eq(1).all() for w in exports[0].values() if w.ndim == 1)
    assert len({w.flatten()[:8].sum().item() for w in matrices}) == len(matrices)  # no tensor repeats another
    assert all(abs(w.std().item() / config["initializer_range"] - 1) < 0.1 for w in matrices)
    other_seed = train(
        "native", source, model=dict(init="random"), training=dict(steps=0), debug=dict(seed=4)
    ).tensors()
    assert not any(torch.equal(other_seed[n], w) for n, w in exports[0].items() if w.ndim == 2)


def drawn(names: list[str], seed: int, box: tuple[slice, ...] | None = None, shape=(5, 7)) -> list[torch.Tensor]:
    """The random tensors of these Hugging Face names, without a model; `box` is the part that is asked for."""
    found = {}

    def fill(_model, _pieces, read):
        found.update({n: read(n, box or tuple(slice(0, size) for size in shape)) for n in names})

    with mock.patch.multiple(
        common, fill_weights=fill, wanted_tensors=lambda *_: dict.fromkeys(names, shape), log=lambda _: None
    ):
        common.random_weights(None, None, SimpleNamespace(initializer_range=0.02), seed)
    return list(found.values())


def test_no_two_seeds_and_no_two_names_give_equal_values():
    """94 layers x 128 experts x 3 (Qwen3-235B-A22B); names that differ far in front; seeds that agree in their low or
    high bits (a CPU generator of PyTorch keeps 32 bits of its seed)."""
    kinds = [f"mlp.experts.{e}.{k}_proj" for e in range(128) for k in ("gate", "up", "down")] + ["self_attn.q_proj"]
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(94) for kind in kinds]
    names += [f"{front}{'x' * 100}" for front in ("a", "b", "ab")]
    first = torch.stack(drawn(names, 0, shape=(1, 3)))
    assert len(first.view(-1, 3).unique(dim=0)) == len(names)
    seeds = [0, 1, 2, 3, 2**31, 2**32, 2**32 + 1, 2**63]
    values = torch.stack([drawn(["lm_head.weight"], seed)[0].flatten() for seed in seeds])
    assert len(values.flatten().unique()) == values.numel()


def test_a_box_of_a_random_tensor_is_the_same_as_in_the_whole():
    (whole,) = drawn(["w"], 3, shape=(300, 401))
    assert whole.dtype == torch.float32
    assert whole.mean().abs() < 0.02 * 4 / whole.numel() ** 0.5
    assert whole.std() == pytest.approx(0.02, rel=0.02)
    assert whole[1:].corrcoef().triu(1).abs().max() < 0.3  # no row repeats another
    box = (slice(17, 105), slice(3, 50))
    assert torch.equal(drawn(["w"], 3, box, (300, 401))[0], whole[box])


def test_tied_configuration_with_a_head_in_the_files(models: dict[str, Path], tmp_path: Path, train):
    """Equal to the embedding: tied. Different: refused, with both ways out; each of them works."""
    source = tmp_path / "tied"
    shutil.copytree(models["D0t"], source)
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, source / "model.safetensors", {"format": "pt"})
    expected = train("native", models["D0t"])
    assert train("native", source).losses == expected.losses
    other = embedding.clone()
    other[-1, -1] += 1e-3
    save_file(tensors | {"lm_head.weight": other}, source / "model.safetensors", {"format": "pt"})
    for path in ("native", "hf"):
        message = refused(
            lambda path=path: train(path, source), "tie_word_embeddings = true, but lm_head.weight of the files differs"
        )
        assert "Set it to false" in message
        assert "or remove lm_head.weight" in message
    text = (source / "config.json").read_text()
    (source / "config.json").write_text(text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    exported = train("native", source, training=dict(steps=0)).tensors()
    assert torch.equal(exported["lm_head.weight"], other)


# ----- experts (FR-05, FR-23) -----


def tag(name: str, w: torch.Tensor) -> torch.Tensor:
    """Every value of an expert says which layer, expert and matrix it belongs to."""
    parts = name.split(".")
    if ".experts." not in name:
        return w
    number = int(parts[2]) * 1000 + int(parts[5]) * 10 + {"gate_proj": 1, "up_proj": 2, "down_proj": 3}[parts[6]]
    return number + 0.01 * torch.randn(w.shape)


def assert_tagged(tensors: dict[str, torch.Tensor]) -> None:
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == 2 * 8 * 3
    for name in experts:
        assert (tensors[name] - tag(name, torch.zeros_like(tensors[name]))).abs().max() < 0.2, name


@pytest.fixture(scope="module")
def tagged(tmp_path_factory) -> dict[str, dict[str, Path]]:
    """{model: {layout of the files: folder}}"""
    folders = {}
    for name, sizes in (("M0", M0), ("M128", M128)):
        root = tmp_path_factory.mktemp("tagged")
        folder = make_model(root / "per_expert", **sizes)
        rewrite_weights(folder, tag)
        fused = shutil.copytree(folder, root / "fused")
        tensors = load_file(folder / "model.safetensors")
        out = {n: w for n, w in tensors.items() if ".experts." not in n}
        for layer in range(2):
            one = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors[f"{one}.{e}.{kind}_proj.weight"] for e in range(8)])
                for kind in ("gate", "up", "down")
            )
            out |= {f"{one}.gate_up_proj": torch.cat([gate, up], dim=1), f"{one}.down_proj": down}
        save_file(out, fused / "model.safetensors", metadata={"format": "pt"})
        folders[name] = {"per_expert": folder, "fused": fused}
    return folders


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize(("path", "name"), MOE_CASES)
def test_tagged_experts_stay_in_place_on_every_mesh(train, tagged, path, name, layout):
    want = read_tensors(tagged[name]["per_expert"])
    for world, parallelism in meshes(path, name) if layout == "per_expert" else MESHES[1:3]:
        run = train(path, tagged[name][layout], world, parallelism=parallelism, **NO_STEPS)
        assert_tagged(run.tensors())
        assert_same_tensors(run.tensors(), want)


@pytest.mark.parametrize(("path", "name"), MOE_CASES)
def test_fused_and_per_expert_files_give_the_oracles_first_loss(train, models, tmp_path, path, name):
    """The oracle reads both layouts itself (Transformers writes either)."""
    fused = tmp_path / "fused"
    model = hf_oracle(models[name])
    model.save_pretrained(fused, save_original_format=False)
    assert any(n.endswith("experts.gate_up_proj") for n in load_file(fused / "model.safetensors"))
    AutoTokenizer.from_pretrained(models[name]).save_pretrained(fused)
    a, b = (train(path, folder, 2) for folder in (models[name], fused))
    assert a.losses == b.losses
    assert_same_tensors(a.tensors(), b.tensors())


@pytest.mark.parametrize(("path", "name"), MOE_CASES)
def test_tagged_experts_survive_a_checkpoint_in_another_layout(train, tagged, tmp_path, path, name):
    """SGD with lr so small that no tag moves: step 1 on one mesh, step 2 on another, export."""
    sections = dict(checkpoint=dict(enable=True), optimizer=dict(lr=1e-9), training=dict(steps=1))
    tp2 = dict(tensor_parallel_degree=2)
    first, second = [(2, {}), (2, tp2)], [(4, tp2), (1, {})]
    if path == "native":  # with its own expert parallelism
        second[0], first[1] = (4, tp2 | dict(expert_parallel_degree=4)), (2, dict(expert_parallel_degree=2))
    for i, (world, parallelism) in enumerate(first):
        folder = tmp_path / f"first{i}"
        saved = train(path, tagged[name]["per_expert"], world, folder=folder, parallelism=parallelism, **sections)
        assert_tagged(saved.tensors())
        world2, parallelism2 = second[i]
        copy = shutil.copytree(folder, tmp_path / f"second{i}")
        again = train(path, tagged[name]["per_expert"], world2, folder=copy, parallelism=parallelism2, **sections)
        assert "resumed from" in again.log
        assert_same_tensors(again.tensors(), saved.tensors())


def test_more_ranks_than_experts_cuts_another_dim(train, tmp_path):
    """FSDP over 4 ranks of a model with 3 experts, and of one with 4: every tag once, in place (FR-23)."""
    for experts in (3, 4):
        folder = make_model(tmp_path / f"in{experts}", num_experts=experts)
        for path in ("native", "hf"):
            run = train(path, folder, 4, **NO_STEPS)
            assert_same_tensors(run.tensors(), read_tensors(folder))
    folder = make_model(tmp_path / "in3x128", **M128 | dict(num_experts=3))
    assert_same_tensors(train("nki_moe", folder, 4, **NO_STEPS).tensors(), read_tensors(folder))


# ----- folders that must be refused (FR-06, real inputs 1 to 3) -----


def without(folder: Path, out: Path, drop) -> Path:
    """A copy of a one-file folder without the tensors whose name `drop` accepts."""
    shutil.copytree(folder, out)
    tensors = {n: w for n, w in load_file(out / "model.safetensors").items() if not drop(n)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


MISSING = {
    "router gate": ("model.layers.1.mlp.gate.weight", "1 tensors missing"),
    "all down": ("model.layers.1.mlp.experts.*.down_proj.weight", "8 tensors missing"),
    "one expert": ("model.layers.0.mlp.experts.5.*", "3 tensors missing"),
    "k_norm": ("model.layers.0.self_attn.k_norm.weight", "1 tensors missing"),
    "final norm": ("model.norm.weight", "1 tensors missing"),
    "untied head": ("lm_head.weight", "1 tensors missing"),
}


@pytest.mark.parametrize("what", MISSING)
@pytest.mark.parametrize(("path", "name"), MOE_CASES)
def test_a_missing_tensor_stops_all_ranks_and_is_named(train, models, tmp_path, path, name, what):
    import fnmatch

    pattern, count = MISSING[what]
    folder = without(models[name], tmp_path / "in", lambda n: fnmatch.fnmatch(n, pattern))
    refused(lambda: train(path, folder, 2), str(folder), count, pattern.split("*")[0], world=2)


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize(("path", "name"), SMALL_CASES)
def test_tensors_that_nothing_reads_are_refused_by_name(train, models, tmp_path, path, name, index):
    """A third layer in the files, two in config.json; also when the index does not list it."""
    folder = tmp_path / "in"
    shutil.copytree(models[name], folder)
    tensors = load_file(folder / "model.safetensors")
    if index:
        weight_map = dict.fromkeys(tensors, "model.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    extra = "model.layers.2.input_layernorm.weight"
    save_file(tensors | {extra: torch.ones(48)}, folder / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: train(path, folder, 2), str(folder), extra, world=2)


def test_a_tensor_of_the_wrong_shape_or_type_is_named(train, models, tmp_path):
    name = "model.layers.1.self_attn.q_proj.weight"
    for label, change, words in (
        ("transposed", lambda w: w.T.contiguous(), ("(48, 64)", "(64, 48)")),
        ("f8", lambda w: w.to(torch.float8_e4m3fn), ("F8_E4M3",)),
    ):
        folder = tmp_path / label
        shutil.copytree(models["D0"], folder)
        rewrite_weights(folder, lambda n, w, change=change: change(w) if n == name else w)
        for path in ("native", "hf"):
            refused(lambda path=path, folder=folder: train(path, folder, 2), name, *words, world=2)


def damage(kind: str, file: Path) -> None:
    data = file.read_bytes()
    if kind == "missing":
        file.unlink()
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "half":
        file.write_bytes(data[: len(data) // 2])
    elif kind == "pointer":
        oid = "4665e1f1a5b1a9f9" * 4
        file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 3945441440\n")
    elif kind == "lacks":
        tensors = load_file(file)
        tensors.pop(sorted(tensors)[0])
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "words"),
    {
        "missing": ("not there",),
        "empty": ("incomplete download",),
        "half": ("incomplete download",),
        "pointer": ("Git LFS pointer", "git lfs pull"),
        "lacks": ("does not hold it",),
    }.items(),
)
def test_a_damaged_shard_is_named_with_its_folder(train, models, tmp_path, kind, words):
    for path, name in (("native", "D0"), ("hf", "D0"), ("nki_moe", "M128")):
        folder = reshape_files(models[name], tmp_path / f"{path} in", 5)
        file = "model-00003-of-00005.safetensors"
        damage(kind, folder / file)
        refused(lambda path=path, folder=folder: train(path, folder, 2), str(folder), file, *words, world=2)


def test_one_file_that_is_a_pointer_is_named(train, models, tmp_path):
    folder = shutil.copytree(models["D0"], tmp_path / "in")
    damage("pointer", folder / "model.safetensors")
    refused(lambda: train("native", folder), "model.safetensors", "Git LFS pointer")


def test_a_broken_index_or_config_is_named(train, models, tmp_path):
    for label, file, text, words in (
        ("index", "model.safetensors.index.json", '{"metadata": {}}', ("not a valid index",)),
        ("config", "config.json", '{"model_type": "qwen3"', ("config.json", "not valid JSON")),
        ("architecture", "config.json", '{"model_type": "qwen3_5"}', ("qwen3_5", "allowed", "qwen3_moe")),
    ):
        folder = shutil.copytree(models["D0"], tmp_path / label)
        (folder / file).write_text(text)
        refused(lambda folder=folder: train("native", folder, 2), *words, world=2)


def test_extra_files_are_ignored_and_no_pickle_is_opened(train, models, tmp_path):
    folder = shutil.copytree(models["D0"], tmp_path / "in")
    bomb = b"cposix\nsystem\n(S'touch " + str(tmp_path / "opened").encode() + b"'\ntR."
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "original/consolidated.00.pth"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bomb)
    for name in ("onnx/model.onnx", "model-q4.gguf", "README.md", ".cache/huggingface/x", "consolidated.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(b"not a model")
    for path in ("native", "hf"):
        clean, extra = (train(path, f, **NO_STEPS).folder / "export" for f in (models["D0"], folder))
        assert folder_bytes(clean) == folder_bytes(extra)
    assert not (tmp_path / "opened").exists()
    (folder / "model.safetensors").unlink()
    for path in ("native", "hf"):
        refused(
            lambda path=path: train(path, folder, 2), str(folder), "safetensors", ".bin", "save_pretrained", world=2
        )
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("keys", [("torch_dtype",), ("dtype",), ("dtype", "torch_dtype"), ()])
def test_an_export_in_another_dtype_names_it_under_the_keys_of_the_source(train, models, tmp_path, keys):
    """Servers read the key that they know (FN-16)."""
    source = shutil.copytree(models["D0"], tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    plain = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}
    (source / "config.json").write_text(json.dumps(plain | dict.fromkeys(keys, "float32")))
    run = train("native", source, training=dict(steps=0), export=dict(dtype="bfloat16"))
    exported = json.loads((run.folder / "export" / "config.json").read_text())
    assert exported == plain | dict.fromkeys(keys or ["dtype"], "bfloat16")


@pytest.mark.parametrize("name", ["D0", "D0t"])
def test_an_embedding_model_is_called_by_its_name(train, models, tmp_path, name):
    """Qwen3-Embedding says Qwen3ForCausalLM, but has neither the prefix nor a head (FN-17)."""
    source = shutil.copytree(models[name], tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    bare = {n.removeprefix("model."): w for n, w in tensors.items() if n != "lm_head.weight"}
    save_file(bare, source / "model.safetensors", {"format": "pt"})
    for path in ("native", "hf"):
        refused(lambda path=path: train(path, source), "named as in Qwen3-Embedding", "language model of that size")


@pytest.mark.skipif(os.getuid() != 0, reason="another user's cache needs root to make")
def test_a_cache_of_another_user_is_read(models, tmp_path):
    """FN-14: every file is there, nothing can be written."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("a" * 40)
    shutil.copytree(models["D0"], snapshot)
    (cache / "models--Qwen--Qwen3-0.6B" / "refs").mkdir()
    (cache / "models--Qwen--Qwen3-0.6B" / "refs" / "main").write_text("a" * 40)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)
    # What is imported late is imported first: that user may not read this Python.
    code = "import os, common, filelock; from huggingface_hub import constants, snapshot_download; os.setuid(65534); "
    code += "print(common.fetch_model('Qwen/Qwen3-0.6B'))"
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "HOME": "/nonexistent"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=common.REPO, env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == str(snapshot), run.stderr


def test_a_hub_id_offline_says_both_ways_out(train, monkeypatch):
    message = refused(lambda: train("native", "Qwen/Qwen3-0.6B", model=dict(path="Qwen/Qwen3-no-such")), "no-such")
    assert "connect" in message
    assert "--model.path" in message
    refused(lambda: train("hf", "", model=dict(path="no/such/folder")), "no/such/folder", "neither a folder")
    refused(lambda: train("hf", "", model=dict(path=__file__)), "neither a folder")


# ----- paths (real input 9) -----


@pytest.mark.parametrize("name", ["with spaces", "sub [1]", "a*b", "x#y", "100%20", "déjà vu", "it's {x} $5"])
def test_odd_folder_names(train, models, tmp_path, texts, name):
    """Model, data and output all live in a folder of this name; nothing lands elsewhere."""
    root = tmp_path / name
    root.mkdir()
    model = shutil.copytree(models["D0"], root / "model")
    data = shutil.copy(texts, root / "rows.jsonl")
    sections = dict(data=dict(path=str(data)), validation=dict(path=str(data), steps=1), checkpoint=dict(enable=True))
    run = train("native", model, 2, folder=root / "out", **sections)
    assert sorted(f.name for f in tmp_path.iterdir()) == [name]
    assert sorted(f.name for f in root.iterdir()) == ["model", "out", "rows.jsonl"]
    plain = train("native", models["D0"], 2, data=dict(path=str(texts)))
    assert run.losses == plain.losses
    assert_same_tensors(run.tensors(), plain.tensors())
    hf_oracle(run.folder / "export")
    again = train("native", model, 2, folder=root / "out", **sections)
    assert f"resumed from {run.folder / 'checkpoints' / 'step-1'}" in again.log


def test_data_files_of_odd_names(train, models, tmp_path, texts):
    plain = train("native", models["D0"], data=dict(path=str(texts)))
    for name in ("a::b.jsonl", "$HOME.jsonl", "a*b[1].jsonl"):
        file = shutil.copy(texts, tmp_path / name)
        assert train("native", models["D0"], data=dict(path=str(file))).losses == plain.losses


def test_a_snapshot_of_links_a_trailing_slash_and_a_read_only_folder(train, models, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(models["D0"], blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
        file.chmod(0o444)
    for folder in (blobs, snapshot):
        folder.chmod(0o555)
    before = folder_bytes(blobs)
    for path in ("native", "hf"):
        run = train(path, snapshot, 2, model=dict(path=f"{snapshot}/"), **NO_STEPS)
        out = run.folder / "export"
        assert_same_tensors(read_tensors(out), read_tensors(models["D0"]))
        assert not any(f.is_symlink() for f in out.iterdir())
        assert all(os.stat(f).st_mode & 0o200 for f in out.iterdir())  # the export is the user's own
        os.umask(umask := os.umask(0))
        assert all(os.stat(f).st_mode & 0o777 == 0o666 & ~umask for f in out.iterdir())
    assert folder_bytes(blobs) == before
    for folder in (blobs, snapshot):
        folder.chmod(0o755)


# ----- memory -----


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="anonymous memory is read from /proc")
def test_no_rank_holds_the_model_while_loading(workers, tmp_path):
    """Beside its shard, a rank never holds more than two times the largest piece it reads.

    The model: 40 layers of 0.6 MB and an embedding and a head of 25 MB each.
    """
    sizes = dict(vocab_size=65536, hidden_size=96, intermediate_size=256, num_hidden_layers=40, num_attention_heads=16)
    folder = make_model(tmp_path / "big", **sizes, num_key_value_heads=4)
    total = sum(w.numel() * 4 for w in read_tensors(folder).values())
    largest = max(w.numel() * 4 for w in read_tensors(folder).values())
    for path, tp in (("native", 1), ("hf", 2)):
        for peak in workers.run(2, peak_while_loading, path, folder, tmp_path / "run", tp):
            assert peak < 1.1 * largest, f"{path} tp {tp}: {peak / 1e6:.1f} MB, largest tensor {largest / 1e6:.1f} MB"
            print(f"{path} tp {tp}: {peak / 1e6:.1f} MB beside the shards (model {total / 1e6:.1f} MB)")


def peak_while_loading(path: str, folder: Path, out: Path, tp: int) -> int:
    """In a worker: anonymous bytes at the highest point of load_weights, beyond what was there with all shards."""
    import ctypes
    from unittest import mock

    def anonymous() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    seen = []
    read, load = common.HFFolder.read, common.load_weights

    def sampled(function):
        def call(*arguments):
            value = function(*arguments)
            seen.append(anonymous())
            return value

        return call

    def loading(model, *arguments):
        with torch.no_grad():
            for parameter in model.parameters():  # touch every page: to_empty only reserves them
                common.to_local(parameter).zero_()
        seen.clear()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier jobs freed must not hide what is allocated now
        seen.append(anonymous())
        load(model, *arguments)

    (out).mkdir(exist_ok=True)
    (out / "text.txt").write_text("x = 1\n" * 500)
    config = make_config(
        training=dict(steps=0),
        model=dict(path=str(folder)),
        parallelism=dict(tensor_parallel_degree=tp),
        export=dict(enable=False),
        data=dict(path=str(out / "text.txt")),
    )
    config.job.dump_folder = str(out)
    with (
        mock.patch.object(common.HFFolder, "read", sampled(read)),
        mock.patch.object(common, "to_local", sampled(common.to_local)),  # called when a shard is full
        mock.patch.object(common, "load_weights", loading),
    ):
        run_main(path, config)
    assert len(seen) > 100
    return max(seen) - seen[0]
