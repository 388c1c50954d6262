"""Adapters against peft: the same logits, the same gradients, the same files."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import safetensors.numpy
import tiny_checkpoints
import torch
from compiled import to_read
from tiny_checkpoints import tokens
from tiny_models import decoded, logits, merged

from jaxrlhf import models
from jaxrlhf.config import FromScratch, Lora
from jaxrlhf.models.huggingface.peft import load_adapters, save_adapters
from jaxrlhf.models.linear import Adapted, Adapter, project
from jaxrlhf.models.lora.lora import adapted, declare_adapters
from jaxrlhf.models.parameters import draw

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # of transformers, which peft reads
)
NAMES = {name: f"{name[0]}_proj" for name in ("query", "key", "value", "output")}
NAMES |= {name: f"{name}_proj" for name in ("gate", "up", "down")}
CASES = {
    "every matrix": ("qwen2", Lora(rank=4, alpha=6.0)),
    "queries and values, rank-stabilised": ("llama", Lora(rank=3, alpha=5.0, targets=("query", "value"), rslora=True)),
    "queries over latents, a dense layer first": (
        "deepseek-v3-halves",
        Lora(rank=2, alpha=8.0, targets=("query", "output")),
    ),
}


class Case:
    """A checkpoint with random adapters that peft wrote, the model of both, and ours read from the files."""

    def __init__(self, name: str, folder) -> None:
        kind, self.lora = CASES[name]
        self.model = tiny_checkpoints.build(kind)
        self.path = tiny_checkpoints.write(folder / "model", self.model)
        settings = {"r": self.lora.rank, "lora_alpha": self.lora.alpha, "use_rslora": self.lora.rslora}
        targets = [NAMES[name] for name in self.lora.targets]
        self.theirs = peft.get_peft_model(
            self.model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **settings)
        )
        with torch.no_grad():
            for name, weight in self.theirs.named_parameters():
                if "lora_B" in name:
                    weight.add_(0.1 * torch.randn_like(weight))
        self.files = folder / "adapters"
        self.theirs.save_pretrained(self.files, save_embedding_layers=False)
        self.config = models.read_config(self.path)
        self.params = models.load_params(self.path, self.config, "lm")
        self.adapters = self.load(self.files)

    def load(self, path, lora=None):
        lora = lora or self.lora
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        layout = jax.tree.map(lambda _: device, declare_adapters(self.config, "lm", lora))
        return load_adapters(path, self.config, "lm", lora, layout)

    def their_logits(self, token_RW):
        with torch.no_grad():
            return self.theirs(torch.tensor(token_RW, dtype=torch.long)).logits.numpy()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def every_matrix(tmp_path_factory):
    return Case("every matrix", tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def two_of_three(tmp_path_factory):
    return Case("queries and values, rank-stabilised", tmp_path_factory.mktemp("adapters"))


def test_logits_are_those_of_peft(case):
    token_RW = tokens((3, 20))
    ours = logits(adapted(case.params, case.adapters), case.config, token_RW)
    theirs = case.their_logits(token_RW)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(theirs - logits(case.params, case.config, token_RW)).max() > 0.1


def test_gradients_are_those_of_peft(case, tmp_path):
    token_RW = tokens((2, 16), seed=1)
    shift_RWV = np.random.default_rng(2).normal(size=(2, 16, tiny_checkpoints.VOCAB)).astype(np.float32)
    case.theirs.zero_grad()
    for weight in case.theirs.parameters():
        weight.requires_grad_(True)
    (case.theirs(torch.tensor(token_RW, dtype=torch.long)).logits * torch.tensor(shift_RWV)).sum().backward()

    def loss(adapters):
        return jnp.sum(logits(adapted(case.params, adapters), case.config, token_RW) * shift_RWV)

    change = jax.jit(jax.grad(loss))(case.adapters)
    save_adapters(change, case.config, "lm", case.lora, tmp_path, model="")
    ours = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    theirs = {name: weight.grad.numpy() for name, weight in case.theirs.named_parameters() if "lora_" in name}
    assert len(ours) == len(theirs) > 0
    for name, array in theirs.items():
        ours_array = ours[name.replace(".default", "")]
        np.testing.assert_allclose(ours_array, array, atol=2e-4 * np.abs(array).max(), err_msg=name)


def test_files_out_are_files_in_and_peft_loads_them(case, tmp_path):
    save_adapters(case.adapters, case.config, "lm", case.lora, tmp_path / "out", model=str(case.path))
    ours, theirs = (
        safetensors.numpy.load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "out", case.files)
    )
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        np.testing.assert_array_equal(ours[name], array)
    kind, _ = next(value for value in CASES.values() if value[1] == case.lora)
    plain = tiny_checkpoints.build(kind)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
    token_RW = tokens((2, 10))
    with torch.no_grad():
        again = loaded(torch.tensor(token_RW, dtype=torch.long)).logits.numpy()
    np.testing.assert_array_equal(again, case.their_logits(token_RW))


def test_adapters_start_as_wide_as_those_of_peft():
    config = models.scratch_config(FromScratch(hidden_size=192, num_layers=2), vocab_size=64)
    lora = Lora(rank=64, targets=("up", "down"))
    adapters = jax.jit(lambda: draw(declare_adapters(config, "lm", lora), jax.random.key(0)))()
    for inputs, adapter in ((192, adapters["layers"]["mlp"]["up"]), (384, adapters["layers"]["mlp"]["down"])):
        theirs = torch.empty(64, inputs)
        torch.nn.init.kaiming_uniform_(theirs, a=5**0.5)  # as peft's LoraLayer.reset_lora_parameters has it
        assert np.std(adapter.down) == pytest.approx(float(theirs.std()), rel=0.05)
        assert adapter.scale == 0.5
        assert not np.any(adapter.up)


def test_merged_is_the_same_function(case):
    token_RW = tokens((3, 20))
    whole = merged(adapted(case.params, case.adapters))
    assert jax.tree.structure(whole) == jax.tree.structure(case.params)
    beside = logits(adapted(case.params, case.adapters), case.config, token_RW)
    np.testing.assert_allclose(logits(whole, case.config, token_RW), beside, atol=5e-5)


def test_tokens_decoded_one_by_one_have_the_logits_of_the_whole_sequence(two_of_three):
    config, token_PS = two_of_three.config, tokens((2, 12))
    params = adapted(two_of_three.params, two_of_three.adapters)
    layers = jax.eval_shape(lambda params: models.unstack_layers(params, config), params)
    assert isinstance(layers[0]["attention"]["qkv"], Adapted) and "query" not in layers[0]["attention"]
    whole_PSV = logits(params, config, token_PS)
    np.testing.assert_allclose(decoded(params, config, token_PS, first=6), whole_PSV[:, 5:], atol=5e-5)


def test_a_gradient_by_adapters_computes_none_by_the_weights():
    weight, adapter = jnp.ones((384, 512)), Adapter(jnp.ones((384, 4)), jnp.ones((4, 512)), 2.0)

    def loss(adapter, weight, input_TD):
        return jnp.sum(jnp.square(project(input_TD, Adapted(weight, adapter))))

    input_TD = jnp.ones((640, 384))
    by_adapter = to_read(jax.jit(jax.grad(loss)).lower(adapter, weight, input_TD)).cost_analysis()["flops"]
    product = 2 * 640 * 384 * 512
    assert product < by_adapter < 1.5 * product  # the forward product, and what is thin


# What is refused.


def refused(case, tmp_path, words, *, lora=None, tensors=None, **fields):
    folder = tmp_path / "changed"
    shutil.copytree(case.files, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    if tensors is not None:
        arrays = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
        safetensors.numpy.save_file(tensors(arrays), folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=words) as raised:
        case.load(folder, lora)
    assert len(str(raised.value).splitlines()) == 1
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 8}, r"has r=8, lora_alpha=6.0, use_rslora=False, but lora has rank=4"),
        ({"lora_alpha": 1}, "lora_alpha=1"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"use_dora": True}, "use_dora=True, which is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "only LORA with unchanged base weights"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"tomorrows_idea": 3}, "tomorrows_idea=3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_change_numbers_are_refused(every_matrix, tmp_path, fields, words):
    refused(every_matrix, tmp_path, words, **fields)


def test_tensors_that_do_not_fit_are_named(every_matrix, tmp_path):
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    less = {"lora": Lora(rank=4, alpha=6.0, targets=("query",))}
    refused(
        every_matrix, tmp_path / "more", r"layers.0.mlp.down_proj.lora_A.weight' does not match lora.targets", **less
    )
    drop = {"tensors": lambda arrays: {key: array for key, array in arrays.items() if key != name}}
    refused(every_matrix, tmp_path / "less", f"{name}' is missing", **drop)
    cut = {"tensors": lambda arrays: {**arrays, name: arrays[name][:2]}}
    refused(every_matrix, tmp_path / "cut", rf"{name}' in .* has shape \[2, 32\].* require \[4, 32\]", **cut)


def test_damaged_and_missing_files_are_named(every_matrix, tmp_path):
    with pytest.raises(ValueError, match=r"adapter_config\.json cannot be read as JSON \(no such file\)"):
        every_matrix.load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"adapter_config\.json has a list, expected a JSON object"):
        every_matrix.load(tmp_path)
    shutil.copytree(every_matrix.files, tmp_path / "cut")
    file = tmp_path / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is missing or damaged"):
        every_matrix.load(tmp_path / "cut")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "cut" / name).unlink()
        (tmp_path / "cut" / name).symlink_to("/dev/null")
        with pytest.raises(ValueError, match=rf"{name}.*\(no regular file\)"):
            every_matrix.load(tmp_path / "cut")


def test_targets_that_are_no_matrices_are_refused():
    with pytest.raises(ValueError, match=r"Lora\.targets must be one or more, each one of query, key"):
        Lora(targets=("query", "embed"))
    with pytest.raises(ValueError, match=r"Lora\.targets"):
        Lora(targets=())


def test_matrices_that_a_model_does_not_have_are_refused(tmp_path):
    path = tiny_checkpoints.write(tmp_path / "experts", tiny_checkpoints.build("qwen3-moe"))
    with pytest.raises(ValueError, match=r"has gate, up, down, but all layers .* have query, key, value, output"):
        declare_adapters(models.read_config(path), "lm", Lora())


def test_a_matrix_that_a_file_keeps_with_others_has_no_adapter_there(tmp_path):
    config = models.read_config(tiny_checkpoints.write(tmp_path / "phi3", tiny_checkpoints.build("phi3")))
    shapes = jax.tree.map(lambda param: np.zeros(param.shape), declare_adapters(config, "lm", Lora()))
    with pytest.raises(ValueError, match=r"store layers\.attention\.key with other weights in .*qkv_proj"):
        save_adapters(shapes, config, "lm", Lora(), tmp_path / "out", model="")
