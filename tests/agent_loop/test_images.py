"""Episodes with pictures: the trainer computes the log-probabilities that the sampler reported."""

import base64
import copy
import functools
import io
import pickle
import re
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import PIL.ImageFile
import pytest
import seeing_environments
from packed_arrays import PackedArrays
from tiny_models import random_params
from tiny_runs import numbers, records

import jaxrlhf
from jaxrlhf import models
from jaxrlhf.agent_loop import AgentLoop
from jaxrlhf.batch import Image, Problem, Sequences
from jaxrlhf.batching import shared_prompts
from jaxrlhf.batching.ragged import RaggedBatch
from jaxrlhf.config import Agent, Checkpointing, Environment, Evaluation, Refusal, Rollout, Sampling, Shapes, Tools
from jaxrlhf.config import load as load_configuration
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.conversation import Conversation
from jaxrlhf.conversations.images import mark_images, restore_images, tokenize_marked
from jaxrlhf.data.sources import load_problems
from jaxrlhf.engine import Engine, Request
from jaxrlhf.environments.answers import tool_content
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import EnvironmentFailure, Reply, ShownImage, ToolCall
from jaxrlhf.models import model_config, tokenizer_of
from jaxrlhf.models.vision.reader import image_reader
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of

pytestmark = pytest.mark.usefixtures("programs")

PROMPT, RESPONSE, TURNS = 32, 128, 3
SHOWS = Environment(
    factory="seeing_environments:Shows", max_turns=8, turn_tokens=5, cut_turns="close", observation_tokens=48
)


SHOWS_ONE = replace(SHOWS, factory="seeing_environments:ShowsOne", max_turns=2)


def small_model():
    """Return a model with one layer and a vision tower of one layer."""
    small = load_configuration("grpo_shapes").model
    small = replace(small, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8)
    return replace(small, vision=replace(small.vision, hidden_size=16, intermediate_size=16, num_layers=1))


