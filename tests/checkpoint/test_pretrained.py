"""Checkpoints that runs start from: Hugging Face's, converted ones, and exports."""

import json
import re
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from command_lines import run_module
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from tiny_checkpoints import build, write
from tiny_runs import get_config, numbers, write_policy

from jaxrlhf import models
from jaxrlhf.checkpoint import load_pretrained
from jaxrlhf.checkpoint.pretrained import convert, export_converted
from jaxrlhf.config import Evaluation, Pretrained, Refusal
from jaxrlhf.trainer.policy import export_policy
from jaxrlhf.trainer.run import run


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write a bfloat16 checkpoint with further files, some unknown to the package."""
    directory = write(tmp_path_factory.mktemp("source"), build("qwen2").to(torch.bfloat16))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return directory


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted") / "model"
    run_module("convert", source, directory)
    return directory


@pytest.fixture(
    scope="module", params=["1GB", pytest.param("20KB", marks=pytest.mark.seeds)], ids=["one-file", "several"]
)
def mixed(request, tmp_path_factory):
    """Write a bfloat16 model with float32 biases of queries, and another dtype in one layer only."""
    model = build("qwen2").to(torch.bfloat16)
    layers = model.model.layers
    for layer in layers:
        layer.self_attn.q_proj.bias.data = 1 + 0.01 * torch.randn(layer.self_attn.q_proj.bias.shape)
    layers[1].input_layernorm.weight.data = 1 + 0.01 * torch.randn(32)
    layers[0].self_attn.o_proj.weight.data = layers[0].self_attn.o_proj.weight.data.to(torch.float16)
    directory = write(tmp_path_factory.mktemp("mixed"), model, max_shard_size=request.param)
    assert (directory / "model.safetensors").is_file() == (request.param == "1GB")
    return directory


def tensors(directory):
    """Return the digests of all files, by name."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_tensors(ours, theirs):
    ours, theirs = tensors(ours), tensors(theirs)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].tobytes()) == (tensor.dtype, tensor.tobytes()), name


def split_over_all(config, head):
    """Shard the longest evenly divisible dimension of each parameter over eight devices."""
    mesh = Mesh(np.array(jax.devices()), ("all",))

    def place(shape):
        even = [place for place, size in enumerate(shape.shape) if size % 8 == 0]
        return NamedSharding(mesh, PartitionSpec(*[None] * even[-1], "all") if even else PartitionSpec())

    return jax.tree.map(place, models.param_shapes(config, head))


def same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, yours in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == yours.dtype
        np.testing.assert_array_equal(mine, yours)


def test_conversion_round_trip(source, converted, tmp_path, capsys):
    run_module("export", converted, tmp_path / "back")
    assert "GB" in capsys.readouterr().out
    names = {file.name for file in source.iterdir()}
    assert names == {file.name for file in (tmp_path / "back").iterdir()} >= {"chat_template.jinja", "tokenizer.json"}
    for name in names - {"config.json"}:
        assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes(), name
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())


def test_labels_of_tokens_are_not_converted(refused, tmp_path):
    """A conversion would store one row instead of two, and no biases."""
    source = write(tmp_path / "labels", build("qwen2", "ForTokenClassification"))
    with refused():
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_in_another_dtype(source, converted, tmp_path):
    run_module("export", converted, tmp_path / "back", "--dtype", "float32")
    before, after = (load_file(place / "model.safetensors") for place in (source, tmp_path / "back"))
    assert {tensor.dtype for tensor in after.values()} == {np.dtype(np.float32)}
    assert all(np.array_equal(tensor.astype(np.float32), after[name]) for name, tensor in before.items())
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
def test_each_tensor_keeps_its_dtype(mixed, tmp_path):
    """Conversions in memory and through orbax give files with equal bytes."""
    assert {str(tensor.dtype) for tensor in tensors(mixed).values()} == {"bfloat16", "float32", "float16"}
    config = models.read_config(mixed)
    models.save_params(models.load_params(mixed, config, "lm"), config, tmp_path / "saved", source=mixed)
    run_module("convert", mixed, tmp_path / "converted")
    run_module("export", tmp_path / "converted", tmp_path / "back")
    for place in ("saved", "back"):
        same_tensors(tmp_path / place, mixed)
        assert json.loads((tmp_path / place / "config.json").read_text())["dtype"] == "bfloat16"
        if (mixed / "model.safetensors").is_file():
            for name in ("model.safetensors", "config.json"):
                ours, theirs = (directory / name for directory in (tmp_path / place, mixed))
                assert ours.read_bytes() == theirs.read_bytes()


