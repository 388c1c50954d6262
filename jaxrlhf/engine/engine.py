"""Continuous batching over slots: prefill prompts, insert them, decode all slots together.

One SPMD program spans the mesh: slots are split over `slot_axes`, attention heads over
`kv_head_axis`, layers over `stage_axis`. Programs are compiled ahead of time and kept by the
lengths they serve, so a call that would recompile anything else is an error instead of a pause.

    engine.load(params, version=7)
    completions = engine.generate(requests, sampling, seed=0)

`generate` is made of `prefill`, `insert`, `dispatch`, `read` and `free`, which a server can drive itself;
`decode` is `dispatch` and `read`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrlhf import config as knobs
from jaxrlhf.batch import Params
from jaxrlhf.engine import programs
from jaxrlhf.engine.buckets import busy_buckets, fit, halving_buckets, length_buckets
from jaxrlhf.engine.checks import check_keys, check_prompt, check_sizes, check_split
from jaxrlhf.engine.compiled import Compiled
from jaxrlhf.engine.kv_cache import PageCache, SlotCache
from jaxrlhf.engine.layout import EngineShardings, same_layout
from jaxrlhf.engine.programs import Prefilled
from jaxrlhf.engine.routing import RoutingRecord
from jaxrlhf.engine.sampling import settings_of
from jaxrlhf.engine.scheduler import Completion, Drawn, Placement, Request, Scheduler
from jaxrlhf.engine.slot_book import SlotBook
from jaxrlhf.engine.weights import Weights, most_unstacked, spent_layers
from jaxrlhf.models import XLA, AnyModel, Attention, pipeline_over
from jaxrlhf.models.config import ModelConfig

PREFILL_TOKENS = 2048
"""Tokens that one prefill aims at, padding included; a longer prompt is run chunk by chunk."""

CHUNK_TOKENS = 512
"""Tokens of a long prompt that run together: enough to fill products, and few of the last chunk are padding."""

FEWEST_SLOTS = 8
"""A token takes hardly less time in fewer slots of one replica."""

MOST_SLOT_COUNTS = 4  # each compiles programs of its own


class Engine:
    """Generates responses with one set of weights at a time.

    Args:
      mesh: Auto axes.
      slots: Responses decoded together; rounded up to a multiple of the replicas.
      prompts: Prompts that come at a time, if that is known: a prefill has no more rows than they fill.
      stop_tokens: Ids that end a response; they are kept in it.
      decode_tokens_per_dispatch: Tokens decoded by one program call before slots refill.
      dtype: Dtype of activations and of the cache.
      slot_axes: Mesh axes that split the slots.
      kv_head_axis: Mesh axis that splits the key-value heads of the cache.
      stage_axis: Mesh axis that divides the layers, of the weights and of the cache.
      attention: Kernels for this mesh.
      records_routing: Completions say which experts their tokens went through.
      goes_ahead: Where no request waits for a slot, dispatch the next tokens before the last are read. Idle slots are
        then left later; None does not where the host would only share its cores with the devices, on CPU.

    Attributes:
      slots: After rounding. Where no request waits for a slot any more, decoding goes on with those in use.
      prefill_prompts, insertions: Rows of a prefill, and of an insertion.
      prefilled_prompts: Prompts that `prefill` ran so far.
      attention: Kernels that the engine was given.

    Raises:
      Refusal: Sizes that do not fit the model or the mesh.
    """

    def __init__(
        self,
        config: AnyModel,
        mesh: Mesh,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        stop_tokens: tuple[int, ...],
        decode_tokens_per_dispatch: int,
        dtype: Any,
        prompts: int | None = None,
        slot_axes: tuple[str, ...] = (),
        kv_head_axis: str | None = None,
        stage_axis: str | None = None,
        attention: Attention = XLA,
        records_routing: bool = False,
        goes_ahead: bool | None = None,
    ) -> None:
        capacity = max_prompt_tokens + max_response_tokens
        check_sizes(
            config,
            capacity=capacity,
            stop_tokens=stop_tokens,
            slots=slots,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            decode_tokens_per_dispatch=decode_tokens_per_dispatch,
        )
        if isinstance(config, ModelConfig) and config.latent is not None:
            kv_head_axis = None  # a rotated key and a latent serve all heads
        check_split(config, mesh, kv_copies=attention.kv_copies, kv_head_axis=kv_head_axis, stage_axis=stage_axis)
        replicas = math.prod(mesh.shape[axis] for axis in slot_axes)
        self.slots = -(-slots // replicas) * replicas
        rows = 1 << (max(1, min(slots, PREFILL_TOKENS // max_prompt_tokens)).bit_length() - 1)
        self.insertions = -(-rows // replicas) * replicas
        self.prefill_prompts = -(-min(rows, prompts or slots) // replicas) * replicas
        self._shape = programs.Shape(
            config=config,
            replicas=replicas,
            max_response_tokens=max_response_tokens,
            stop_tokens=tuple(stop_tokens),
            tokens_per_dispatch=decode_tokens_per_dispatch,
            dtype=dtype,
            pipeline=pipeline_over(mesh, (stage_axis,), row_axes=slot_axes) if stage_axis else None,
            attention=attention,
            records_routing=records_routing,
        )
        self._routing = RoutingRecord(config, on=records_routing)
        self._goes_ahead = mesh.devices.flat[0].platform != "cpu" if goes_ahead is None else goes_ahead
        self._prompt_buckets = length_buckets(max_prompt_tokens)
        self._slot_counts = halving_buckets(self.slots // replicas, shortest=FEWEST_SLOTS)[-MOST_SLOT_COUNTS:]
        self._mesh, self.attention, self.prefilled_prompts = mesh, attention, 0
        self._layout = EngineShardings(mesh, slot_axes, kv_head_axis, self._shape.pipeline)
        self._compiled = Compiled(self._shape, self._layout.whole)
        sizes = {"slots": self.slots, "longest": capacity}
        self._cache: SlotCache | PageCache = SlotCache(self._compiled, self._layout, **sizes)
        if attention.pages is not None:
            self._cache = PageCache(self._compiled, self._layout, replicas=replicas, **sizes)
        self._weights: Weights | None = None
        self._signature: Any = None
        self.free()

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    @property
    def most_compilations(self) -> int:
        """Bound on `compilations`, whatever is generated."""
        prompts, counts = len(self._prompt_buckets), len(self._slot_counts)
        states = 1 + most_unstacked(self._shape.config) + 2 * prompts + counts * (counts - 1) // 2
        return states + self._cache.most_compilations(prompts=prompts, counts=counts)

    @property
    def active(self) -> int:
        """Slots whose response goes on or was not read yet."""
        return int(self._book.taken_B.sum())

    def load(self, params: Params, version: int, *, spent: Any = None) -> None:
        """Set the weights, already in the generation layout.

        Args:
          spent: Tree of bools: which of `params` nobody else reads. Those of layers are deleted once layers lie apart,
            as decoding reads them; beside others (None: all are) the stack stays, too.

        Raises:
          RuntimeError: Responses are under way: their cache belongs to the old weights.
          ValueError: The weights lie elsewhere than on the mesh, or differ from those loaded
            before in shape, dtype or layout, so that programs would not fit.
        """
        if self.active:
            raise RuntimeError(
                f"{self.active} responses are being generated with version {self._cache_version}; "
                f"finish or free() them before loading version {version}"
            )
        devices = set(self._mesh.devices.flat)
        for path, leaf in jax.tree.leaves_with_path(params):
            if not isinstance(leaf, jax.Array) or leaf.sharding.device_set != devices:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} is not laid out over the engine's mesh; re-layout first"
                )
        spent = spent_layers(self._shape.config, spent)
        signature = spent is None, [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(params)]
        if self._signature is not None and not same_layout(self._signature, signature):
            raise ValueError("weights of another shape, dtype or layout than those loaded before; build a new Engine")
        self.unload()
        self._signature = signature
        self._weights = Weights(self._compiled, params, version, spent=spent)

    def unload(self) -> None:
        """Let go of the weights and the cache; compiled programs stay."""
        self.free()
        self._weights = None

    def free(self) -> None:
        """Drop the cache, and with it whatever is being generated."""
        self._cache.free()
        if self._weights:
            self._weights.drop_copies()
        self._slots: programs.Slots | None = None
        self._cache_version: int | None = None
        self._book = self._blank_book()

    def _blank_book(self) -> SlotBook:
        return SlotBook(slots=self.slots, tokens_per_dispatch=self._shape.tokens_per_dispatch)

    def compile_ahead(self, prompt_lengths: Sequence[int]) -> None:
        """Compile every program that prompts of these lengths need; buckets that they seldom fill are given up."""
        self._prompt_buckets = busy_buckets(self._prompt_buckets, prompt_lengths, together=self.prefill_prompts)
        shortest = {fit(length, self._prompt_buckets): length for length in sorted(prompt_lengths, reverse=True)}
        for length in shortest.values():
            prefilled = self.prefill([(0,) * length])
            for size in self._cache.sizes_for(length):
                self._cache.grow(size)
                self.insert(prefilled, [], knobs.Sampling(), seed=0)
                self.decode()  # ends at once, as no slot is active
            self.free()

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefilled:
        """Run up to `prefill_prompts` prompts.

        Raises:
          ValueError: Too many prompts, or one that is empty, too long or outside the vocabulary.
        """
        weights = self._loaded()
        if not 0 < len(prompts) <= self.prefill_prompts:
            raise ValueError(f"a prefill takes 1 to {self.prefill_prompts} prompts, got {len(prompts)}")
        self._check_prompts(prompts)
        width = fit(max(map(len, prompts)), self._prompt_buckets)
        token_PS = np.zeros((self.prefill_prompts, width), np.int32)
        length_P = np.ones(self.prefill_prompts, np.int32)
        for row, prompt in enumerate(prompts):
            token_PS[row, : len(prompt)] = prompt
            length_P[row] = len(prompt)
        rows = jax.device_put((token_PS, length_P), self._layout.rows)
        self.prefilled_prompts += len(prompts)
        program = partial(programs.prefill, chunk_tokens=CHUNK_TOKENS if width > PREFILL_TOKENS else None)
        arguments = program, weights.params, weights.stackless, *rows
        result = self._compiled.run(("prefill", width), *arguments, out=self._layout.prompts)
        return Prefilled(result, tuple(prompts), weights.version)

    def insert(
        self, prefilled: Prefilled, placements: Sequence[Placement], sampling: knobs.Sampling, *, seed: int
    ) -> None:
        """Start up to `insertions` responses in free slots, and draw their first tokens.

        Args:
          seed: In [0, 2**32).
        """
        weights = self._loaded()
        assert prefilled.version == weights.version, (
            f"prompts prefilled by version {prefilled.version} cannot be continued by version {weights.version}"
        )
        assert len(self._book.slot_B) == self.slots, "slots that are no longer computed cannot take a response"
        assert not self._book.unread, "a window that was not read yet may hold the last of a slot; read it first"
        most = self.insertions
        assert len(placements) <= most, f"an insertion takes {most} placements, got {len(placements)}"
        row_I = np.zeros(most, np.int32)
        slot_I = np.full(most, self.slots, np.int32)
        request_I = np.zeros(most, np.uint32)
        for index, (row, slot, request_id) in enumerate(placements):
            row_I[index], slot_I[index], request_I[index] = row, slot, request_id
            prompt_tokens = len(prefilled.tokens[row])
            self._book.start(slot, prompt_tokens, limit=self._shape.max_response_tokens)
            self._routing.start(slot, prefilled.prompts.choice_PSLk, row, prompt_tokens)
        insertion = programs.Insertion(
            row_I, slot_I, np.full(most, seed, np.uint32), request_I, settings_of(sampling, slots=most)
        )
        width = prefilled.prompts.prefix.key_LPSKH.shape[2]
        if self._slots is None:
            empty = partial(programs.empty_slots, slots=self.slots)
            self._slots = self._compiled.run(("empty slots",), empty, out=self._layout.slots)
            self._cache_version = weights.version
        arguments = programs.insert, weights.params, self._slots, prefilled.prompts, insertion
        self._slots = self._compiled.run(("insert", width), *arguments, out=self._layout.slots, donate=1)
        self._cache.place(prefilled, row_I, slot_I)

    def dispatch(self) -> None:
        """Have up to `decode_tokens_per_dispatch` tokens drawn in every active slot; returns at once."""
        weights = self._loaded()
        assert self._slots is not None, "nothing was inserted"
        assert self._cache_version == weights.version, (
            f"the cache of version {self._cache_version} cannot be continued by version {weights.version}"
        )
        self._cache.hold(self._book.next_tokens_B, self._book.slot_B)
        self._cache.arrays, self._slots, window = self._compiled.run(
            ("decode", len(self._book.slot_B), self._cache.size),
            programs.decode,
            weights.layers(),
            weights.params,
            self._cache.arrays,
            self._slots,
            out=(self._cache.layout, self._layout.slots, self._layout.whole),
            donate=(2, 3),
        )
        self._book.dispatched(window)

    def read(self) -> list[Drawn]:
        """Wait for the oldest dispatch that was not read yet.

        Returns:
          One entry for each slot that drew, counting the first token of new responses.

        Raises:
          FloatingPointError: The policy's logits are not finite.
        """
        return self._book.read(self._routing)

    def decode(self) -> list[Drawn]:
        """`dispatch` and `read`."""
        self.dispatch()
        return self.read()

    def _leave_idle_slots(self) -> None:
        """Go on with as few slots as hold those in use; no response can be inserted afterwards."""
        replicas = self._shape.replicas
        slot_B = self._book.slot_B
        busy_GB = self._book.taken_B[slot_B].reshape(replicas, -1)
        count = fit(int(busy_GB.sum(axis=1).max()), self._slot_counts)
        if not busy_GB.any() or count >= busy_GB.shape[1]:
            return
        row_GB = np.argsort(~busy_GB, axis=1, kind="stable")[:, :count].astype(np.int32)
        self._cache.keep(row_GB)
        sizes = ("keep", len(slot_B), row_GB.size)
        self._slots = self._compiled.run(sizes, programs.keep_rows, self._slots, row_GB, out=self._layout.slots)
        self._book.keep((row_GB + np.arange(replicas)[:, None] * busy_GB.shape[1]).reshape(-1))

    def generate(
        self,
        requests: Sequence[Request],
        sampling: knobs.Sampling,
        *,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Answer all requests, refilling slots as they become free; the cache is freed at the end.

        Args:
          seed: In [0, 2**32). A response depends on it, on its request_id and prompt, and on
            nothing else of the call.
          progress: Called after every read with the completions so far and in all.
          on_completion: Called with each completion as it is read.

        Returns:
          One completion for each request, in their order.

        Raises:
          Refusal: A request that cannot be answered, or a seed out of range.
          RuntimeError: No weights are loaded, or slots are in use by `insert`.
          FloatingPointError: The policy's logits are not finite.
        """
        version = self._loaded().version
        if self.active:
            raise RuntimeError(f"{self.active} responses are being generated; finish or free() them first")
        self._check_prompts([request.prompt_tokens for request in requests])
        check_keys(requests, seed=seed)
        scheduler = Scheduler(requests, slots=self.slots, stop_tokens=self._shape.stop_tokens, version=version)
        completions: dict[int, Completion] = {}
        prefilled: Prefilled | None = None
        try:
            while not scheduler.finished:
                if scheduler.refill_due:
                    while scheduler.placeable:
                        if scheduler.prefill_due:
                            prefilled = self.prefill(scheduler.take_prompts(self.prefill_prompts))
                        assert prefilled is not None, "a request was placed before its prompt was prefilled"
                        self.insert(prefilled, scheduler.place(self.insertions), sampling, seed=seed)
                if not self._book.unread:
                    self.dispatch()
                # While requests wait, slots that become free would wait for them a window longer.
                if self._goes_ahead and not scheduler.waiting and self._book.outlasts:
                    self.dispatch()
                for slot, tokens, logps, active in self.read():
                    completion = scheduler.record(slot, tokens, logps, active=active)
                    if completion is not None:
                        completion = self._routing.complete(slot, completion)
                        completions[completion.request_id] = completion
                        if on_completion is not None:
                            on_completion(completion)
                if not scheduler.waiting:
                    self._leave_idle_slots()
                if progress is not None:
                    progress(len(completions), len(requests))
        finally:
            self.free()
        return [completions[request.request_id] for request in requests]

    def _loaded(self) -> Weights:
        if self._weights is None:
            raise RuntimeError("the engine has no weights; call load(params, version=...) first")
        return self._weights

    def _check_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        for prompt in prompts:
            check_prompt(prompt, longest=self._prompt_buckets[-1], vocab=self._shape.config.vocab_size)
