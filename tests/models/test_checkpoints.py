"""Reading checkpoints: each shard on its device, and a one-line error for whatever is wrong."""

import json
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import build, write

from jaxrlhf import models
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.models.huggingface.config import read_stop_tokens
from jaxrlhf.models.huggingface.save import save_description
from jaxrlhf.sharding.rules import shardings

SHARING = "qwen2", "phi3", "deepseek-v3"
"""Kinds without and with parameters that share a tensor, and with other first layers."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source"), build("qwen2"))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Ten layers of large tensors, and what their model is."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 10, "num_key_value_heads": 4}
    directory = write(tmp_path_factory.mktemp("large"), build("llama", **sizes))
    return directory, models.read_config(directory)


@pytest.fixture
def copy(source, tmp_path):
    """A checkpoint to damage."""
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def rewrite(directory, **tensors):
    """Replace tensors; None removes one."""
    file = directory / "model.safetensors"
    kept = load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


def load(directory, head="lm"):
    return models.load_params(directory, models.read_config(directory), head)


def refuses(directory, *words, read=load):
    """One line, within seconds, with all of these words."""
    start = time.monotonic()
    with pytest.raises(ValueError) as error:
        read(directory)
    assert time.monotonic() - start < 5
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        *((kind, {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}) for kind in SHARING),
        ("qwen2", {"layers": "tensor", "head_dim": "fsdp"}),
    ],
)
def test_every_device_gets_its_shard(tmp_path, kind, rules):
    source = write(tmp_path, build(kind))
    config = models.read_config(source)
    whole = models.load_params(source, config, "lm")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    layout = shardings(mesh, models.param_dims(config, "lm"), rules)
    params = models.load_params(source, config, "lm", layout)
    jax.tree.map(lambda leaf, sharding: np.testing.assert_equal(leaf.sharding, sharding), params, layout)

    def same(leaf, expected):
        expected = np.asarray(expected)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])

    jax.tree.map(same, params, whole)


def test_only_the_shard_is_read(source, monkeypatch):
    """A process that owns a quarter of a matrix asks the file for a quarter of its rows."""
    from jaxrlhf.models.huggingface import load as hf_load

    read = []
    original = hf_load._read

    def counting(*args):
        block = original(*args)
        read.append(block.size)
        return block

    monkeypatch.setattr(hf_load, "_read", counting)
    config = models.read_config(source)
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",), axis_types=(AxisType.Auto,))
    layout = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), models.param_shapes(config, "lm"))
    layout["embed"] = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    models.load_params(source, config, "lm", layout)
    assert read[:4] == [112 * 8] * 4  # 97 rows and the zeros that pad them


def test_dtype(source):
    params = models.load_params(source, models.read_config(source), "lm", dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_a_tied_checkpoint_that_also_saved_its_head(tmp_path):
    directory = write(tmp_path, build("qwen2-tied"))
    embed = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(directory, lm_head__weight=embed)
    assert "head" not in load(directory)
    # As adapters leave it whose `modules_to_save` were both; transformers unties them then, and others do not.
    rewrite(directory, lm_head__weight=embed + (np.arange(97) == 96)[:, None])
    refuses(directory, "lm_head.weight", "tie_word_embeddings", str(directory))


def test_adapters_beside_the_weights_are_not_left_out(copy):
    (copy / "adapter_config.json").write_text("{}")
    refuses(copy, "adapter_config.json", "merged")


def test_an_export_names_no_code_that_is_not_beside_it(copy, tmp_path_factory):
    change(copy, auto_map={"AutoConfig": "configuration_qwen2.Qwen2Config"})
    own = {"AutoTokenizer": ["own.Tokenizer", None]}
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": "x", "auto_map": own}))
    export = tmp_path_factory.mktemp("export")
    models.save_params(load(copy), models.read_config(copy), export, source=copy)
    assert "auto_map" not in json.loads((export / "config.json").read_text())
    assert json.loads((export / "tokenizer_config.json").read_text()) == {"eos_token": "x"}


def test_missing_directory(tmp_path):
    refuses(str(tmp_path / "nowhere"), "no directory", "nowhere", "hub id", read=models.read_config)
    refuses("nobody/no-such-model", "no local directory 'nobody/no-such-model'", read=models.read_config)
    refuses(str(tmp_path), "config.json", read=models.read_config)


def test_missing_tensor(copy):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(copy, **{name: None})
    refuses(copy, name, "missing", str(copy))


def test_tensor_that_would_be_ignored(copy):
    rewrite(copy, model__layers__0__self_attn__o_proj__bias=np.ones(32, np.float32))
    refuses(copy, "model.layers.0.self_attn.o_proj.bias", "not part of a qwen2 decoder")


def test_head_that_is_not_there(source):
    refuses(source, "ForCausalLM", "ForSequenceClassification", read=lambda path: load(path, "score"))


def test_classifier_with_several_labels(tmp_path):
    directory = write(tmp_path, build("qwen3", "ForSequenceClassification", num_labels=3))
    refuses(directory, "score.weight", "[3, 32]", "[1, 32]", read=lambda path: load(path, "score"))
    refuses(directory, "was saved with a score head")


def test_unknown_architecture(copy):
    change(copy, architectures=["GPT2LMHeadModel"])
    refuses(copy, "GPT2LMHeadModel", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")


def test_config_that_is_not_json(copy):
    (copy / "config.json").write_text("{")
    refuses(copy, "config.json cannot be read as JSON")


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {"vocab_size": None},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_fields_that_change_numbers_are_never_ignored(copy, fields):
    change(copy, **fields)
    name = next(name for name in reversed(fields))
    refuses(copy, "rope" if "rope" in name else name, "config.json", read=models.read_config)


def test_an_export_never_mixes_with_another(refused, source):
    config = models.read_config(source)
    with refused():
        models.save_params(load(source), config, source)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(), ("layers", "mlp")], ids=["whole", "layers-mlp"])
def test_the_host_holds_one_tensor_at_a_time(large, axes):
    """A checkpoint of 90 tensors, most of them stacked into few parameters."""
    directory, config = large
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rules = dict(zip(axes, ("a", "b"), strict=False))
    layout = jax.tree.map(
        lambda names: NamedSharding(mesh, PartitionSpec(*(rules.get(name) for name in names))),
        models.param_dims(config, "lm"),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    tensors = load_file(directory / "model.safetensors")
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert sum(tensor.nbytes for tensor in tensors.values()) > 20 * largest
    del tensors
    models.load_params(directory, config, "lm", layout)  # compiles
    tracemalloc.start()
    params = models.load_params(directory, config, "lm", layout)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 20 * largest
    # A device may still hold on to the tensor before.
    assert largest / 8 < peak < 2.5 * largest, peak / largest


def test_without_a_generation_config_responses_stop_where_config_json_says(copy):
    change(copy, eos_token_id=[1, 5])
    assert read_stop_tokens(copy) == []
    (copy / "generation_config.json").unlink()
    assert read_stop_tokens(copy) == [1, 5]


def test_an_export_with_another_tokenizer_stops_where_that_one_ends(copy, tmp_path_factory):
    (copy / "generation_config.json").write_text('{"eos_token_id": 3, "top_k": 5}')
    export, tokenizer = tmp_path_factory.mktemp("export"), embedded_tokenizer()
    save_description(models.read_config(copy), export, tokenizer=tokenizer, source=copy)
    found = transformers.GenerationConfig.from_pretrained(export)
    assert (found.eos_token_id, found.top_k) == ([3, tokenizer.eos_token_id], 5)


def test_an_exported_score_is_read_at_the_end_even_where_that_pads(copy, tmp_path_factory):
    change(copy, eos_token_id=[2, 5], pad_token_id=2)
    config, pads = models.read_config(copy), []
    for head in ("lm", "value"):
        export = tmp_path_factory.mktemp("export")
        models.save_params(load(copy, head), config, export, source=copy)
        pads.append(json.loads((export / "config.json").read_text())["pad_token_id"])
    assert pads == [2, None]


def test_weights_that_float16_cannot_hold_are_not_exported_as_infinite(refused, source, tmp_path):
    params = load(source)
    params["final_norm"] = params["final_norm"].at[3].set(70_000.0)
    with refused():
        models.save_params(params, models.read_config(source), tmp_path, dtype=jnp.float16)
    assert not list(tmp_path.glob("*.safetensors")) and not (tmp_path / "config.json").exists()
