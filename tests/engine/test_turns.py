"""Requests that begin with what is in the cache: the same responses as from whole prompts, for what follows alone."""

import functools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_models import SMALL, gaussian, same_responses

from jaxrlhf import models
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.cache.contents import PrefixCache, PrefixMatch
from jaxrlhf.engine.programs import Prompts
from jaxrlhf.models.config import LatentAttention
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings

pytestmark = pytest.mark.usefixtures("programs")

MODEL = replace(SMALL, qk_norm=True, sliding_window=40, sliding_layers=(True, False))
LATENT = replace(
    MODEL,
    family="deepseek_v3",
    head_dim=12,
    num_kv_heads=4,
    qk_norm=False,
    sliding_window=None,
    sliding_layers=(),
    latent=LatentAttention(rank=8, query_rank=None, rope_dim=4, value_dim=6),
)
SEED = 5


@functools.cache
def build(
    model=MODEL, *, pages: bool = False, slots: int = 4, window: int = 4, decode=None, most_kept: int = 0, **sizes: int
) -> Engine:
    """One width of prompts and one size of the cache, so that little is compiled."""
    mesh = mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])
    execution = models.Execution(pipeline=models.pipeline_over(mesh, ("stage",), row_axes=SLOT_AXES))
    if pages:
        execution = models.Execution(pages_kernel="xla", mesh=mesh, row_axes=SLOT_AXES, head_axes=("tensor",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", 48)
        patch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", 64)
        patch.setattr("jaxrlhf.engine.cache.kv_cache._SIXTEENTHS", (16,))
        engine = Engine(
            model,
            mesh,
            slots=slots,
            max_prompt_tokens=48,
            max_response_tokens=16,
            stop_tokens=(3,),
            decode_tokens_per_dispatch=window,
            slot_axes=SLOT_AXES,
            kv_head_axis="tensor",
            execution=execution,
            decode=decode,
            most_kept=most_kept,
        )
    engine.load(jax.device_put(gaussian(model), shardings(mesh, models.param_dims(model, "lm"), GENERATE)), version=0)
    return engine


def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(1)
    return [tuple(rng.integers(4, 32, length).tolist()) for length in (23, 20, 30, 5)]


def turns(engine: Engine, *, keep: bool):
    """Completions of three turns of four conversations, each told two tokens in between."""
    conversations, completions = prompts(), []
    for turn in range(3):
        asked = [Request(4 * turn + i, prompt, max_tokens=5, keep=keep) for i, prompt in enumerate(conversations)]
        completions += engine.generate(asked, Sampling(temperature=1.1), seed=SEED)
        conversations = [
            (*prompt, *completion.tokens, 7, 8)
            for prompt, completion in zip(conversations, completions[-4:], strict=True)
        ]
    return completions


equal = functools.partial(same_responses, atol=2e-5)


@functools.cache
def whole(model=MODEL):
    return turns(build(model), keep=False)


ENGINES = {
    "replicas and heads": {"data": 2, "tensor": 2},
    "pages of replicas and heads": {"pages": True, "data": 2, "tensor": 2},
    "stages": {"stage": 2},
    "latents": {"model": LATENT},
}
FURTHER = {"stages": pytest.mark.seeds}
"""Engines of the last tier."""


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=FURTHER.get(name, pytest.mark.slow), id=name) for name, how in ENGINES.items()]
)
def test_a_turn_begins_where_the_last_one_ended(how):
    engine = build(**how)
    equal(turns(engine, keep=True), whole(how.get("model", MODEL)))
    lengths = [len(completion.tokens) for completion in whole(how.get("model", MODEL))]
    known = [len(prompt) + lengths[row] - 1 for row, prompt in enumerate(prompts())]
    assert engine.prefill.reused_tokens > sum(known), "nothing was reused in the third turn"


@pytest.fixture
def engine():
    """The engine of one device, with nothing in its cache."""
    engine = build()
    engine.free()
    return engine


def test_a_prompt_that_begins_like_another_shares_that(engine):
    system, before = tuple(range(4, 30)), engine.prefill.reused_tokens
    asked = [Request(index, (*system, index), max_tokens=4, keep=True) for index in range(3)]
    for request in asked:
        engine.generate([request], Sampling(), seed=SEED)
    assert engine.prefill.reused_tokens - before == 2 * len(system)


def test_requests_join_while_others_keep_their_turns(engine):
    long, first = Request(1, prompts()[0], max_tokens=16), Request(2, prompts()[1], max_tokens=4, keep=True)
    alone = [*engine.generate([long], Sampling(), seed=SEED), *engine.generate([first], Sampling(), seed=SEED)]
    engine.free()
    engine.add(long, Sampling(), seed=SEED)
    engine.add(first, Sampling(), seed=SEED)
    ended, second, before = [], None, engine.prefill.reused_tokens
    while engine.unfinished:
        ended += engine.step()
        if second is None and ended:
            second = Request(3, (*first.prompt_tokens, *ended[0].tokens, 5), max_tokens=4)
            engine.add(second, Sampling(), seed=SEED)
    assert [completion.request_id for completion in ended] == [2, 3, 1]
    assert engine.prefill.reused_tokens - before == len(first.prompt_tokens) + len(ended[0].tokens) - 1
    equal([ended[2], ended[0]], alone)
    engine.free()
    equal(ended[1:2], engine.generate([second], Sampling(), seed=SEED))


