"""Episodes turn by turn: sampled tokens do not depend on other episodes or on timing."""

import functools
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrlhf import models
from jaxrlhf.agent_loop import AgentLoop
from jaxrlhf.agent_loop.recorded import recorded_episode
from jaxrlhf.batch import Problem
from jaxrlhf.config import Environment, Sampling, Tools
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.conversation import Conversation, TokenSequence
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine import Completion, Engine
from jaxrlhf.engine.service import EngineService
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import FAILURES, STOP_CAUSES, TRUNCATIONS, Opening
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.serving.sessions import RecordedEpisode
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings

pytestmark = pytest.mark.usefixtures("programs")

TOKENIZER = embedded_tokenizer()
MODEL = ModelConfig(
    family="qwen2",
    vocab_size=len(TOKENIZER),
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
PROMPT, RESPONSE = 16, 176
TALKS = Environment(
    factory="talking_environments:Talks", max_turns=20, turn_tokens=6, cut_turns="close", observation_tokens=12
)
TURNS = 10


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    shapes = models.param_shapes(MODEL, "lm")
    return jax.tree.map(lambda leaf: np.float32(0.1 * rng.standard_normal(leaf.shape)), shapes)


@pytest.fixture(scope="module")
def engine(weights):
    """Eight slots on one device; programs for prompts of two lengths and caches of two sizes."""
    mesh = mesh_of({}, jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", 64)
        patch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", 96)
        made = Engine(
            MODEL,
            mesh,
            slots=8,
            max_prompt_tokens=PROMPT,
            max_response_tokens=RESPONSE,
            stop_tokens=(TOKENIZER.eos_token_id,),
            decode_tokens_per_dispatch=4,
            slot_axes=SLOT_AXES,
            kv_head_axis="tensor",
        )
    made.load(jax.device_put(weights, shardings(mesh, models.param_dims(MODEL, "lm"), GENERATE)), version=3)
    return made


@pytest.fixture(scope="module")
def loop():
    with EnvironmentPool((TALKS,)) as pool:
        yield AgentLoop(TALKS, ChatFormat(TOKENIZER), pool, PROMPT, RESPONSE)


def problems(count, *, pause_s=0.0, first=0):
    """Problems with environments of ten turns; every second environment pauses before its answers."""
    return [
        Problem(
            first + number,
            "",
            (5,),
            record={"turns": TURNS, "pause_s": pause_s * (number % 2)},
            messages=[{"role": "user", "content": "?"}],
        )
        for number in range(count)
    ]


def prompts_of(batch):
    """Prompt length of each turn: the number of earlier tokens."""
    turn_BT = batch.episodes.turn_BT
    return [int((row_T == turn).argmax()) for row_T in turn_BT for turn in range(row_T.max() + 1)]


def run(loop, engine, problems, copies=2):
    return loop.run(engine, problems, Sampling(), copies=copies, seed=11, width=PROMPT + RESPONSE)


@pytest.fixture(scope="module")
def together(loop, engine):
    return run(loop, engine, problems(6))


def test_the_log_probabilities_of_ten_turns_equal_the_trainers(together, weights):
    sequences = together.sequences
    position_BT = np.broadcast_to(np.arange(PROMPT + RESPONSE), sequences.token_BT.shape)
    inside_BT = (position_BT < sequences.length_B[:, None]).astype(np.int32)
    hidden = models.hidden_states(weights, MODEL, sequences.token_BT, position_BT, inside_BT).hidden_RWD
    logits_BTV = models.logits(weights, MODEL, hidden)
    logp_BT = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits_BTV))[:, :-1], sequences.token_BT[:, 1:, None], axis=2
    )[..., 0]
    mask_BT = sequences.mask_BT[:, 1:]
    gap_BT = np.abs(logp_BT - together.sampler_logp_BT[:, 1:])[mask_BT]
    assert gap_BT.max() < 1e-5
    assert mask_BT.sum() > 12 * TURNS
    assert not together.sampler_logp_BT[~sequences.mask_BT].any()


