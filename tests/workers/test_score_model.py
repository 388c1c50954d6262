"""A reward model scores texts as transformers does, on any mesh."""

import json
import shutil
from contextlib import closing
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tiny_runs import get_config

from jaxrlhf import config
from jaxrlhf.batch import Problem
from jaxrlhf.batching.transfer_protocol import RankCoordinates
from jaxrlhf.config import Layout
from jaxrlhf.data.tokenizer import embedded_tokenizer, load_tokenizer
from jaxrlhf.engine import Completion
from jaxrlhf.models import load_params, read_config
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.sharding.mesh import factored_mesh
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.workers import remat
from jaxrlhf.workers.build import Builder
from jaxrlhf.workers.generation.rollouts import to_rollout
from jaxrlhf.workers.reward import Reward
from jaxrlhf.workers.score_model import ScoreModel

TEXTS = [
    ("Tom has 3 apples.", " #### 3", True),
    ("Tom", "", False),
    ("Anna has 12 pears and eats 5. " * 5, "12-5=7\n#### 7", True),
    ("Anna has 12 pears and eats 5. " * 9, "é 12-5=7\n#### 7", False),
    ("x", "y", True),
    ("", "", True),
    ("far too long " * 200, "1", True),
    ("2", "4", False),
]
SCORABLE = [0, 1, 2, 3, 4, 7]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("judge")
    tokenizer = embedded_tokenizer()
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    shape = transformers.Qwen2Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    model = transformers.Qwen2ForSequenceClassification(shape).eval()
    model.save_pretrained(path)
    with torch.no_grad():
        written = [
            prompt + response + (tokenizer.eos_token if finished else "") for prompt, response, finished in TEXTS
        ]
        ids = [tokenizer.encode(text) for text in written]
        assert [tokens[-1] == tokenizer.eos_token_id for tokens in ids] == [finished for *_, finished in TEXTS]
        theirs = [model(torch.tensor([ids[n]])).logits.item() for n in SCORABLE]
    assert len(ids[6]) > 256
    widths = {max(64, 1 << (len(ids[n]) - 1).bit_length()) for n in SCORABLE}
    assert len(widths) > 1
    return path, np.float32(theirs), widths


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "layout", "tokens"), [(1, Layout(), 256), (8, Layout(fsdp=2, tensor=2), 1)])
def test_scores_equal_transformers(checkpoint, devices, layout, tokens):
    path, theirs, widths = checkpoint
    mesh = factored_mesh(layout, jax.devices()[:devices])
    model = ScoreModel(str(path), mesh=mesh, dtype=jnp.dtype("float32"), tokens_per_batch=tokens)
    score_B = model.score(TEXTS)
    np.testing.assert_allclose(score_B[SCORABLE], theirs, atol=1e-4)
    assert np.isnan(score_B[[5, 6]]).all()  # empty, and longer than the model's positions
    assert model.score([]).shape == (0,)
    assert model._forward._cache_size() == len(widths)


def test_a_checkpoint_that_pads_with_the_end_is_read_before_it(checkpoint, tmp_path):
    shutil.copytree(checkpoint[0], tmp_path, dirs_exist_ok=True)
    file, tokenizer = tmp_path / "config.json", load_tokenizer(str(tmp_path))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": tokenizer.eos_token_id}))
    theirs = transformers.Qwen2ForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = tokenizer.encode("".join(TEXTS[0][:2]) + tokenizer.eos_token)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.item()
    model = ScoreModel(str(tmp_path), mesh=factored_mesh(Layout(), jax.devices()[:1]), dtype=jnp.dtype("float32"))
    np.testing.assert_allclose(model.score(TEXTS[:1]), [expected], atol=1e-4)


def test_a_token_classifier_with_two_labels_scores_steps(checkpoint, tmp_path, refused):
    """A checkpoint as TRL's `PRMTrainer` saves it; its chance is that of label 1."""
    path, _, _ = checkpoint
    judge = transformers.Qwen2ForTokenClassification.from_pretrained(path, num_labels=2, ignore_mismatched_sizes=True)
    with torch.no_grad():
        judge.score.weight.normal_(generator=torch.Generator().manual_seed(1))
        judge.score.bias.copy_(torch.tensor([0.7, -0.6]))
    judge.eval().save_pretrained(tmp_path)
    tokenizer = embedded_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ids, ends = tokenizer.encode("Tom has 3."), []
    for step in ("3+1=4", "#### 6"):
        ids += tokenizer.encode(step + "\n", add_special_tokens=False)
        ends.append(len(ids) - 1)
    with torch.no_grad():
        chances = torch.softmax(judge(torch.tensor([ids])).logits, -1)[0, ends, 1].numpy()
    model = ScoreModel(str(tmp_path), mesh=factored_mesh(Layout(), jax.devices()[:1]), dtype=jnp.dtype("float32"))
    read = model.reading(config.ProcessModelReward(str(tmp_path), steps="product"))
    np.testing.assert_allclose(read([("Tom has 3.", "3+1=4\n#### 6", True)]), chances.prod(), atol=1e-5)
    with refused():
        model.reading(config.ModelReward(str(tmp_path)))
    shape = read_config(tmp_path)
    with refused():  # a critic would lose the bias
        load_params(tmp_path, shape, "value")
    judge.config.num_labels = 3
    judge.config.save_pretrained(tmp_path)
    with refused():
        ScoreModel(str(tmp_path), mesh=factored_mesh(Layout(), jax.devices()[:1]), dtype=jnp.dtype("float32"))