def test_converted_dtype_is_kept_and_directories_may_be_relative(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_module("convert", source, "models/converted", "--dtype", "float32")
    run_module("export", "models/converted", "back")
    back = tensors(tmp_path / "back")
    assert {str(tensor.dtype) for tensor in back.values()} == {"float32"}
    assert all(np.array_equal(tensor.astype(np.float32), back[name]) for name, tensor in tensors(source).items())


def test_converted_checkpoint_without_dtypes(converted, tmp_path):
    shutil.copytree(converted, tmp_path / "converted")
    (tmp_path / "converted/weights/dtypes.json").unlink()
    with pytest.raises(ValueError, match=r"dtypes\.json cannot be read .*no such file.*; convert the checkpoint again"):
        export_converted(tmp_path / "converted", tmp_path / "back")
    assert not list((tmp_path / "back").glob("*"))


@pytest.mark.parametrize("damaged", ["an array", "dtypes.json"])
def test_damage_of_a_converted_checkpoint_is_noticed(converted, tmp_path, damaged):
    copy = shutil.copytree(converted, tmp_path / "converted")
    files = [file for file in (copy / "weights").rglob("*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size) if damaged == "an array" else copy / "weights" / damaged
    content = file.read_bytes()
    place = content.index(b"bfloat16") if damaged == "dtypes.json" else len(content) // 2
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    config = models.read_config(copy)
    words = rf"{re.escape(str(file))} has a wrong checksum.*; convert the checkpoint again"
    with pytest.raises(Refusal, match=words):
        load_pretrained(copy, config, "lm", split_over_all(config, "lm"))
    with pytest.raises(Refusal, match=words):
        export_converted(copy, tmp_path / "back")
    assert not list((tmp_path / "back").glob("*"))
    file.write_bytes(content)
    (copy / "weights" / "checksums.json").unlink()  # as an earlier version wrote it
    export_converted(copy, tmp_path / "back")
    export_converted(converted, tmp_path / "whole")
    same_tensors(tmp_path / "back", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("head", ["lm", "value"])
def test_both_formats_load_equal_parameters(source, converted, head, monkeypatch):
    config = models.read_config(converted)
    assert config == models.read_config(source)
    layout, made, make = split_over_all(config, head), [], jax.make_array_from_callback
    with monkeypatch.context() as patched:
        patched.setattr(jax, "make_array_from_callback", lambda shape, *how: made.append(shape) or make(shape, *how))
        ours = load_pretrained(converted, config, head, layout)
    theirs = load_pretrained(source, config, head, layout)
    same(ours, theirs)
    assert made == ([] if head == "lm" else [theirs["head"].shape]), "zeros take room only where nothing is saved"
    assert jax.tree.map(lambda leaf: leaf.sharding, ours) == layout
    same(
        load_pretrained(converted, config, head, layout, dtype=jnp.bfloat16)["layers"],
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), theirs["layers"]),
    )


@pytest.mark.seeds
@pytest.mark.usefixtures("programs", "undrawn")
def test_run_from_a_converted_checkpoint_is_equal(tmp_path):
    """Actor, reference, critic and tokenizer come from the converted checkpoint."""
    about = write_policy(tmp_path / "source") / "tokenizer_config.json"
    about.write_text(about.read_text() + "\n")  # no longer as transformers would write it
    run_module("convert", tmp_path / "source", tmp_path / "converted")
    for place in ("source", "converted"):
        config = replace(
            get_config(),
            model=Pretrained(str(tmp_path / place)),
            cold_start=None,
            steps=1,
            evaluation=Evaluation(every_steps=0, problems=1),
            workdir=str(tmp_path / "runs" / place),
        )
        assert run(config).finished
    ours, theirs = (numbers(tmp_path / "runs" / place / "metrics.jsonl") for place in ("converted", "source"))
    assert len(ours) == 1 and ours[0]["actor/grad_norm"] > 0 and ours == theirs
    export_policy(tmp_path / "runs/converted", tmp_path / "exported")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