@functools.cache
def parts():
    """Return shape, tokenizer, image reader and weights of a tiny vision policy, and an engine with these weights."""
    config = replace(load_configuration("grpo_shapes"), model=small_model())
    tokenizer = tokenizer_of(config)
    shape = model_config(config.model, tokenizer)
    reader = image_reader(config, shape, tokenizer)
    params = random_params(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", 64)
        patch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", 80)
        engine = Engine(
            shape,
            mesh_of({}, jax.devices()[:1]),
            slots=4,
            max_prompt_tokens=PROMPT,
            max_response_tokens=RESPONSE,
            stop_tokens=(tokenizer.eos_token_id,),
            decode_tokens_per_dispatch=4,
            pixels=reader.patches,
            slot_axes=SLOT_AXES,
            kv_head_axis="tensor",
        )
    engine.load(jax.device_put(params, jax.devices()[0]), version=1)
    return shape, tokenizer, reader, params, engine


def run(settings, problems, *, copies=2, form=None):
    _, tokenizer, reader, _, engine = parts()
    with EnvironmentPool((settings,)) as pool:
        loop = AgentLoop(settings, form or ChatFormat(tokenizer, reader=reader), pool, PROMPT, RESPONSE)
        return loop.run(engine, problems, Sampling(), copies=copies, seed=5, width=PROMPT + RESPONSE)


def problem(number, **record):
    return Problem(number, "", (5,), record={"turns": TURNS, **record}, messages=[{"role": "user", "content": "?"}])


def with_picture(number):
    """Return a problem with a picture in its prompt."""
    _, tokenizer, reader, _, _ = parts()
    data = Shapes(train_problems=1)
    (one,) = load_problems(data, tokenizer, split="train", max_prompt_tokens=PROMPT, reader=reader).problems
    return replace(one, prompt_id=number, record={"turns": TURNS, "own": True})


def logp_of(sequences):
    """Compute log-probabilities as in training, in rows with shared prompts."""
    shape, _, reader, params, _ = parts()
    packing = PackedArrays(
        sequences, rows=2, row_tokens=4 * (PROMPT + RESPONSE), vision=shape.vision, pixels=reader.patches
    )

    @jax.jit
    def compute(params, rows):
        tokens = rows.token_RW, rows.position_RW, rows.segment_RW
        output = models.hidden_states(params, shape, *tokens, shared_prefix=rows.shared_prefix, images=rows.images)
        return models.token_logp(params, shape, output.hidden_RWD, rows.token_RW, rows.mask_RW).logp

    rows = [compute(params, jax.tree.map(jnp.asarray, part)) for part in packing.rows()]
    return packing.unpack(np.stack(rows))


@functools.cache
def played():
    return run(SHOWS, [problem(0), with_picture(1)])


@pytest.mark.slow
def test_every_turn_sees_the_earlier_pictures():
    """Pictures of `reset`, of `step`, and of a record's prompt."""
    batch = played()
    sequences = batch.sequences
    assert [record.stop for record in batch.episodes.records] == ["done"] * 4
    assert [len(images) for images in sequences.images_B] == [TURNS] * 4
    mask_BT, token = sequences.mask_BT, parts()[2].placeholders.token
    for row, images in enumerate(sequences.images_B):
        places = [place for one in images for place in range(one.start, one.start + one.tokens)]
        there = (sequences.token_BT[row] == token) & ~mask_BT[row]
        assert np.flatnonzero(there).tolist() == places
    np.testing.assert_allclose(logp_of(sequences)[mask_BT], batch.sampler_logp_BT[mask_BT], atol=1e-4)


@pytest.mark.slow
def test_probabilities_depend_on_the_pictures():
    """They depend on pictures of later turns and on pictures of the prompt."""
    sequences = played().sequences
    for place in range(TURNS):
        images_B = np.empty(4, object)
        for row, images in enumerate(sequences.images_B):
            other = seeing_environments.picture("other", row, size=tuple(14 * n // 2 for n in images[place].grid[1:]))
            stream = io.BytesIO()
            other.save(stream, "PNG")
            url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
            new = parts()[2].refer(url, place="here")
            assert new.grid == images[place].grid
            images_B[row] = tuple(replace(new, start=one.start) if n == place else one for n, one in enumerate(images))
        changed_BT = np.abs(logp_of(replace(sequences, images_B=images_B)) - played().sampler_logp_BT)
        for row, images in enumerate(sequences.images_B):
            own_T, start = sequences.mask_BT[row], images[place].start
            assert changed_BT[row][own_T & (np.arange(len(own_T)) > start)].max() > 1e-3
            assert changed_BT[row][own_T & (np.arange(len(own_T)) < start)].max(initial=0) < 1e-4


@pytest.mark.slow
def test_pictures_with_equal_content_are_stored_once():
    """Rows and records of a batch share one object for each picture, and a pickle of the batch holds its content."""
    batch = played()
    shown = [image.source for images in batch.sequences.images_B for image in images]
    shown = [source for source in shown if isinstance(source, ShownImage)]
    messages = [message for record in batch.episodes.records for message in record.messages]
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    told = {
        id(part["image_url"]["url"]) for part in parts if isinstance(part.get("image_url", {}).get("url"), ShownImage)
    }
    assert len(shown) == 2 * TURNS + 2 * (TURNS - 1) and told >= set(map(id, shown))
    assert all(one.load().startswith("data:image/png;base64,") for one in shown)
    kept = pickle.loads(pickle.dumps(batch)).sequences.images_B
    assert kept.tolist() == batch.sequences.images_B.tolist()
    assert pickle.dumps(batch).count(shown[0].load().encode()) == 1


def test_a_records_prompt_has_the_same_tokens_in_a_conversation():
    _, tokenizer, reader, _, _ = parts()
    one = with_picture(0)
    started = Conversation(ChatFormat(tokenizer, reader=reader), restore_images(one.messages, one.images))
    assert (started.prompt, started.images) == (one.prompt_tokens, one.images)


def shared(sequences: Sequences) -> np.ndarray:
    return shared_prompts.shared_prefixes(RaggedBatch.of(sequences))


def test_prompts_with_different_pictures_are_not_shared():
    """Their tokens are equal."""
    token_BT = np.array([[1, 2, 9, 9, 3, 4, 5]] * 3)
    mask_BT = np.array([[0, 0, 0, 0, 0, 0, 1]] * 3, bool)
    images_B = np.empty(3, object)
    for row, digest in enumerate("aab"):
        images_B[row] = (Image("here", digest, (1, 2, 4), 2, 2),)
    sequences = Sequences(token_BT, np.full(3, 7), mask_BT, np.zeros(3, np.int64))
    assert shared(sequences).tolist() == [5, 5, 5]
    assert shared(replace(sequences, images_B=images_B)).tolist() == [2, 2, 2]
    images_B[2] = images_B[0]
    assert shared(replace(sequences, images_B=images_B)).tolist() == [5, 5, 5]
    images_B[2] = ()
    assert shared(replace(sequences, images_B=images_B)).tolist() == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "said"),
    [("Damaged", "no image"), ("TooLarge", "observation_tokens=48")],
)
def test_pictures_that_cannot_be_shown_fail_the_episode(environment, said):
    batch = run(replace(SHOWS, factory=f"seeing_environments:{environment}"), [problem(0)], copies=1)
    (record,) = batch.episodes.records
    assert record.stop == "environment_error" and said in record.failure


def test_pictures_are_refused_for_a_policy_without_vision():
    told, sources = mark_images([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}])
    with pytest.raises(EnvironmentFailure, match="vision tower"):
        tokenize_marked(told, sources, None, lambda messages: ())