def test_scores_of_steps_equal_transformers_at_the_ends_of_steps(checkpoint):
    path, _, _ = checkpoint
    judge = transformers.Qwen2ForSequenceClassification.from_pretrained(path).eval()
    tokenizer = load_tokenizer(str(path))

    def ids_of(text):
        return tokenizer.encode(text, add_special_tokens=False)

    texts = [("Tom has 3.", "3+1=4\n4+2=6\n\n#### 6", True), ("Anna", "a long step " * 9 + "\n12", False)]
    chances = []
    for prompt, response, _ in texts:
        ids, ends = tokenizer.encode(prompt), []
        for step in filter(None, response.split("\n")):
            ids += ids_of(step) + ids_of("\n")
            ends.append(len(ids) - 1)
        with torch.no_grad():
            hidden = judge.model(torch.tensor([ids])).last_hidden_state[0, ends]
            chances.append(torch.sigmoid(judge.score(hidden)[:, 0]).numpy())
    assert [len(own) for own in chances] == [3, 2]
    mesh = factored_mesh(Layout(), jax.devices()[:1])
    model = ScoreModel(str(path), mesh=mesh, dtype=jnp.dtype("float32"))
    reductions = {"min": np.min, "last": lambda own: own[-1], "mean": np.mean, "product": np.prod}
    without = [("x", "", True), ("far too long " * 200, "1\n", True), ("x", " \n\n", True)]
    parts = tuple(config.ProcessModelReward(str(path), steps=steps) for steps in reductions)
    prompts, responses, finished = zip(*texts, *without, strict=True)
    models = {part.key: model.reading(part) for part in parts}
    with Scorer(config.Rewards(parts=parts), models=models) as scorer:
        scored = scorer.score(prompts, responses, [None] * 5, [{}] * 5, finished=finished)
    for part_B, reduce in zip(scored.parts.values(), reductions.values(), strict=True):
        np.testing.assert_allclose(part_B[:2], [reduce(own) for own in chances], atol=1e-4)
        assert np.isnan(part_B[2:]).all()
    assert scored.scorable_B.tolist() == [True, True, False, False, False]


def test_parts_that_read_one_checkpoint_share_its_weights(checkpoint):
    path = str(checkpoint[0])
    parts = (config.ProcessModelReward(path, steps="min"), config.ProcessModelReward(path, steps="mean", weight=0.0))
    settings = replace(get_config(), rewards=config.Rewards(parts=parts))
    pool = ResourcePool("all", tuple(jax.devices()[:1]))
    with closing(Builder(settings, embedded_tokenizer(), pool, ["reward"], progress=lambda *_: None)) as builder:
        read = [one.func.__self__ for one in builder.scorer()._models.values()]
        held = remat._held_bytes(builder.on, "reward", updates=False)
    apart = replace(settings, rewards=config.Rewards(parts=(replace(parts[0], layout=Layout(tensor=2)),)))
    with pytest.raises(ValueError, match=r"^reward: .*tensor=2 does not fill 1 devices"):  # before any weight is read
        Builder(apart, embedded_tokenizer(), pool, ["reward"], progress=lambda *_: None)
    assert len(read) == 2 and read[0] is read[1]
    assert held == sum(leaf.nbytes for leaf in jax.tree.leaves(read[0].parameters.tree))


def test_a_model_is_a_part_of_the_reward(checkpoint):
    path, theirs, _ = checkpoint
    model = ScoreModel(str(path), mesh=factored_mesh(Layout(), jax.devices()[:1]), dtype=jnp.dtype("float32"))
    rewards = config.Rewards(parts=(config.ModelReward(str(path), weight=2.0),))
    prompts, responses, finished = zip(*TEXTS, strict=True)
    with Scorer(rewards, models={str(path): model.score}) as scorer:
        scores = scorer.score(prompts, responses, [None] * len(TEXTS), [{}] * len(TEXTS), finished=finished)
    np.testing.assert_allclose(scores.score_B[SCORABLE], 2 * theirs, atol=1e-3)
    assert scores.scorable_B.tolist() == [True] * 5 + [False, False, True]
    assert scorer.counts == {"not-finite": 2}


def test_a_model_that_waits_in_host_memory_is_back_there_whatever_its_call_comes_to(checkpoint, monkeypatch):
    path, theirs, _ = checkpoint
    mesh = factored_mesh(Layout(), jax.devices()[:1])
    model = ScoreModel(str(path), mesh=mesh, dtype=jnp.dtype("float32"), offload=True)

    def places():
        return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(model.parameters.tree)}

    monkeypatch.setattr(model, "_forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.score(TEXTS)
    assert places() == {"pinned_host"}
    monkeypatch.undo()
    np.testing.assert_allclose(model.score(TEXTS)[SCORABLE], theirs, atol=1e-4)
    assert places() == {"pinned_host"}


def test_only_a_response_that_was_cut_off_is_not_finished():
    seen = []

    def judge(triples):
        seen.extend(triples)
        return np.zeros(len(triples))

    problems = [Problem(prompt_id=n, prompt=f"p{n}", prompt_tokens=(1,), answer=None) for n in range(2)]
    completions = [Completion(n, tokens=(5, n), logps=(0.0, 0.0), truncated=n == 1, version=0) for n in range(2)]
    rewards = config.Rewards(parts=(config.ModelReward("judge"),))
    with Scorer(rewards, models={"judge": judge}) as scorer:
        role = Reward(scorer, RankCoordinates.alone(0, 1), lambda tokens: str(tokens), lambda *_: None)
        role.compute_reward(problems, to_rollout(problems, completions, width=4))
    assert seen == [("p0", "(5, 0)", True), ("p1", "(5, 1)", False)]
