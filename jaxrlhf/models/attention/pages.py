"""Paged KV cache: memory follows the number of stored tokens, not the longest sequence.

A layer has one array of pages. Each page holds `PAGE_TOKENS` positions of one slot, or of several slots whose prompts
start alike. A table that all layers share lists the pages of every slot, in order. For every position a page holds
the key and the value of one key-value head after another, as the kernels read them.

If slots are split over devices, each device holds the pages of its slots and numbers its own pages.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int, Num

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.attention import LANES, attend_pages, each_token
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import Execution

PAGE_TOKENS = 32
"""Positions per page. On average half of a slot's last page is unused; kernels read several pages at once."""

NO_PAGE = 2**31 - 1
"""Page number past every page: writes to it are skipped."""


class LayerPages(NamedTuple):
    """Z pages of one layer, and the page table of B slots."""

    pages_ZSJU: Array
    table_BQ: Array

    @property
    def capacity(self) -> int:
        """Largest number of positions of a slot."""
        return self.table_BQ.shape[1] * self.pages_ZSJU.shape[1]

    def write(
        self,
        key_BTKH: Num[Array, "B T K H"],
        value_BTKH: Num[Array, "B T K H"],
        position_BT: Int[Array, "B T"],
        *,
        execution: Execution,
    ) -> "LayerPages":
        """Write T new entries per slot, each at its own position; skip positions for which a slot has no page."""

        def put(pages_ZSJU, table_BQ, key_BTKH, value_BTKH, position_BT):
            column_BT = position_BT // (page_tokens := pages_ZSJU.shape[1])
            page_BT = jnp.take_along_axis(table_BQ, column_BT, axis=1, mode="fill", fill_value=NO_PAGE)
            entry_BTJU = _entries(key_BTKH, value_BTKH, like=pages_ZSJU)
            return pages_ZSJU.at[page_BT, position_BT % page_tokens].set(entry_BTJU, mode="drop")

        slot, head = PartitionSpec(execution.row_axes), PartitionSpec(execution.row_axes, None, execution.head_axes)
        page = page_spec(execution)
        put = execution.on_devices(put, (page, slot, head, head, slot), page)
        return self._replace(pages_ZSJU=put(self.pages_ZSJU, self.table_BQ, key_BTKH, value_BTKH, position_BT))

    def attend(
        self,
        query_BTNH: Float[Array, "B T N H"],
        position_B: Int[Array, "B"],
        score_mod: ScoreMod,
        *,
        execution: Execution,
    ) -> Float[Array, "B T N H"]:
        """Attend with T consecutive tokens per slot, the first at `position_B`, to the slot's pages."""

        def one(query_BNH: Array, position_B: Array) -> Array:
            return attend_pages(query_BNH, *self, position_B, score_mod, execution=execution)

        return each_token(one, query_BTNH, position_B)


class PagedCache(NamedTuple):
    """Pages of every layer, and the page table of B slots."""

    layers: list[Array]
    table_BQ: Array

    def split(self) -> list[LayerPages]:
        """Return the cache as each layer sees it."""
        return [LayerPages(pages_ZSJU, self.table_BQ) for pages_ZSJU in self.layers]

    def joined(self, layers: list[LayerPages]) -> "PagedCache":
        """Return this cache with the pages of the given layers."""
        return self._replace(layers=[stored.pages_ZSJU for stored in layers])