@pytest.mark.parametrize("sizes", [[(8193, 8192)], [(8192, 4096)] * 3], ids=["one", "together"])
def test_a_small_file_of_many_pixels_is_refused_before_it_is_decoded(monkeypatch, sizes):
    """A tool may return such a picture, compressed to a few kilobytes."""
    reader, shown = parts()[2], []
    for size in sizes:
        stream = io.BytesIO()
        PIL.Image.new("1", size).save(stream, "PNG", optimize=True)
        shown.append({"type": "image", "image": stream.getvalue()})
    told, sources = mark_images([{"role": "tool", "content": tool_content(shown, 1 << 20)}])
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", lambda self: pytest.fail("the picture was decoded"))
    with pytest.raises(EnvironmentFailure, match="more than 67108864"):
        tokenize_marked(told, sources, reader, lambda messages: ())


def test_texts_with_pictures_must_not_spell_the_mark():
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    with pytest.raises(EnvironmentFailure, match="spell"):
        mark_images([{"role": "user", "content": [image, {"type": "text", "text": "an <image>"}]}])


@pytest.mark.slow
def test_a_sampled_placeholder_is_not_a_picture():
    """In an earlier reply it is a token; in a first prompt it is refused."""
    _, _, reader, _, engine = parts()
    one, token = with_picture(0), reader.placeholders.token
    prompt = (*one.prompt_tokens, 7, token, 8)
    with pytest.raises(Refusal):
        engine.generate([Request(0, prompt, images=one.images)], Sampling(), seed=0)
    asked = Request(0, prompt, images=one.images, has_replies=True, max_tokens=4)
    (done,) = engine.generate([asked], Sampling(), seed=0)
    tokens, count = (*prompt, *done.tokens), len(prompt)
    mask_BT = np.arange(len(tokens))[None] >= count
    images_B = np.empty(1, object)
    images_B[0] = one.images
    sequences = Sequences(
        np.array([tokens]), np.array([len(tokens)]), mask_BT, np.zeros(1, np.int64), images_B=images_B
    )
    np.testing.assert_allclose(logp_of(sequences)[mask_BT], done.logps, atol=1e-4)


