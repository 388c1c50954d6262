"""GGUF files as checkpoints: logits of the model that is in them, every type of weights, and clear refusals."""

import json
import subprocess
import sys
from dataclasses import replace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf_files import KINDS, SIZES, letters, write_gguf, write_kind
from transformers import AutoModelForCausalLM

from jaxrlhf import models
from jaxrlhf.checkpoint.identity import identity
from jaxrlhf.config import Refusal
from jaxrlhf.conversations.rendering import ChatTemplate
from jaxrlhf.data.tokenizer import load_tokenizer
from jaxrlhf.models.huggingface import gguf_folder
from jaxrlhf.models.huggingface.gguf_header import config_fields, read_header
from jaxrlhf.models.huggingface.gguf_tensors import GgufTensor
from jaxrlhf.models.huggingface.hub import resolve
from jaxrlhf.models.huggingface.load import check_params
from jaxrlhf.planner.shapes import shape_of
from tests.models.test_transformers import our_logits, plain

DEQUANTISED = [
    kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits or kind.name in ("F32", "F16")
]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    """Folder that descriptions are kept in."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    gguf_folder._place.cache_clear()
    yield folder / "jaxrlhf" / "gguf"
    gguf_folder._place.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_model_in_the_file(kind, tmp_path):
    file, model = write_kind(tmp_path / "m.gguf", kind)
    token_RW = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 20), dtype=np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(token_RW)).logits.numpy()
    config = models.read_config(file)
    check_params(file, config, "lm")
    params = models.load_params(file, config, "lm")
    np.testing.assert_allclose(our_logits(params, config, token_RW, *plain(token_RW)), expected, atol=1e-4)


_ASSUMED = {
    "qwen3": {"head_dim": 128},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
}
"""Values that transformers assumes and the file may contradict."""


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2"])
def test_transformers_reads_the_same_model(kind, tmp_path):
    """Their reader agrees with the file and ours on the order of rows, the offset of norms and the shape."""
    file, _ = write_kind(tmp_path / "m.gguf", kind, sizes=_ASSUMED.get(kind), matrices=gguf.GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    token_RW = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (2, 20), dtype=np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(token_RW)).logits.numpy()
    config = models.read_config(file)
    params = models.load_params(file, config, "lm")
    np.testing.assert_allclose(our_logits(params, config, token_RW, *plain(token_RW)), expected, atol=1e-4)


def test_what_transformers_saves_of_a_file_is_a_checkpoint(tmp_path):
    """config.json still names the GGUF file, and the weights are plain float32."""
    file, model = write_kind(tmp_path / "m.gguf", "llama")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    fresh = type(read)(read.config)
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["quant_method"] == "gguf"
    config = models.read_config(tmp_path / "saved")
    params = models.load_params(tmp_path / "saved", config, "lm")
    np.testing.assert_array_equal(params["embed"][: SIZES["vocab_size"]], model.model.embed_tokens.weight.detach())


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_slices_of_every_type_are_those_of_the_whole(kind):
    block, size = GGML_QUANT_SIZES[kind]
    rows, columns = 12, 2 * max(block, 16)
    data = np.random.default_rng(2).integers(0, 64, (rows, columns * size // block), dtype=np.uint8)
    if kind.name in ("F32", "F16"):
        data = np.arange(rows * columns, dtype={"F32": np.float32, "F16": np.float16}[kind.name]).reshape(rows, -1)
    stored = type("Stored", (), {"data": data, "tensor_type": kind, "shape": np.array([columns, rows])})
    whole = gguf.dequantize(data, kind)
    for heads, order in ((None, np.arange(rows)), (3, np.array([0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]))):
        tensor = GgufTensor(stored, heads=heads, offset=0.0)
        assert tensor.get_shape() == [rows, columns]
        part = tensor[3:9, 5:]
        np.testing.assert_array_equal(part.astype(np.float32), whole[order][3:9, 5:])
        assert part.dtype == {"F16": np.float16, "BF16": jnp.bfloat16}.get(kind.name, np.float32)


def test_sharded_over_devices(tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "llama")
    config = models.read_config(file)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "x"))
    whole = models.load_params(file, config, "lm")
    everywhere = jax.tree.map(lambda _: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), whole)
    everywhere["layers"]["attention"]["query"] = everywhere["layers"]["attention"]["key"] = split
    parts = models.load_params(file, config, "lm", everywhere)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


def test_tokenizer_and_template_are_the_files(tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "llama")
    tokenizer = load_tokenizer(str(resolve(file)))
    ids = tokenizer.encode("é 1")
    assert ids == [3 + byte for byte in "é 1".encode()]
    assert tokenizer.decode(ids) == "é 1"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.encode("ab<eos>") == [3 + 256, 2]
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "user:hi"
    assert len(letters()) == len(set(letters())) == 256


def test_a_file_without_a_template_is_a_checkpoint_whose_prompts_are_plain(tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "llama", template=None)
    tokenizer = load_tokenizer(str(resolve(file)))
    assert tokenizer.chat_template is None and tokenizer.encode("a") == [3 + ord("a")]
    with pytest.raises(Refusal, match="use a GGUF file that has a template"):
        ChatTemplate(tokenizer)


def test_a_description_is_written_once_and_anew_with_the_file(tmp_path, cache):
    file, _ = write_kind(tmp_path / "m.gguf", "llama")
    first = resolve(file)
    assert first == resolve(str(file)) and first.parent == cache
    assert json.loads((first / "config.json").read_text())["model_type"] == "llama"
    write_kind(file, "qwen3")
    assert models.read_config(file).family == "qwen3" and resolve(file) != first
    assert sorted(path.name for path in cache.iterdir()) == sorted([first.name, resolve(file).name])
    shape, words = shape_of(str(file))
    assert shape == models.read_config(file) and str(file) in words


def test_without_torch(tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "llama")
    script = (
        "import sys; sys.modules['torch'] = sys.modules['accelerate'] = None\n"
        "from jaxrlhf import models\n"
        f"config = models.read_config({str(file)!r}); params = models.load_params({str(file)!r}, config, 'lm')\n"
        "print(params['embed'].shape)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout.strip() == str((272, SIZES["hidden_size"])), ran.stderr


def refusal_of(path):
    """Refusal of a path by `resolve`, in one line."""
    with pytest.raises(Refusal) as caught:
        resolve(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_cut_anywhere_is_refused_before_weights_are_read(tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "llama")
    whole, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for size in [6, 30, 200, 2000, len(whole) // 4, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        assert "is damaged or truncated" in refusal_of(cut) and "download it again" in refusal_of(cut)
    cut.write_bytes(b"")
    assert "is not a GGUF file" in refusal_of(cut)


def test_flipped_bits_of_a_header_end_in_a_refusal_or_a_model(tmp_path):
    """Lengths that a damaged header claims are looked at before anything loops over them."""
    file, _ = write_kind(tmp_path / "m.gguf", "llama")
    whole, dice = file.read_bytes(), np.random.default_rng(3)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for place in dice.integers(4, 4000, 60):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(dice.integers(0, 8))
        damaged.write_bytes(bytes(flipped))
        try:
            resolve(damaged)
        except Refusal as refusal:
            refused += 1
            assert "\n" not in str(refusal)
    assert refused > 5


def test_what_is_no_gguf_file_or_not_there(tmp_path):
    page = tmp_path / "page.gguf"
    page.write_text("<html>404</html>")
    assert "it starts with b'<htm', not b'GGUF'" in refusal_of(page)
    assert "there is no file" in refusal_of(tmp_path / "missing.gguf")


def test_a_folder_with_only_gguf_files_names_them(tmp_path):
    write_kind(tmp_path / "b.gguf", "llama")
    assert f"has 1 .gguf file and no config.json; use the path of a file, such as {tmp_path / 'b.gguf'}" in refusal_of(
        tmp_path
    )
    (tmp_path / "c.gguf").touch()
    said = refusal_of(tmp_path)
    assert "2 .gguf files" in said and str(tmp_path / "b.gguf") in said


def test_other_architectures_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    said = refusal_of(tmp_path / "m.gguf")
    assert "has architecture 'mamba'" in said and "llama, qwen2, qwen3" in said


@pytest.mark.parametrize(
    "more, said",
    [
        ({"expert_count": 4}, "has experts"),
        ({"rope.dimension_count": 8}, "8 of them rotated"),
    ],
)
def test_models_that_are_not_computed_are_refused(more, said, tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "llama", more=more)
    assert said in refusal_of(file)


@pytest.mark.parametrize(
    "values, rope",
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.factor": 1.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_scaling_of_rotary_positions(values, rope, tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "qwen2", more=values)
    fields = json.loads((resolve(file) / "config.json").read_text())
    assert fields["rope_parameters"] == {"rope_theta": 1e6, **rope}


@pytest.mark.parametrize("key", ["rope.scaling.yarn_beta_fast", "rope.scaling.attn_factor", "attention.scale"])
def test_factors_that_are_not_read_are_refused(key, tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "qwen2", more={key: 2.0})
    assert f"has qwen2.{key}" in refusal_of(file)


@pytest.mark.parametrize("layers, scalar", [(46, 24), (3, 16)])
def test_the_largest_gemma_scales_queries_by_its_width(layers, scalar, tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "gemma2", sizes={"hidden_size": 96, "num_attention_heads": 4})
    header = read_header(file)
    changed = replace(header, values=header.values | {"gemma2.block_count": layers})
    assert config_fields(changed)["query_pre_attn_scalar"] == scalar


def test_a_resumed_run_tells_another_file_by_its_weights(tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "qwen2")
    before = identity(file)
    assert set(before) == {"config.json", "model.gguf"}
    write_kind(file, "qwen2", sizes={"initializer_range": 0.5})
    after = identity(file)
    assert after["config.json"] == before["config.json"] and after["model.gguf"] != before["model.gguf"]


def test_two_processes_may_describe_a_file_at_once(tmp_path, cache):
    file, _ = write_kind(tmp_path / "m.gguf", "qwen2")
    folder = resolve(file)
    (folder / "config.json").unlink()  # as a cleaner of caches may
    assert (resolve(file) / "config.json").is_file()
    gguf_folder._describe(file, folder)  # which another process has written by now
    assert (folder / "config.json").is_file() and list(cache.iterdir()) == [folder]


def test_files_of_the_other_byte_order_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "in the other byte order" in refusal_of(tmp_path / "m.gguf")


def test_layers_that_differ_are_refused(tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "llama", more={"attention.head_count_kv": [2, 2, 1]})
    assert "llama.attention.head_count_kv as a list, so its layers differ" in refusal_of(file)


def test_rules_of_cutting_text_that_are_not_known_are_told_each_time(tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "llama", cut="poro-chat")
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="the unknown pre-tokenizer 'poro-chat'"):
            resolve(file)


def test_a_missing_value_and_a_missing_tensor_are_named(tmp_path):
    _, model = write_kind(tmp_path / "m.gguf", "llama")
    file = write_gguf(tmp_path / "x.gguf", model, "llama")
    whole = file.read_bytes()
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(whole.replace(b"llama.block_count", b"llama.block_hount"))
    assert "has no llama.block_count" in refusal_of(renamed)
    renamed.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight"))
    config = models.read_config(renamed)
    with pytest.raises(Refusal, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' .* is missing"):
        check_params(renamed, config, "lm")


def test_frequencies_that_are_not_llama_3s_are_refused(tmp_path):
    file, _ = write_kind(tmp_path / "m.gguf", "llama3")
    reader = gguf.GGUFReader(file, "r+")
    (factors,) = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    factors[2] *= 1.5
    reader.data.flush()
    assert "rope_freqs.weight" in refusal_of(file)