def empty_pages(config: ModelConfig, *, pages: int, execution: Execution) -> list[Array]:
    """Return zeros for `pages` pages of every layer, with the head width that the kernel of `execution` requires.

    Build them under jit with `out_shardings`, so that each device allocates its own pages.
    """
    assert execution.pages_kernel is not None, "the cache is not stored in pages"
    lanes = LANES.get(execution.pages_kernel, 1)
    heads = config.num_kv_heads * execution.kv_copies(config.num_kv_heads)
    shape = pages, PAGE_TOKENS, 2 * heads, -(-config.head_dim // lanes) * lanes
    return [jnp.zeros(shape, execution.dtype) for _ in range(config.num_layers)]


def insert_pages(
    pages_ZSJU: Float[Array, "Z S J U"],
    key_PWKH: Num[Array, "P W K H"],
    value_PWKH: Num[Array, "P W K H"],
    row_I: Int[Array, "I"],
    page_GIQ: Int[Array, "G I Q"],
    *,
    execution: Execution,
) -> Float[Array, "Z S J U"]:
    """Copy prompt `row_I[i]` into pages `page_GIQ[g, i]` of each of the G parts that slots are split into.

    A page number at or past the number of pages is skipped. The function is pure; donate the pages to write in place.
    """

    def put(pages_ZSJU, key_PWKH, value_PWKH, row_I, page_1IQ):
        _, page_tokens, _, _ = pages_ZSJU.shape
        _, insertions, columns = page_1IQ.shape
        entry_IWJU = _entries(key_PWKH[row_I], value_PWKH[row_I], like=pages_ZSJU)
        padding = columns * page_tokens - entry_IWJU.shape[1]
        entry_IWJU = jnp.pad(entry_IWJU, ((0, 0), (0, padding), (0, 0), (0, 0)))
        entry_IQSJU = entry_IWJU.reshape(insertions, columns, page_tokens, *entry_IWJU.shape[2:])
        return pages_ZSJU.at[page_1IQ[0]].set(entry_IQSJU, mode="drop")

    page, whole = page_spec(execution), PartitionSpec()
    head, part = PartitionSpec(None, None, execution.head_axes), PartitionSpec(execution.row_axes)
    put = execution.on_devices(put, (page, head, head, whole, part), page)
    return put(pages_ZSJU, key_PWKH, value_PWKH, row_I, page_GIQ)


def take_pages(
    pages_ZSJU: Float[Array, "Z S J U"],
    page_GPQ: Int[Array, "G P Q"],
    *,
    width: int,
    head_dim: int,
    execution: Execution,
) -> tuple[Float[Array, "P W K H"], Float[Array, "P W K H"]]:
    """Return keys and values of the first `width` positions of prompts; `page_GPQ[g, p]` are the pages of prompt p.

    A prompt is in one of the G parts that slots are split into. A page number at or past the number of pages gives
    zeros; in all other parts a prompt must have only such numbers.
    """

    def take(pages_ZSJU, page_1PQ):
        entry_PQSJU = pages_ZSJU.at[page_1PQ[0]].get(mode="fill", fill_value=0)
        prompts, columns, page_tokens, *entry = entry_PQSJU.shape
        entry_PWJH = entry_PQSJU.reshape(prompts, columns * page_tokens, *entry)[:, :width, :, :head_dim]
        if execution.mesh is not None and execution.row_axes:
            entry_PWJH = jax.lax.psum(entry_PWJH, execution.row_axes)
        entry_PWJH = jnp.pad(entry_PWJH, ((0, 0), (0, width - entry_PWJH.shape[1]), (0, 0), (0, 0)))
        return entry_PWJH[:, :, 0::2], entry_PWJH[:, :, 1::2]

    part, head = PartitionSpec(execution.row_axes), PartitionSpec(None, None, execution.head_axes)
    return execution.on_devices(take, (page_spec(execution), part), (head, head))(pages_ZSJU, page_GPQ)


def page_spec(execution: Execution) -> PartitionSpec:
    """Return the partition of an array of pages over the mesh."""
    return PartitionSpec(execution.row_axes, None, execution.head_axes)


def _entries(key: Array, value: Array, *, like: Array) -> Array:
    """Convert keys and values `[..., K, H]` to the entries of a page, `[..., 2 K, U]`."""
    *before, kv_heads, head_dim = key.shape
    both = jnp.stack([key, value], axis=-2).reshape(*before, 2 * kv_heads, head_dim)
    padding = like.shape[-1] - head_dim
    return jnp.pad(both, [(0, 0)] * (both.ndim - 1) + [(0, padding)]).astype(like.dtype)