def rewriting():
    """Return a chat format whose template writes earlier replies differently from the last reply."""
    _, tokenizer, reader, _, _ = parts()
    rewritten = copy.deepcopy(tokenizer)
    said = "message.content }}"
    assert rewritten.chat_template.count(said) == 1
    earlier = "('so: ' if message.role == 'assistant' and not loop.last else '') + " + said
    rewritten.chat_template = rewritten.chat_template.replace(said, earlier)
    return ChatFormat(rewritten, reader=reader)


@pytest.mark.slow
def test_a_rewritten_history_shows_its_pictures_again():
    """Each reply starts a further sequence, trained as it was sampled."""
    batch = run(replace(SHOWS, history="as_templated"), [problem(0), with_picture(1)], form=rewriting())
    sequences, episodes = batch.sequences, batch.episodes
    assert [record.stop for record in batch.episodes.records] == ["done"] * 4
    assert [record.forks for record in batch.episodes.records] == [{"template": TURNS - 1}] * 4
    assert [len(images) for images in sequences.images_B] == [1, 2, 3] * 4
    mask_BT, token = sequences.mask_BT, parts()[2].placeholders.token
    for row, images in enumerate(sequences.images_B):
        places = [place for one in images for place in range(one.start, one.start + one.tokens)]
        assert np.flatnonzero((sequences.token_BT[row] == token) & ~mask_BT[row]).tolist() == places
        assert set(episodes.turn_BT[row][mask_BT[row]].tolist()) == {row % TURNS}
    np.testing.assert_allclose(logp_of(sequences)[mask_BT], batch.sampler_logp_BT[mask_BT], atol=1e-4)


@pytest.mark.slow
def test_a_mark_in_a_reply_is_not_a_picture_in_a_rewritten_history():
    form, one = rewriting(), with_picture(0)
    conversation = Conversation(form, restore_images(one.messages, one.images), history="as_templated")
    sampled = (*form.tokenizer.encode("an <image>", add_special_tokens=False), form.tokenizer.eos_token_id)
    conversation.sampled(sampled, [0.0] * len(sampled))
    conversation.observe(played().episodes.records[0].opening)
    digests = [image.digest for image in conversation.images]
    assert digests == [one.images[0].digest, played().sequences.images_B[0][0].digest]
    assert "so: an <image>" in form.tokenizer.decode(conversation.prompt)


def test_a_record_without_pictures_may_spell_a_mark():
    assert restore_images([{"role": "user", "content": "an <image>"}], ()) == [
        {"role": "user", "content": "an <image>"}
    ]


@pytest.mark.slow
def test_pictures_of_an_agent_program_are_trained_on():
    """Two sequences of an episode, whose first prompts differ only by their pictures."""
    batch = run(Agent(program="seeing_environments:asks", turn_tokens=5), [problem(0), problem(1)])
    sequences = batch.sequences
    assert [record.stop for record in batch.episodes.records] == ["done"] * 4
    assert sorted(map(len, sequences.images_B)) == [1] * 4 + [2] * 4
    for row in range(0, 8, 2):
        one, other = sequences.images_B[row][0], sequences.images_B[row + 1][0]
        started = one.start + one.tokens
        assert one.start == other.start and one.digest != other.digest
        assert (sequences.token_BT[row, :started] == sequences.token_BT[row + 1, :started]).all()
    mask_BT = sequences.mask_BT
    np.testing.assert_allclose(logp_of(sequences)[mask_BT], batch.sampler_logp_BT[mask_BT], atol=1e-4)