def test_tokens_have_their_turn_numbers(together):
    rollout = together
    assert rollout.episodes.episode_B.tolist() == list(range(12))
    for row, record in enumerate(together.episodes.records):
        assert (record.stop, len(record.turns)) == ("done", TURNS)
        turn_T, mask_T = rollout.episodes.turn_BT[row], rollout.sequences.mask_BT[row]
        assert ((turn_T >= 0) == mask_T).all()
        for number, turn in enumerate(record.turns):
            own = np.flatnonzero(turn_T == number)
            assert tuple(rollout.sequences.token_BT[row, own]) == turn.reply.tokens
            assert (np.diff(own) == 1).all()
            paid_T = rollout.episodes.reward_BT[row, own]
            assert paid_T[-1] == pytest.approx(turn.reward) and not paid_T[:-1].any()
        assert rollout.episodes.reward_BT[row].sum() == pytest.approx(record.environment_reward, rel=1e-5)
        assert record.metrics == {"heard": TURNS + 1}


def test_turns_in_equal_states_have_one_anchor(together):
    anchor_BT, turn_BT = together.episodes.anchor_BT, together.episodes.turn_BT
    even, odd = ({*anchor_BT[(turn_BT >= 0) & (turn_BT % 2 == parity)].tolist()} for parity in (0, 1))
    assert len(even) == len(odd) == 1 and even != odd  # `Talks` names two states, which take turns


def test_an_episode_does_not_depend_on_other_episodes_with_slow_tools(loop, engine, together):
    slow = run(loop, engine, problems(6, pause_s=0.05))
    alone = run(loop, engine, problems(1, first=4))
    assert {record.stop for batch in (slow, alone) for record in batch.episodes.records} == {"done"}
    for name in ("token_BT", "length_B", "mask_BT"):
        ours, theirs = (getattr(batch.sequences, name) for batch in (slow, together))
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(getattr(alone.sequences, name), theirs[8:10])
    gap_BT = np.abs(alone.sampler_logp_BT - together.sampler_logp_BT[8:10])
    assert gap_BT.max() < 1e-5


