"""A model of the user's own, as docs/families.md has it: it is sampled from, trained with GRPO, saved and resumed."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from learning_run import learning
from made_plans import machines
from tiny_runs import get_config, numbers, records, training

import jaxrlhf
from jaxrlhf.config import GRPO, PPO, Checkpointing, Layout, Lora, Nnx, Training
from jaxrlhf.engine import Engine
from jaxrlhf.models import init_params, model_config, param_dims, param_shapes, token_logp
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.decoder import hidden_states
from jaxrlhf.planner.problem import question_of
from jaxrlhf.sharding.mesh import SLOT_AXES, factored_mesh, mesh_of
from jaxrlhf.sharding.rules import GENERATE, TRAIN, shardings
from jaxrlhf.trainer.policy import evaluate_policy, export_policy

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The configuration of the file that the page shows."""
    found = re.search(r"<!-- module -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(found[1])
    return jaxrlhf.load(file)


@pytest.fixture(scope="module")
def own(shown) -> Nnx:
    """Its module, of one narrow layer."""
    return Nnx(lambda rngs: shown.model.build(rngs, width=32, layers=1), max_positions=512)


@pytest.fixture(scope="module")
def model(own):
    with pytest.warns(RuntimeWarning, match="Transformer has no key-value cache, so .* for every token"):
        return model_config(own, ())


@pytest.fixture(scope="module")
def params(model):
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(lambda leaf: 0.3 * draw(leaf.shape, np.float32), param_shapes(model, "lm"))


def run(config, workdir: Path) -> list[dict]:
    with pytest.warns(RuntimeWarning, match="recomputes the whole sequence"):
        assert jaxrlhf.run(replace(config, workdir=str(workdir))).finished
    return records(workdir / "metrics.jsonl")


def alone(module, *sequences: list[int]) -> np.ndarray:
    """Log-probabilities of each sequence's tokens but the first, by the module itself; all are of one length."""
    token_BT = jnp.array(sequences)
    position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape)

    @nnx.jit
    def read(module):
        logit_BTV = module(token_BT, position_BT, jnp.ones_like(token_BT)) @ module.head().T
        return jnp.take_along_axis(jax.nn.log_softmax(logit_BTV[:, :-1]), token_BT[:, 1:, None], axis=2)[:, :, 0]

    return np.asarray(read(module))


def logp(model, params, token_RW, position_RW, segment_RW) -> np.ndarray:
    """Return the log-probability of every token, by the functions that workers call."""

    def read(params, *rows):
        return token_logp(params, model, hidden_states(params, model, *rows).hidden_RWD, rows[0]).logp

    return np.asarray(jax.jit(read)(params, token_RW, position_RW, segment_RW))


# As functions.


def test_packed_sequences_are_what_the_module_says_of_each(shown, model, params):
    module = nnx.eval_shape(lambda: shown.model.build(nnx.Rngs(0), width=32, layers=1))
    for path, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param):
            variable.set_value(params["module"][".".join(map(str, path))])
    first, second = alone(module, [5, 9, 2, 7, 0], [5, 9, 3, 8, 1])
    first = first[:3]
    token_RW = jnp.array([[5, 9, 2, 7, 5, 9, 3, 8, 1, 0, 0, 0]])
    position_RW = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 0]])
    segment_RW = jnp.array([[1] * 4 + [2] * 5 + [0] * 3])
    packed_W = logp(model, params, token_RW, position_RW, segment_RW)[0]
    np.testing.assert_allclose(packed_W[1:4], first, atol=1e-5)
    np.testing.assert_allclose(packed_W[5:9], second, atol=1e-5)


def test_an_engine_scores_its_tokens(model, params):
    mesh = mesh_of({"data": 1}, jax.devices()[:1])
    sizes = {"slots": 2, "max_prompt_tokens": 8, "max_response_tokens": 4, "decode_tokens_per_dispatch": 2}
    engine = Engine(model, mesh, stop_tokens=(), slot_axes=SLOT_AXES, **sizes)
    params = jax.device_put(params, shardings(mesh, param_dims(model, "lm"), GENERATE))
    engine.load(params, version=0, donated=jax.tree.map(lambda _: True, params))
    tokens = [5, 9, 2, 7, 1]
    expected_W = logp(model, params, jnp.array([tokens]), jnp.arange(5)[None], jnp.ones((1, 5), int))[0]
    [scores] = engine.score([tokens])
    np.testing.assert_allclose(scores.logp_T[1:], expected_W[1:], atol=1e-5)


def test_a_value_head_is_one_vector_more(model):
    lm, value = (jax.eval_shape(partial(init_params, model, head), jax.random.key(0)) for head in ("lm", "value"))
    assert value == {**lm, "head": jax.ShapeDtypeStruct((32,), jnp.float32)}
    assert jax.tree.leaves(lm) == jax.tree.leaves(param_shapes(model, "lm"))
    assert weight_counts(model, "value").total == weight_counts(model, "lm").total + 32


def test_the_largest_dimension_is_split_over_fsdp_and_vectors_are_whole(model):
    dims = param_dims(model, "lm")["module"]
    assert dims["words.embedding"] == ("embed", None)  # [512, 32]
    assert dims["blocks.0.up.kernel"] == (None, "embed")  # [32, 128]
    assert dims["blocks.0.down.bias"] == dims["norm.scale"] == (None,)
    mesh = factored_mesh(Layout(fsdp=4), jax.devices())
    layout = shardings(mesh, param_dims(model, "lm"), TRAIN)["module"]
    shapes = param_shapes(model, "lm")["module"]
    assert layout["words.embedding"].shard_shape(shapes["words.embedding"].shape) == (128, 32)
    assert layout["norm.scale"].shard_shape(shapes["norm.scale"].shape) == (32,)