@pytest.mark.seeds
def test_histories_of_agent_programs_are_rewritten_with_their_pictures():
    settings = Agent(program="seeing_environments:asks", turn_tokens=5, history="as_templated")
    batch = run(settings, [problem(0)], copies=1, form=rewriting())
    sequences, (record,) = batch.sequences, batch.episodes.records
    assert record.stop == "done" and record.forks == {"template": 1, "branch": 1}
    assert sorted(map(len, sequences.images_B)) == [1, 1, 2]
    mask_BT = sequences.mask_BT
    np.testing.assert_allclose(logp_of(sequences)[mask_BT], batch.sampler_logp_BT[mask_BT], atol=1e-4)


@pytest.mark.slow
def test_tools_answer_with_pictures():
    tools = Tools(functions=("seeing_environments:draw", "seeing_environments:read"))
    calls = tuple(ToolCall(name, {"text": "a"}, call_id=name) for name in ("draw", "read"))
    with EnvironmentPool((tools,)) as pool:
        pool.start(0, 0, {}, 0).result(60)
        shown, read = pool.step(0, Reply("", "", calls=calls)).result(60).messages
    (part,) = shown["content"]
    encoded = part["image_url"]["url"].removeprefix("data:image/png;base64,")
    seen = PIL.Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert seen.tobytes() == seeing_environments.picture("a").tobytes()
    assert read["content"] == '[{"type": "text", "text": "a"}]', "what has no picture is told as before"


def shown_run(workdir, *, steps, **rollout):
    """Return a configuration with two pictures per episode."""
    shipped, sizes = load_configuration("grpo_shapes"), {"max_prompt_tokens": PROMPT, "max_response_tokens": 64}
    return replace(
        shipped,
        algorithm=replace(shipped.algorithm, responses_per_update=4),
        model=small_model(),
        data=Shapes(train_problems=16, eval_problems=2),
        cold_start=None,
        environment=SHOWS_ONE,
        rollout=Rollout(prompts_per_step=4, responses_per_prompt=2, **sizes, **rollout),
        steps=steps,
        evaluation=Evaluation(every_steps=steps),
        checkpoint=Checkpointing(every_steps=1, keep_last=steps, keep_best=0),
        devices=1,
        workdir=str(workdir),
    )


@pytest.mark.seeds
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_policy_trains_on_pictures_of_its_environment(tmp_path):
    assert jaxrlhf.run(shown_run(tmp_path, steps=2)).finished
    metrics = records(tmp_path / "metrics.jsonl")
    assert all(record["sampler/logp_gap_max"] < 1e-4 for record in metrics)
    assert all(record["episode/turns_mean"] == 2 for record in metrics)
    sample = records(tmp_path / "samples.jsonl")[0]
    said = [message["content"] for message in sample["episode"]["messages"]]
    assert re.fullmatch("<image shown:[0-9a-f]{12}>Look.", said[0]), "a name, and not what the picture is of"
    assert re.fullmatch("Now:<image shown:[0-9a-f]{12}>", said[2])


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_checkpoint_contains_the_pictures_of_waiting_episodes(tmp_path, monkeypatch):
    """An asynchronous run resumes from its second step with equal numbers."""
    monkeypatch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", 96)
    monkeypatch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", 96)
    whole, cut = (shown_run(tmp_path / name, steps=3, staleness=1) for name in ("whole", "cut"))
    jaxrlhf.run(whole)
    shutil.copytree(whole.folder, cut.folder)
    shutil.rmtree(cut.folder / "checkpoints" / "step_3")
    waiting = next((cut.folder / "checkpoints" / "step_2").rglob("collected.pickle")).read_bytes()
    assert waiting.count(b"data:image/png;base64,") == 4 + 8, "the first of each group, and another of each episode"
    jaxrlhf.run(cut)
    assert numbers(cut.folder / "metrics.jsonl") == numbers(whole.folder / "metrics.jsonl")
    mine, theirs = (records(config.folder / "samples.jsonl") for config in (cut, whole))
    assert [sample["episode"]["messages"] for sample in mine] == [sample["episode"]["messages"] for sample in theirs]
