"""A cache in pages: the same responses, memory that follows tokens, and no page that is lost."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from compiled import most_compilations
from tiny_models import SMALL, gaussian, same_responses

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.cache.block_manager import BlockManager
from jaxrlhf.engine.cache.kv_cache import PageCache
from jaxrlhf.models.attention.pages import NO_PAGE, PAGE_TOKENS
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings

pytestmark = pytest.mark.usefixtures("programs")

MODEL = replace(SMALL, qk_norm=True, sliding_window=40, sliding_layers=(True, False))
LONGEST_PROMPT, LONGEST_RESPONSE = 72, 96


def build(*, pages: bool, slots: int = 10, **sizes: int) -> Engine:
    """Few sizes of prompts and of the cache, so that little is compiled."""
    mesh = mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])
    axes = {"row_axes": SLOT_AXES, "head_axes": ("tensor",)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", 48)
        patch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", LONGEST_PROMPT + LONGEST_RESPONSE)
        patch.setattr("jaxrlhf.engine.cache.kv_cache._SIXTEENTHS", (4, 6, 16))
        patch.setattr("jaxrlhf.engine.buckets.FEWEST_SLOTS", 3)
        engine = Engine(
            MODEL,
            mesh,
            slots=slots,
            max_prompt_tokens=LONGEST_PROMPT,
            max_response_tokens=LONGEST_RESPONSE,
            stop_tokens=(3,),
            decode_tokens_per_dispatch=8,
            slot_axes=SLOT_AXES,
            kv_head_axis="tensor",
            execution=models.Execution(pages_kernel="xla", mesh=mesh, **axes) if pages else models.ONE_DEVICE,
        )
    engine.load(jax.device_put(gaussian(MODEL), shardings(mesh, models.param_dims(MODEL, "lm"), GENERATE)), version=0)
    return engine


def requests() -> list[Request]:
    """Groups with prompts of two pages and a part, less than a page, a page; three of them begin alike."""
    rng = np.random.default_rng(0)
    example = tuple(rng.integers(0, 32, 40).tolist())
    prompts = [(*example, *range(4, 30)), example[:5], example[:PAGE_TOKENS], (*example, 7, 8)]
    return [Request(4 * group + i, prompt) for group, prompt in enumerate(prompts) for i in range(4)]


def in_use(book: BlockManager) -> int:
    """Pages that some slot has."""
    return len(book._readers)


def generate(engine: Engine):
    """Also the most bytes that the cache had."""
    most, hold = [0], engine.cache.hold

    def watched(*given):
        hold(*given)
        most.append(sum(leaf.nbytes for leaf in jax.tree.leaves(engine.cache.arrays)))

    engine.cache.hold = watched
    completions = engine.generate(requests(), Sampling(temperature=1.1), seed=SEED)
    engine.cache.hold = hold
    return completions, max(most)


SEED = 3
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
"""Layers, keys and values, heads, width, bytes."""


@pytest.fixture(scope="module")
def slots():
    return generate(build(pages=False))


@pytest.fixture(scope="module")
def paged():
    """Two replicas with pages of their own, whose heads are split."""
    return build(pages=True, data=2, tensor=2)


@pytest.mark.slow
def test_refilled_slots_and_long_tails_give_what_slots_give_in_less_memory(paged, slots):
    (expected, slot_bytes), (completions, page_bytes) = slots, generate(paged)
    same_responses(completions, expected)
    lengths = sorted(len(completion.tokens) for completion in completions)
    assert lengths[7] <= PAGE_TOKENS and lengths[-1] > 2 * PAGE_TOKENS, "the example has no long tail"
    assert slot_bytes == 10 * (LONGEST_PROMPT + LONGEST_RESPONSE) * BYTES_PER_TOKEN
    table_bytes = 10 * 6 * 4
    assert page_bytes == 2 * 12 * PAGE_TOKENS * BYTES_PER_TOKEN + table_bytes
    assert page_bytes < 0.5 * slot_bytes
    assert {sizes[1] for sizes in paged.compiled.programs if sizes[0] == "decode"} == {10, 6}, "no slot was left"


@pytest.mark.slow
def test_pages_of_a_response_that_ended_unread_are_nobody_elses_yet(paged, slots, monkeypatch):
    monkeypatch.setattr(paged, "_dispatch_ahead", True)
    same_responses(generate(paged)[0], slots[0])


@pytest.mark.slow
def test_nothing_but_decoding_in_fewer_slots_compiles_after_compiling_ahead(paged):
    paged.compile_ahead([len(request.prompt_tokens) for request in requests()])
    before = set(paged.compiled.programs)
    generate(paged)
    assert {sizes[:2] for sizes in set(paged.compiled.programs) - before} <= {("keep", 10), ("decode", 6)}
    assert len(paged.compiled) <= most_compilations(paged)


def test_responses_to_a_prompt_share_the_pages_that_it_fills(paged):
    prompt = (tuple(range(4, 24)) * 3)[:50]
    for number, own in enumerate([prompt, prompt, prompt, (*prompt[:40], 1)]):
        paged.add(Request(number, own), Sampling(min_tokens=LONGEST_RESPONSE), seed=0)
    paged.step()
    book, other = paged.cache.books
    assert (in_use(book), in_use(other)) == (1 + 2, 1 + 2)  # the first page, and for each slot what comes after it
    assert all(of_replica.held(0)[0] == of_replica.held(1)[0] for of_replica in (book, other))
    paged.free()


def test_a_cache_is_made_for_groups_that_share_their_prompts(paged):
    sizes = {"slots": 10, "longest": 168, "longest_prompt": 72}
    for prompts, expected in ((2, 1 * 2 + 5 * 4), (4, 2 * 2 + 5 * 4), (10, 5 * 6)):
        cache = PageCache(paged.compiled, paged._layout, prompts=prompts, **sizes)
        most = max(cache.sizes_for(100))
        assert most == expected, "each of two replicas has half of the prompts, of two pages that they fill"
        book = BlockManager(slots=5, page_tokens=PAGE_TOKENS)
        for slot in range(5):
            book.place(slot, [slot * prompts // 10] * 72)
            book.hold(slot, 72 + 96 - 1)
        assert in_use(book) <= most


def test_every_page_is_given_back_when_its_responses_end(paged):
    for request in requests()[:3]:
        paged.add(request, Sampling(), seed=4)
    while paged.unfinished:
        paged.step()
        assert sum(in_use(book) for book in paged.cache.books)
    paged.cache.hold(paged.book.next_tokens_B, paged.book.slot_B)
    assert [in_use(book) for book in paged.cache.books] == [0, 0]
    assert (np.asarray(paged.cache.arrays.table_BQ) == NO_PAGE).all()
    paged.free()
    assert not jax.tree.leaves(paged.cache.arrays.layers)


def test_pages_are_shared_while_somebody_reads_them_and_reused_when_nobody_does():
    book = BlockManager(slots=3, page_tokens=2)
    assert book.place(0, (1, 2, 3, 4, 5)) == [0, 1, 2]
    assert book.place(1, (1, 2, 3, 4, 5)) == [NO_PAGE, NO_PAGE, 3]
    assert book.place(2, (3, 4, 1, 2)) == [4, 5]  # the same tokens after others are others
    assert (list(book.held(1)), in_use(book), book.numbered) == ([0, 1, 3], 6, 6)
    book.hold(0, 0)
    assert (list(book.held(0)), in_use(book)) == ([], 5)
    book.hold(1, 9)
    assert list(book.held(1)) == [0, 1, 3, 2, 6]
    book.hold(1, 0)
    assert book.place(0, (1, 2)) != [NO_PAGE]  # nobody had it any more
    for slot in range(3):
        book.hold(slot, 0)
    assert (in_use(book), book.numbered) == (0, 7)


def test_any_course_of_slots_leaves_every_page_to_one_slot_or_to_those_that_share_its_tokens():
    rng = np.random.default_rng(0)
    book, tokens = BlockManager(slots=5, page_tokens=3), {}
    most = 0
    for _ in range(400):
        slot = int(rng.integers(5))
        if slot in tokens and rng.random() < 0.7:
            more = 0 if rng.random() < 0.3 else len(tokens[slot]) + int(rng.integers(7))
            book.hold(slot, more)
            tokens[slot] = [*tokens[slot], *[(slot, i) for i in range(len(tokens[slot]), more)]]
            if not more:
                del tokens[slot]
        else:
            prompt = rng.integers(0, 2, rng.integers(1, 12)).tolist()
            book.place(slot, prompt)
            full = len(prompt) // 3 * 3
            tokens[slot] = [*prompt[:full], *[(slot, i) for i in range(full, len(prompt))]]
        held: dict[int, set] = {}
        for other, all_tokens in tokens.items():
            pages = list(book.held(other))
            assert len(pages) == math.ceil(len(all_tokens) / 3)
            for at, page in enumerate(pages):
                held.setdefault(page, set()).add(str(all_tokens[: 3 * at + 3]))
        assert all(len(seen) == 1 for seen in held.values()), "a page is two slots' that differ before its end"
        assert in_use(book) == len(held)
        most = max(most, len(held))
    assert book.numbered == most
