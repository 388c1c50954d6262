"""Damaged checkpoints: one line that names the tensor and the file, from headers alone, before anything compiles."""

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file
from tiny_checkpoints import build, write
from tiny_runs import get_config, write_policy

from jaxrlhf import models
from jaxrlhf.config import ModelReward, Pretrained, Refusal, Rewards
from jaxrlhf.data.tokenizer import embedded_tokenizer, load_tokenizer
from jaxrlhf.models.from_config import tokenizer_of
from jaxrlhf.models.huggingface.config import read_stop_tokens
from jaxrlhf.models.huggingface.load import check_params
from jaxrlhf.models.huggingface.save import copy_description
from jaxrlhf.tracking import CompileCounter
from jaxrlhf.trainer.run import run

INDEX = "model.safetensors.index.json"
TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of a checkpoint: their contents by name, and the name of the file that has `TENSOR`."""
    directory = write(tmp_path_factory.mktemp("sharded"), build("qwen2"), max_shard_size="20KB")
    contents = {file.name: file.read_bytes() for file in directory.iterdir()}
    return contents, json.loads(contents[INDEX])["weight_map"][TENSOR]


def edited(change):
    """A damage that changes the tensors of a file."""

    def damage(file):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return damage


def in_dtype(dtype):
    """A damage that stores one tensor in another dtype."""

    def damage(file):
        tensors = {name: torch.from_numpy(tensor) for name, tensor in load_file(file).items()}
        save_torch_file(tensors | {TENSOR: tensors[TENSOR].to(dtype)}, file)

    return damage


def bytes_of(change):
    """A damage that changes the bytes of a file."""
    return lambda file: file.write_bytes(change(file.read_bytes()))


def header(change):
    """A damage that changes what a file says of its tensors."""

    def damage(file):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        fields = json.loads(content[8:end])
        change(fields[TENSOR])
        text = json.dumps(fields).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return damage


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
DAMAGES = {
    "file is missing": (lambda file: file.unlink(), "incomplete"),
    "file is empty": (bytes_of(lambda content: b""), "damaged or incomplete"),
    "file ends in its header": (bytes_of(lambda content: content[:100]), "damaged or incomplete"),
    "file ends in its tensors": (bytes_of(lambda content: content[:-1]), "damaged or incomplete"),
    "file is longer than its tensors": (bytes_of(lambda content: content + b"\0"), "damaged or incomplete"),
    "header has no end": (bytes_of(lambda content: b"\xff" * 8 + content[8:]), "damaged or incomplete"),
    "header is no JSON": (bytes_of(lambda content: content[:8] + b"?" + content[9:]), "damaged or incomplete"),
    "header has another dtype": (header(lambda tensor: tensor.update(dtype="F16")), "damaged or incomplete"),
    "header has other offsets": (header(lambda tensor: tensor.update(data_offsets=[0, 4])), "damaged or incomplete"),
    "file is a pointer to one": (bytes_of(lambda content: POINTER), "damaged or incomplete"),
    "tensor is missing": (edited(lambda tensors: tensors.pop(TENSOR)), f"where {INDEX} lists it"),
    "tensor has another shape": (
        edited(lambda tensors: tensors.update({TENSOR: np.zeros((48, 31), np.float32)})),
        "has shape [48, 31], but config.json and the requested head expect [48, 32]",
    ),
    "tensor is transposed": (
        edited(lambda tensors: tensors.update({TENSOR: np.zeros((32, 48), np.float32)})),
        "has shape [32, 48]",
    ),
    "tensor has more dimensions": (
        edited(lambda tensors: tensors.update({TENSOR: np.zeros((48, 32, 1), np.float32)})),
        "has shape [48, 32, 1]",
    ),
    "int8": (in_dtype(torch.int8), "has dtype I8; convert the checkpoint to one of F32, BF16, F16"),
    "float8": (in_dtype(torch.float8_e4m3fn), "has dtype F8_E4M3; convert the checkpoint to one of F32, BF16, F16"),
    "float64": (in_dtype(torch.float64), "has dtype F64; convert the checkpoint to one of F32, BF16, F16"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_tensor_and_file(files, tmp_path, damage):
    contents, victim = files
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    change, words = DAMAGES[damage]
    check_params(tmp_path, models.read_config(tmp_path), "lm")
    change(tmp_path / victim)
    config = models.read_config(tmp_path)
    with CompileCounter() as compiled:
        for read in (check_params, models.load_params):
            with pytest.raises(ValueError) as error:
                read(tmp_path, config, "lm")
            message = str(error.value)
            # The first tensor that is wanted of a file stands for all that it holds.
            held = [name for name, file in json.loads(contents[INDEX])["weight_map"].items() if file == victim]
            assert any(repr(name) in message for name in held), message
            assert str(tmp_path / victim) in message and words in message and "\n" not in message, message
    assert compiled.count == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}'], ids=repr)
def test_an_index_that_is_none(refused, files, tmp_path, content):
    contents, _ = files
    for name, kept in contents.items():
        (tmp_path / name).write_bytes(kept)
    (tmp_path / INDEX).write_bytes(content)
    with refused():
        check_params(tmp_path, models.read_config(tmp_path), "lm")


def test_a_tensor_of_the_index_that_nothing_needs_may_be_missing(files, tmp_path):
    """Some writers list the head of tied weights and do not write it."""
    contents, victim = files
    for name, kept in contents.items():
        (tmp_path / name).write_bytes(kept)
    index = json.loads(contents[INDEX])
    index["weight_map"] |= {"lm_head.weight": victim, "model.layers.0.self_attn.rotary_emb.inv_freq": victim}
    (tmp_path / INDEX).write_text(json.dumps(index))
    fields = json.loads(contents["config.json"])
    for tied in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": tied}))
        reads = (
            nullcontext() if tied else pytest.raises(Refusal, match=f"lm_head.weight.*{victim}, where {INDEX} lists it")
        )
        with reads:
            check_params(tmp_path, models.read_config(tmp_path), "lm")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", None])
def test_weights_that_are_no_safetensors_are_named(files, tmp_path, name):
    (tmp_path / "config.json").write_bytes(files[0]["config.json"])
    if name is not None:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(Refusal, match=r"has neither .*convert it to safetensors") as refused:
        check_params(tmp_path, models.read_config(tmp_path), "lm")
    assert "\n" not in str(refused.value) and (name is None or f"but {name}," in str(refused.value))


def test_adapters_without_their_model_say_where_they_go(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    words = r'has adapters of peft .*set model=Pretrained\("org/base"\) and actor.lora=Lora\(start='
    for read in (models.read_config, lambda path: tokenizer_of(replace(get_config(), model=Pretrained(str(path))))):
        with pytest.raises(Refusal, match=words) as refused:
            read(tmp_path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("named", [("tool_use",), ("rag", "tool_use"), ()])
def test_named_chat_templates_go_with_the_description(tmp_path, named):
    """Templates as transformers writes them; without them, serving would show tools in another form than training."""
    tokenizer = embedded_tokenizer()
    default = "{% for message in messages %}{{ message.content }}{% endfor %}"
    templates = {"default": default} | {name: f"{name} {{{{ tools }}}}" for name in named}
    tokenizer.chat_template = templates if named else default
    source, export = tmp_path / "source", tmp_path / "export"
    tokenizer.save_pretrained(source)
    (source / "config.json").write_text("{}")
    export.mkdir()
    copy_description(source, export)
    files = sorted(str(file.relative_to(source)) for file in source.rglob("*") if file.is_file())
    assert files == sorted(str(file.relative_to(export)) for file in export.rglob("*") if file.is_file())
    assert load_tokenizer(str(export)).chat_template == load_tokenizer(str(source)).chat_template
    assert len([file for file in files if "additional_chat_templates" in file]) == len(named)


def test_a_tensor_that_the_index_forgot(refused, files, tmp_path):
    contents, _ = files
    for name, kept in contents.items():
        (tmp_path / name).write_bytes(kept)
    index = json.loads(contents[INDEX])
    del index["weight_map"][TENSOR]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with refused():
        check_params(tmp_path, models.read_config(tmp_path), "lm")


@pytest.mark.parametrize("role", ["actor", "critic", "reward"])
def test_a_run_refuses_before_it_compiles_anything(tmp_path, role):
    """Whichever role is to start from the checkpoint, and though others could start."""
    good, torn = write_policy(tmp_path / "good"), write_policy(tmp_path / "torn")
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    place = {name: str(torn if name == role else good) for name in ("actor", "critic", "reward")}
    config = get_config()
    config = replace(
        config,
        model=Pretrained(place["actor"]),
        algorithm=replace(config.algorithm, critic_model=Pretrained(place["critic"])),
        workdir=str(tmp_path / "run"),
    )
    if role == "reward":
        config = replace(config, rewards=Rewards(parts=(ModelReward(path=str(torn), weight=1.0),)))
    with CompileCounter() as compiled, pytest.raises(ValueError, match=r"torn/model\.safetensors is damaged"):
        run(config)
    assert compiled.count == 0


@pytest.mark.parametrize("size", [-32, "32", 32.0, True])
def test_a_size_that_is_no_positive_number_is_named(files, tmp_path, size):
    fields = json.loads(files[0]["config.json"])
    (tmp_path / "config.json").write_text(json.dumps(fields | {"hidden_size": size}))
    with pytest.raises(Refusal, match=r"config\.json has hidden_size=.*; expected a positive whole number"):
        models.read_config(tmp_path)


@pytest.mark.parametrize("text", ['{"eos_token_id": ', "[2]", '{"eos_token_id": "x"}', '{"eos_token_id": [2, null]}'])
def test_a_damaged_file_of_stop_tokens_is_named(refused, tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with refused():
        read_stop_tokens(tmp_path)