def test_what_is_kept_goes_when_others_need_its_room_or_it_is_released_or_weights_are_new(engine):
    def second_turn(between) -> int:
        engine.free()
        before = engine.prefill.reused_tokens
        [first] = engine.generate([Request(1, prompts()[0], max_tokens=8, keep=True)], Sampling(), seed=SEED)
        between()
        engine.generate([Request(2, (*prompts()[0], *first.tokens, 9), max_tokens=4)], Sampling(), seed=SEED)
        return engine.prefill.reused_tokens - before

    def fill():
        for request_id in (3, 4, 5, 6):
            engine.add(Request(request_id, prompts()[1], max_tokens=16), Sampling(), seed=SEED)
        while engine.unfinished:
            engine.step()

    assert second_turn(lambda: None) > len(prompts()[0])
    assert second_turn(lambda: engine.release(7)) > len(prompts()[0])
    assert second_turn(lambda: engine.release(1)) == 0
    assert second_turn(fill) == 0
    assert second_turn(lambda: engine.load(engine.weights.params, version=1)) == 0


def test_conversations_that_fill_all_slots_leave_each_other_theirs(engine, monkeypatch):
    """Prompts continue one after another here, so that each finds a slot while others still wait."""
    most = engine.prefill.most
    monkeypatch.setattr(engine.prefill, "most", lambda kind: 1 if kind.known_bits else most(kind))
    before, completions = engine.prefill.reused_tokens, turns(engine, keep=True)
    equal(completions, whole())
    first, second, _ = (sum(len(each.tokens) for each in completions[at : at + 4]) for at in (0, 4, 8))
    run_before = sum(map(len, prompts())) + first - 4
    assert engine.prefill.reused_tokens - before == run_before + (run_before + 4 + 2 * 4 + second - 4)


def test_a_later_prompt_may_be_longer_than_the_first_but_not_than_the_engine(engine):
    with pytest.raises(Refusal, match="a prompt of 57 tokens and a response of up to 8; expected a prompt of 1 to 56"):
        engine.add(Request(1, (5,) * 57, max_tokens=8), Sampling(), seed=SEED)
    with pytest.raises(Refusal, match="a prompt of 49 tokens and a response of up to 16; expected a prompt of 1 to 48"):
        engine.add(Request(1, (5,) * 49), Sampling(), seed=SEED)
    [completion] = engine.generate([Request(1, (5,) * 56, max_tokens=8)], Sampling(min_tokens=8), seed=SEED)
    assert len(completion.tokens) == 8


def test_few_programs_serve_conversations_of_all_lengths_and_none_takes_more_memory_than_the_rest(monkeypatch):
    """The engine's programs are recorded in place of compiled, and what is known of a prompt is made up."""
    longest, sizes, known = 8192, set(), {}
    engine = Engine(
        replace(MODEL, max_positions=longest),
        mesh_of({}, jax.devices()[:1]),
        slots=64,
        max_prompt_tokens=32,
        max_response_tokens=longest - 32,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=4,
    )
    engine.load(jax.tree.map(jax.numpy.asarray, gaussian(MODEL)), version=0)
    nothing = np.zeros((2, 1, 1, 2, 8))

    def recorded(names, program, params, layers, token_PS, *rest, out):
        chunk = program.keywords["chunk_tokens"]
        sizes.add((names[0], *token_PS.shape, chunk))
        return Prompts(np.zeros(1), models.Prefix(nothing, nothing), np.ones(1))

    contents = PrefixCache(slots=64)
    monkeypatch.setattr(engine.compiled, "run", recorded)
    monkeypatch.setattr(engine.cache, "prefix", lambda slots, slot_B, width: models.Prefix(nothing, nothing))
    monkeypatch.setattr(contents, "longest", lambda prompt: PrefixMatch(known.get(len(prompt), 0), 0))
    monkeypatch.setattr(contents, "reuse", lambda known: 0)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        length = int(2 ** rng.uniform(0, 13))
        known[length] = int(rng.integers(max(1, length - 600), length)) if rng.random() < 0.9 and length > 1 else 0
        most = engine.prefill.most(engine.prefill.kind(contents, (5,) * length))
        together = [(5,) * length] * int(rng.integers(1, most + 1))
        engine.prefill.run(together, engine.weights, engine.cache, contents, engine.book.slot_B)
    later = {each for each in sizes if each[0] == "prefill from"}
    assert len(later) <= 36 and {rows for _, rows, *_ in later} == {1, 2, 4, 8, 16, 32, 64}
    for name, rows, width, chunk in sizes:
        assert rows * width <= (8192 if name == "prefill from" else 2048) or rows == 1
        assert rows * (chunk or width) <= 2048