class LastFirst(EnvironmentPool):
    """Pool that answers the steps of a turn in reverse order."""

    def __init__(self, *args, episodes):
        super().__init__(*args)
        self.held, self.episodes, self.lock = [], episodes, threading.Lock()

    def step(self, episode, reply):
        answered, given = super().step(episode, reply), Future()
        self.held.append((answered, given))
        answered.add_done_callback(self.release)
        return given

    def release(self, _):
        with self.lock:
            if len(self.held) < self.episodes or not all(answered.done() for answered, _ in self.held):
                return
            ready, self.held = self.held, []
        for answered, given in reversed(ready):
            given.set_result(answered.result())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "pool_of"),
    [(12, functools.partial(LastFirst, episodes=12)), (1, EnvironmentPool), (4, EnvironmentPool)],
    ids=["answers in reverse", "one process", "four processes"],
)
def test_tokens_depend_neither_on_the_order_of_answers_nor_on_processes(loop, engine, together, processes, pool_of):
    settings = replace(TALKS, episodes_per_process=12 // processes, workers=processes)
    with pool_of((settings,)) as pool:
        batch = run(replace(loop, environment=settings, pool=pool), engine, problems(6))
    assert {record.stop for record in batch.episodes.records} == {"done"}
    for name in ("token_BT", "length_B", "mask_BT"):
        np.testing.assert_array_equal(getattr(batch.sequences, name), getattr(together.sequences, name))


def test_later_turns_compute_only_new_tokens(loop, engine):
    """At most a quarter of all prompt tokens is prefilled: a prefill starts at the shortest cached prefix."""
    before = engine.prefill.prompt_tokens, engine.prefill.reused_tokens
    batch = run(loop, engine, problems(4), copies=1)
    assert {record.stop for record in batch.episodes.records} == {"done"}
    asked, reused = engine.prefill.prompt_tokens - before[0], engine.prefill.reused_tokens - before[1]
    assert asked == sum(length for length in prompts_of(batch))
    assert reused > 0.75 * asked


ENDS = {
    "turns": {"max_turns": 3},
    "tokens_of_turn": {"cut_turns": "end"},
    "episode_timeout": {"episode_s": 0.2},
    "environment_timeout": {"call_s": 0.1},
    "environment_truncated": {"factory": "talking_environments:GivesUp"},
}
"""Settings of an environment by the cause that ends its episodes."""


@pytest.mark.parametrize("stop", ENDS)
def test_the_cause_of_the_end_is_recorded(loop, engine, stop):
    settings = replace(TALKS, **ENDS[stop])
    with EnvironmentPool((settings,)) as pool:
        pause_s = 1.0 if stop.endswith("timeout") else 0.0
        batch = run(replace(loop, environment=settings, pool=pool), engine, problems(2, pause_s=pause_s), copies=1)
    assert batch.episodes.records[1].stop == stop
    assert bool(batch.truncated_B[1]) == (stop in TRUNCATIONS)
    assert bool(batch.episodes.records[1].failure) == (stop in FAILURES or stop == "episode_timeout")


def test_an_episode_ends_at_its_token_limit(loop, engine):
    batch = run(replace(loop, max_response_tokens=20), engine, problems(2), copies=1)
    assert {record.stop for record in batch.episodes.records} == {"tokens_of_episode"}
    assert all(len(record.turns) > 1 for record in batch.episodes.records)
    assert all(batch.truncated_B)


SAID = {"answered": ["<<1*7>>", "7"], "tool_calls": ["<<1*7>>", "<<7*1>>"], "malformed_call": ["<<1*7"]}
"""Replies of an episode with a tool by the cause of its end."""


@pytest.fixture(scope="module")
def calculates():
    settings = Tools(functions=("talking_environments:calculator",), max_calls=1, malformed_calls="end")
    with EnvironmentPool((settings,)) as pool:
        yield AgentLoop(settings, ChatFormat(TOKENIZER), pool, PROMPT, RESPONSE)


@pytest.mark.parametrize(
    ("stop", "closing"),
    [*((stop, "<|eos|>") for stop in SAID), ("answered", "")],
    ids=[*SAID, "by a token that is not the template's"],
)
def test_too_many_calls_end_an_episode(calculates, engine, monkeypatch, stop, closing):
    """The replies are scripted, because random weights call no tool."""
    monkeypatch.setattr(EngineService, "submit", written(text + closing for text in SAID[stop]))
    record = run(calculates, engine, problems(1), copies=1).episodes.records[0]
    assert record.stop == stop
    assert [turn.reply.text for turn in record.turns] == SAID[stop]


def written(replies, *, truncated=False):
    """Return an `EngineService.submit` that answers with these replies, and never again after the last."""
    left = iter(replies)

    def submit(service, request, sampling, *, seed):
        answered = Future()
        if (text := next(left, None)) is not None:
            tokens = tuple(TOKENIZER.encode(text, add_special_tokens=False))
            answered.set_result(Completion(request.request_id, tokens, (-1.0,) * len(tokens), truncated, 3))
        return answered

    return submit


def test_a_truncated_reply_without_calls_is_not_an_answer(calculates, engine, monkeypatch):
    monkeypatch.setattr(EngineService, "submit", written(["<<1*7>>", "12"], truncated=True))
    settings = replace(calculates.environment, cut_turns="close", max_calls=2)
    batch = run(replace(calculates, environment=settings), engine, problems(1), copies=1)
    assert [(record.stop, len(record.turns)) for record in batch.episodes.records] == [("tokens_of_turn", 2)]
    assert batch.truncated_B.all()


@pytest.mark.slow
def test_an_episode_that_times_out_during_a_reply_gets_its_final_reward(engine, monkeypatch):
    monkeypatch.setattr(EngineService, "submit", written(["<<1>><|eos|>"]))
    settings = replace(TALKS, factory="talking_environments:Answers", episode_s=1.0)
    with EnvironmentPool((settings,)) as pool:
        batch = run(AgentLoop(settings, ChatFormat(TOKENIZER), pool, PROMPT, RESPONSE), engine, problems(1), copies=1)
    assert [(record.stop, record.environment_reward) for record in batch.episodes.records] == [("episode_timeout", 1.0)]
    assert batch.episodes.reward_BT.sum() == 1.0


def test_every_stop_cause_is_tested():
    """Causes that no table above lists have a test of their own in this folder."""
    assert {"done", "environment_error", "tokens_of_episode", *ENDS, *SAID} == set(STOP_CAUSES)


def test_a_first_prompt_that_is_too_long_fails_only_its_episode(loop, engine):
    batch = run(replace(loop, max_prompt_tokens=3), engine, problems(1), copies=1)
    assert batch.episodes.records[0].stop == "environment_error"
    assert "rollout.max_prompt_tokens=3" in batch.episodes.records[0].failure
    assert not batch.sequences.mask_BT.any()


def test_invalid_tool_schemas_fail_only_their_episode(loop, engine, monkeypatch):
    opening = Future()
    tools = [{"type": "function", "function": {"name": "f"}}] * 2
    opening.set_result(Opening([{"role": "user", "content": "?"}], tools))
    monkeypatch.setattr(EnvironmentPool, "start", lambda *_: opening)
    [record] = run(loop, engine, problems(1), copies=1).episodes.records
    assert record.stop == "environment_error" and "two tools have the name 'f'" in record.failure


def test_a_rewritten_history_that_is_too_long_is_not_a_row(loop, engine, monkeypatch):
    def rewrites(conversation, _):
        conversation._streams.append(
            replace(conversation._streams[0], tokens=[7] * (PROMPT + RESPONSE + 1), sampled=[])
        )

    monkeypatch.setattr(ChatFormat, "keeps", lambda *_, **__: False)
    monkeypatch.setattr(Conversation, "_follow", rewrites)
    settings = replace(TALKS, history="as_templated")
    batch = run(replace(loop, environment=settings), engine, problems(1), copies=1)
    assert [record.stop for record in batch.episodes.records] == ["tokens_of_episode"]
    assert batch.sequences.mask_BT.any(axis=1).tolist() == [True]


@pytest.mark.slow
def test_a_class_with_tools_as_methods_appends_to_the_records_prompt(engine):
    """Environment in TRL's form: `reset` returns a text for the prompt, methods are tools, `get_reward` pays."""
    settings = replace(TALKS, factory="talking_environments:Answers")
    with EnvironmentPool((settings,)) as pool:
        batch = run(AgentLoop(settings, ChatFormat(TOKENIZER), pool, PROMPT, RESPONSE), engine, problems(1), copies=1)
    record = batch.episodes.records[0]
    assert [message["content"] for message in record.opening] == ["? Ask."]
    prompt = TOKENIZER.apply_chat_template(list(record.opening), add_generation_prompt=True, return_dict=False)
    assert batch.sequences.token_BT[0, : len(prompt)].tolist() == prompt
    assert record.environment_reward == sum(len(turn.calls) for turn in record.turns)


def test_a_stop_text_ends_a_reply_and_the_next_turn_continues():
    """No end of turn was sampled, so one is inserted, and the episode does not count as truncated."""
    conversation = Conversation(ChatFormat(TOKENIZER), [{"role": "user", "content": "1"}])
    sampled = TOKENIZER.encode("12", add_special_tokens=False)
    reply = conversation.sampled(sampled, [-1.0] * len(sampled), ended=True)
    assert reply.ended
    before = conversation.prompt
    conversation.observe([{"role": "user", "content": "3"}])
    whole = TOKENIZER.decode(conversation.prompt[len(before) :])
    assert whole == "<|eos|><|user|>3<|assistant|>"
    assert sum(conversation.sequences()[0].mask) == len(sampled)


def test_every_sequence_of_an_agents_episode_has_a_cause():
    row = TokenSequence((5, 7, 8), (0, 1, 0), (0.0, -1.0, 0.0), (-1, 0, -1), (-1, 3, -1))
    recorded = RecordedEpisode((row,) * 4, ((None,),) * 4, {}, None, 4, Counter({"template": 1}), Counter())
    finished = recorded_episode(problems(1)[0], 0, 0, ChatFormat(TOKENIZER), recorded, 1.0, "done", "")
    assert finished.record.forks == {"template": 1, "branch": 2}
    assert [sequence.turn[1] for sequence in finished.sequences] == [0, 1, 2, 3]