class Named(nnx.Module):
    """Says what its dimensions are; the table is shared by two attributes."""

    def __init__(self, rngs, names=("embed", "vocab")):
        init = nnx.initializers.normal()
        self.table = nnx.Param(nnx.with_partitioning(init, names)(rngs.params(), (16, 96)))
        self.again = self.table
        self.frozen = nnx.Variable(jnp.arange(16.0))

    def __call__(self, tokens, positions, segments):
        return self.table[...].T[tokens] + self.frozen[...][None, None]

    def head(self):
        return self.again[...].T


@pytest.mark.filterwarnings("ignore:Named has no key-value cache")
def test_a_module_may_name_its_dimensions():
    model = model_config(Nnx(Named), ())
    assert (model.vocab_size, model.hidden_size, weight_counts(model).total) == (96, 16, 16 * 96)
    assert list(param_dims(model, "lm")["module"].values()) == [("embed", "vocab")]
    with pytest.raises(
        ValueError, match=r"Nnx: \w+ of shape \(16, 96\) has dimension names .* one name per dimension, from e"
    ):
        param_dims(model_config(Nnx(lambda rngs: Named(rngs, ("embed", "words"))), ()), "lm")


def test_what_is_no_such_module_is_refused(own):
    with pytest.raises(ValueError, match=r"Nnx.build returned Linear; expected a flax.nnx.Module that maps tokens"):
        model_config(Nnx(lambda rngs: nnx.Linear(4, 4, rngs=rngs)), ())

    class Logits(Named):
        def head(self):
            return self.table[...]

    with pytest.raises(
        ValueError, match=r"Logits returns hidden states \(1, 2, 16\) and head\(\) returns \(16, 96\); ex"
    ):
        model_config(Nnx(Logits), ())
    with pytest.raises(ValueError, match=r"Nnx\.build must be a function of nnx.Rngs, got 3"):
        Nnx(3)
    with pytest.raises(ValueError, match=r"Nnx\.max_positions must be above 0 or None, got 0"):
        replace(own, max_positions=0)


@pytest.mark.filterwarnings("ignore:Transformer has no key-value cache")
@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            Training(remat="full"),
            "actor.remat='full' requires the built-in decoder; a user-defined model rematerializes",
        ),
        (
            Training(layout=Layout(stage=2)),
            "actor: stage=2 requires the built-in decoder, but the model is Transformer, a user-defined module; set",
        ),
        (Training(layout=Layout(tensor=2, generation_tensor=2)), "1 key-value heads do not split 2 ways"),
        (
            Training(lora=Lora()),
            "lora requires the built-in decoder, but the model is Transformer, a user-defined module; set lora=None",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_compiles(own, training, message):
    config = replace(learning(GRPO), model=own, actor=replace(training, tokens_per_microbatch=8192), devices=2)
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxrlhf.run(config, dry_run=True)


def test_it_is_not_planned(own):
    with pytest.raises(ValueError, match=r"the model is your own module .*set layouts yourself"):
        question_of(replace(learning(GRPO), model=own), machines())


# In a run.


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_it_learns_goes_on_from_a_checkpoint_and_is_evaluated(own, tmp_path, capsys):
    config = replace(learning(GRPO, old_logp="trainer"), model=own, checkpoint=Checkpointing(every_steps=22))
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    config = replace(config, actor=replace(config.actor, tokens_per_microbatch=longest))  # microbatches of one size
    logged = run(config, tmp_path / "whole")
    assert logged[0]["score/format"] <= 0.3
    assert logged[-1]["eval/accuracy"] >= 0.9
    assert all(record["sampler/logp_gap_max"] < 1e-5 for record in logged)
    assert len({record["compile/count"] for record in logged}) == 1
    assert "<lambda>" in json.loads((tmp_path / "whole" / "config.json").read_text())["model"]["build"]
    with pytest.raises(ValueError, match=r"trained a user-defined module .* no Hugging Face format"):
        export_policy(tmp_path / "whole", tmp_path / "exported")

    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_24")
    run(config, tmp_path / "cut")
    assert "resuming after step 22 of 24" in capsys.readouterr().out
    assert numbers(tmp_path / "cut" / "metrics.jsonl") == numbers(tmp_path / "whole" / "metrics.jsonl")

    with pytest.warns(RuntimeWarning, match="recomputes the whole sequence"):
        metrics = evaluate_policy(replace(config, workdir=str(tmp_path / "cut")), policy=None, samples=1, show=0)
    assert metrics["eval/accuracy"] == logged[-1]["eval/accuracy"]


@pytest.mark.seeds
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_critic_starts_from_it_on_a_mesh(own, tmp_path):
    config = replace(get_config(), model=own, steps=2, devices=4, actor=training(fsdp=2))
    logged = run(config, tmp_path)
    assert isinstance(config.algorithm, PPO)
    assert all(np.isfinite(record["critic/loss"]) for record in logged)
    assert all(record["sampler/logp_gap_max"] < 1e-5 for record in logged)
