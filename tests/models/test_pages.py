"""A cache in pages: kernels against a naive reference, alone and on a mesh; what is written where."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.literals import TypedInt
from jax.experimental import pallas as pl
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)
from tiny_models import close

from jaxrlhf.models.attention.attention import PAGES, attend_pages
from jaxrlhf.models.attention.pages import NO_PAGE, PAGE_TOKENS, LayerPages, empty_pages, insert_pages
from jaxrlhf.models.attention.score_mod import PLAIN, ScoreMod
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.kernels.gpu_pages import _bundles, pallas_pages
from jaxrlhf.models.kernels.tpu import ragged_pages
from tests.models.test_attention import softmax

OTHER = {"divisor": 1.3, "cap": 0.8, "window": 18}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Kernels of accelerators run on the CPU."""
    monkeypatch.setitem(PAGES, "pallas", partial(pallas_pages, interpret=True))


def naive_pages(query, pages, table, position, *, divisor=None, cap=np.inf, window=np.inf, sinks=None):
    """Entry by entry, in float64; a slot that has run past its pages sees all of them."""
    slots, heads, head_dim = query.shape
    page_tokens, group = pages.shape[1], 2 * heads // pages.shape[2]
    out = np.zeros_like(query)
    for b, n in np.ndindex(slots, heads):
        newest = min(position[b], (table[b] < len(pages)).sum() * page_tokens - 1)
        seen = range(int(max(0, newest + 1 - window)), newest + 1)
        entries = [pages[table[b, s // page_tokens], s % page_tokens, :, :head_dim] for s in seen]
        score = np.array([entry[2 * (n // group)] @ query[b, n] for entry in entries]) / (divisor or np.sqrt(head_dim))
        score = score if cap == np.inf else cap * np.tanh(score / cap)
        sink = -np.inf if sinks is None else sinks[n]
        out[b, n] = softmax(score, sink) @ np.array([entry[2 * (n // group) + 1] for entry in entries])
    return out


def random_arrays(*, heads, kv_heads, head_dim, page_tokens=16, width=None):
    """Slots with one entry, a page, a page and one more; all pages; two of three pages, and run past them."""
    rng = np.random.default_rng(0)
    table = rng.permutation(17)[:15].reshape(5, 3)
    table[0, 1:], table[4, 2] = NO_PAGE, NO_PAGE
    table[1, 0] = table[2, 0]  # shared
    position = np.array([0, page_tokens - 1, page_tokens, 3 * page_tokens - 1, 2 * page_tokens + 5], np.int32)
    query = rng.standard_normal((5, heads, head_dim))
    pages = np.pad(
        rng.standard_normal((17, page_tokens, 2 * kv_heads, head_dim)),
        [(0, 0)] * 3 + [(0, (width or head_dim) - head_dim)],
    )
    return np.float32(query), np.float32(pages), table.astype(np.int32), position


@pytest.mark.parametrize(
    ("kernel", "heads", "kv_heads", "head_dim", "width"),
    [("xla", 4, 2, 8, 8), ("xla", 7, 1, 12, 16), ("pallas", 4, 2, 16, 16), ("pallas", 20, 1, 24, 24)],
)
def test_a_token_attends_to_what_is_filled_of_its_pages(kernel, heads, kv_heads, head_dim, width):
    arrays = random_arrays(heads=heads, kv_heads=kv_heads, head_dim=head_dim, width=width)
    sinks = np.linspace(-1, 2, heads, dtype=np.float32)
    other = ScoreMod(OTHER["divisor"], OTHER["cap"], OTHER["window"], sink_N=sinks)
    for scores, there in ((PLAIN, {}), (other, OTHER | {"sinks": sinks})):
        ours = jax.jit(partial(attend_pages, execution=Execution(pages_kernel=kernel)))(*arrays, scores)
        close(ours, naive_pages(*arrays, **there))


def test_the_kernel_that_comes_with_jax_for_tpu_computes_the_same(monkeypatch):
    # It has no switch that has it interpreted, and its literal indices trip the interpreter.
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(TypedInt, "shape", (), raising=False)
    arrays = random_arrays(heads=4, kv_heads=2, head_dim=64, width=128)
    run = jax.jit(partial(attend_pages, execution=Execution(pages_kernel="ragged")))
    for slides in (True, False):
        there = OTHER if slides else OTHER | {"window": np.inf}
        scores = ScoreMod(OTHER["divisor"], OTHER["cap"], OTHER["window"], jnp.array(slides))
        close(run(*arrays, scores), naive_pages(*arrays, **there))


@pytest.mark.parametrize("kernel", ["xla", "pallas"])
def test_a_layer_may_have_no_window_where_others_have(kernel):
    arrays = random_arrays(heads=2, kv_heads=1, head_dim=16)
    run = jax.jit(partial(attend_pages, execution=Execution(pages_kernel=kernel)))
    for slides in (True, False):
        scores = ScoreMod(OTHER["divisor"], OTHER["cap"], OTHER["window"], jnp.array(slides))
        close(run(*arrays, scores), naive_pages(*arrays, **OTHER if slides else OTHER | {"window": np.inf}))


def test_the_gpu_kernel_reads_nothing_past_what_is_filled():
    query, pages, table, position = random_arrays(heads=4, kv_heads=2, head_dim=16)
    run = jax.jit(partial(attend_pages, execution=Execution(pages_kernel="pallas")))
    clean = run(query, pages, table, position)
    filled = np.zeros(pages.shape[:2], bool)
    for row, newest in zip(table, position, strict=True):
        for at, page in enumerate(row[row != NO_PAGE]):
            filled[page, : max(0, newest + 1 - 16 * at)] = True
    pages[~filled] = np.nan
    np.testing.assert_array_equal(run(query, pages, table, position), clean)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "most"), [(4, 2, 16, 4), (3, 1, 24, 2)])
def test_the_gpu_kernel_reads_a_shared_prompt_once_for_several_slots(heads, kv_heads, head_dim, most, monkeypatch):
    wide = max(16, 1 << (head_dim - 1).bit_length())
    monkeypatch.setattr("jaxrlhf.models.kernels.gpu_pages.SHARED_FROM", 17)
    monkeypatch.setattr("jaxrlhf.models.kernels.gpu_pages._MOST_NUMBERS", most * wide * (1 << (heads // kv_heads - 1)))
    monkeypatch.setattr("jaxrlhf.models.kernels.gpu._SMALLEST_PART", 64)
    rng = np.random.default_rng(0)
    table = rng.permutation(8 * 12).reshape(8, 12).astype(np.int32)
    # Slots 0, 3, 5 and 6 have nine pages in common, 1 and 4 one, 2 is alone; 7 has none.
    table[[3, 5, 6], :9], table[4, 0], table[7] = table[0, :9], table[1, 0], NO_PAGE
    position = np.array([149, 20, 191, 100, 40, 144, 190, 9], np.int32)
    query = np.float32(rng.standard_normal((8, heads, head_dim)))
    pages = np.float32(rng.standard_normal((8 * 12, 16, 2 * kv_heads, head_dim)))
    run = jax.jit(partial(attend_pages, execution=Execution(pages_kernel="pallas")))
    sinks = np.linspace(-1, 2, heads, dtype=np.float32)
    near = ScoreMod(1.3, 0.8, 60, sink_N=sinks), {"divisor": 1.3, "cap": 0.8, "window": 60, "sinks": sinks}
    for scores, there in [near] if most == 4 else [(PLAIN, {})]:
        ours = run(query, pages, table, position, scores)
        close(ours[:7], naive_pages(query[:7], pages, table[:7], position[:7], **there))
        assert np.isfinite(ours).all()
    # Slots 1 and 4 have too little in common: beside another, or alone, each is computed as it was.
    apart = table.copy()
    apart[4, 0] = apart[4, 11]
    np.testing.assert_array_equal(run(query, pages, apart, position, scores)[1], ours[1])
    order = np.argsort(table[:, 0], kind="stable")
    first, count, shared, bundle = map(np.asarray, _bundles(table[order], most=most, page_tokens=16))
    together = [tuple(order[at : at + size].tolist()) for at, size in zip(first, count, strict=True) if size]
    pairs = [(0, 3, 5, 6)] if most == 4 else [(0, 3), (5, 6)]
    assert sorted(together) == sorted([*pairs, (1, 4), (2,), (7,)])
    expected = {own: 144 * (len(own) > 1 and own != (1, 4)) for own in together}
    assert [expected[own] for own in together] == shared[: len(together)].tolist()
    assert [together[own] for own in bundle] == [own for own in together for _ in own]


def test_an_entry_is_written_where_the_table_says_and_nowhere_without_a_page():
    query, pages, table, _ = random_arrays(heads=2, kv_heads=2, head_dim=3, width=4)
    before = LayerPages(jnp.array(pages), jnp.array(table))
    # Entries 0 and 1, 15 and 16 of two pages; past the table; 16 and 17 without their page; 31, and 32 past the table.
    position = np.array([0, 15, 48, 16, 31], np.int32)[:, None] + np.arange(2, dtype=np.int32)
    table[3, 1] = NO_PAGE
    before = LayerPages(jnp.array(pages), jnp.array(table))
    key = np.stack([query, 2 * query], axis=1)
    after = jax.jit(partial(LayerPages.write, execution=Execution(pages_kernel="xla")))(before, key, -key, position)
    expected = pages.copy()
    places = (0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0, 15), (1, 1, 1, 0), (4, 0, 1, 15)  # slot, token, column, entry
    for slot, token, column, entry in places:
        place = table[slot, column], entry
        expected[*place, 0::2, :3], expected[*place, 1::2, :3] = key[slot, token], -key[slot, token]
    np.testing.assert_array_equal(after.pages_ZSJU, expected)


def test_prompts_are_inserted_page_by_page_and_pages_that_are_there_are_left_alone():
    rng = np.random.default_rng(0)
    key, value = (np.float32(rng.standard_normal((3, 24, 2, 3))) for _ in range(2))
    pages = np.float32(rng.standard_normal((6, 16, 4, 3)))
    row, page = np.array([2, 0, 1], np.int32), np.array([[[5, 1], [NO_PAGE, 3], [NO_PAGE, NO_PAGE]]], np.int32)
    ours = jax.jit(partial(insert_pages, execution=Execution(pages_kernel="xla")))(pages, key, value, row, page)
    expected = pages.copy()
    for place, prompt, first in ((5, 2, 0), (1, 2, 16), (3, 0, 16)):
        expected[place] = 0
        for heads, kept in ((slice(0, None, 2), key), (slice(1, None, 2), value)):
            there = kept[prompt, first : first + 16]
            expected[place, : len(there), heads] = there
    np.testing.assert_array_equal(ours, expected)


def test_heads_are_as_wide_in_pages_as_the_kernel_wants_them():
    config = ModelConfig("qwen2", 96, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    for kernel, width in (("xla", 16), ("pallas", 16), ("ragged", 128)):
        layers = empty_pages(config, pages=3, execution=Execution(jnp.bfloat16, pages_kernel=kernel))
        assert [(leaf.shape, leaf.dtype) for leaf in layers] == [((3, PAGE_TOKENS, 4, width), jnp.bfloat16)] * 2


def test_pages_and_heads_stay_where_they_are_on_a_mesh():
    axes = {"row_axes": ("data",), "head_axes": ("tensor",)}
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    execution = Execution(pages_kernel="pallas", mesh=mesh, **axes)
    rng = np.random.default_rng(0)
    query, key, value = (np.float32(rng.standard_normal((4, heads, 16))) for heads in (4, 2, 2))
    pages = np.float32(rng.standard_normal((6, 16, 4, 16)))
    table = np.array([[0, 2], [1, NO_PAGE], [2, NO_PAGE], [0, 1]], np.int32)  # of the three pages of a part
    position = np.array([17, 3, 0, 30], np.int32)

    def run(query, key, value, pages, table, position):
        stored = LayerPages(pages, table).write(key[:, None], value[:, None], position[:, None], execution=execution)
        return stored.attend(query[:, None], position, PLAIN, execution=execution)[:, 0], stored.pages_ZSJU

    spec = PartitionSpec("data", "tensor"), PartitionSpec("data", None, "tensor"), PartitionSpec("data")
    head, page, slot = (NamedSharding(mesh, each) for each in spec)
    layout = head, head, head, page, slot, slot
    arrays = jax.device_put((query, key, value, pages, table, position), layout)
    program = jax.jit(run, in_shardings=layout, out_shardings=(head, page)).lower(*arrays).compile()
    out, written = program(*arrays)
    whole = np.where(table == NO_PAGE, NO_PAGE, table + np.array([[0], [0], [3], [3]]))
    for b, at in enumerate(position):
        pages[whole[b, at // 16], at % 16, 0::2], pages[whole[b, at // 16], at % 16, 1::2] = key[b], value[b]
    np.testing.assert_array_equal(written, pages)
    close(out, naive_pages(query, pages, whole, position))
    assert "all-" not in program.as_text() and "collective" not in program.as_text()


def traced(kernel, head_dim, dtype):
    """A program of a kernel, for a layer that has or has not a window."""
    kept = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 14, head_dim), (40, PAGE_TOKENS, 4, head_dim))]
    where = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 70), (4,))]
    run = jax.jit(lambda slides, *arrays: kernel(*arrays, ScoreMod(1.3, 0.8, 6, slides)))
    return run.trace(jax.ShapeDtypeStruct((), bool), *kept, *where)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_tpu_kernel_is_accepted_by_its_compiler(dtype):
    device = AbstractDevice("TPU v5e", num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)):
        program = traced(ragged_pages, 128, dtype)
        assert program.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="needs to know the GPU, and warns")
@pytest.mark.parametrize(("head_dim", "dtype"), [(96, "bfloat16"), (128, "float32")])
def test_the_gpu_kernel_is_accepted_by_its_compiler(head_dim, dtype):
    program = traced(pallas_pages, head_dim, dtype)
    assert "xla.gpu.triton" in program.lower(lowering_platforms=("cuda",)).as_text()
