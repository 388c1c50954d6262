"""Continuous batching over slots: prefill prompts, insert them, decode all slots together.

One SPMD program spans the mesh: slots are split over `slot_axes`, attention heads over `kv_head_axis`, layers over
the pipeline stages of the `Execution`, and cache positions over its `cache_axes`. Programs are compiled ahead of time,
one for each size. A call that would recompile for any other reason is an error instead of a pause.

    engine.add(request, sampling, seed=0)  # at any time, also while other requests are in progress
    completions = engine.step()

`engine.generate(requests, sampling, seed=0)` runs this loop for a batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrlhf.batch import Params
from jaxrlhf.config import Sampling
from jaxrlhf.engine import checks, programs
from jaxrlhf.engine.buckets import slot_counts, with_rings
from jaxrlhf.engine.cache.contents import prefix_cache_of
from jaxrlhf.engine.cache.kv_cache import cache_of
from jaxrlhf.engine.compiled import Compiled, EngineShardings, same_layout
from jaxrlhf.engine.constraints import SlotConstraints, constrained
from jaxrlhf.engine.prefill import CHUNK_PARTS, CHUNK_TOKENS, Kind, Prefill, rows_of_prefill
from jaxrlhf.engine.programs import Prefilled
from jaxrlhf.engine.rollout_engine import PolicyWeights
from jaxrlhf.engine.scheduler import Placement, Scheduler
from jaxrlhf.engine.scoring import Scoring, TokenScores
from jaxrlhf.engine.sequence import Completion, Decode, Request, SequenceState
from jaxrlhf.engine.slot_book import Arrangement, SlotBook, insertion_of
from jaxrlhf.engine.speculation.choice import Speculation, with_mtp
from jaxrlhf.engine.weights import Weights, donated_layers
from jaxrlhf.models import ONE_DEVICE, AnyModel, Execution
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.vision.rows import Pixels, no_pixels


class Engine:
    """Continuous-batching generation engine, with one version of the weights at a time.

    Args:
      mesh: Device mesh with Auto axes.
      slots: Number of responses decoded together; rounded up to a multiple of the replicas.
      prompts: Number of prompts of a batch, if known; it limits the rows of a prefill.
      stop_tokens: Ids that end a response unless its request names others; they are kept in the response.
      decode_tokens_per_dispatch: Maximum number of tokens per slot decoded by one program call before slots refill.
      slot_axes: Mesh axes that split the slots.
      kv_head_axis: Mesh axis that splits the key-value heads of the cache.
      execution: Execution on this mesh; its pipeline stages split the cache too.
      records_routing: True to record in completions the experts of their tokens.
      most_kept: Responses sampled with a `top_k` up to this number record the sampling mask of each token.
      dispatch_ahead: True to dispatch the next window before the last is read, if no request waits; None is False on
        CPU.
      speculation: Setting `rollout.speculation`.

    Attributes:
      slots: Number of slots after rounding; only the slots in use, and few others, have rows that are computed.
      context_tokens, response_tokens: Maximum tokens of prompt and response together, and of a response.
      limits, scoring: Limits of requests, and the scoring of given tokens.
      insertions, prefill: Rows of an insertion, and the prefill runner with its counts.
      compiled, cache, book, speculation: Programs, KV cache, host state of the slots, and drafts with their counts.
      weights: The loaded weights, if any.

    Raises:
      Refusal: Sizes do not fit the model or the mesh.
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
        prompts: int | None = None,
        slot_axes: tuple[str, ...] = (),
        kv_head_axis: str | None = None,
        execution: Execution = ONE_DEVICE,
        records_routing: bool = False,
        most_kept: int = 0,
        dispatch_ahead: bool | None = None,
        stop_texts: tuple[str, ...] = (),
        decode: Decode | None = None,
        pixels: Pixels = no_pixels,
        speculation: Literal["auto"] | None = None,
    ) -> None:
        capacity = max_prompt_tokens + max_response_tokens
        lengths = {"max_prompt_tokens": max_prompt_tokens, "max_response_tokens": max_response_tokens}
        counts = {"slots": slots, **lengths, "decode_tokens_per_dispatch": decode_tokens_per_dispatch}
        checks.check_sizes(config, capacity=capacity, stop_tokens=stop_tokens, **counts)
        if isinstance(config, ModelConfig) and config.latent is not None:
            kv_head_axis = None  # all heads share a rotated key and a latent (MLA)
        checks.check_split(config, mesh, execution, kv_head_axis=kv_head_axis)
        checks.check_shared(config, execution, shortest_chunk=CHUNK_TOKENS // CHUNK_PARTS[0])
        checks.check_routing(config, records_routing=records_routing)
        execution = with_rings(config, execution, longest=capacity, tokens_per_dispatch=decode_tokens_per_dispatch)
        replicas = math.prod(mesh.shape[axis] for axis in slot_axes)
        execution = with_mtp(speculation, config, execution, mesh, replicas=replicas)
        self.slots = -(-slots // replicas) * replicas
        rows = rows_of_prefill(slots, longest_prompt=max_prompt_tokens)
        self.insertions = -(-rows // replicas) * replicas
        self._shape = programs.Shape(
            config=config,
            replicas=replicas,
            most_stop_tokens=max(checks.STOP_TOKENS, len(stop_tokens)),
            tokens_per_dispatch=decode_tokens_per_dispatch,
            execution=execution,
            records_routing=records_routing,
            most_kept=most_kept,
        )
        checks.check_stop_texts(stop_texts, decodes=decode is not None)
        self.context_tokens, self.response_tokens, self._decode = capacity, max_response_tokens, decode
        limits = max_response_tokens, self._shape.most_stop_tokens, stop_tokens, stop_texts, decode is not None
        self.limits = checks.RequestLimits(capacity, config.vocab_size, *limits, config.vision)
        self._layout = EngineShardings(mesh, slot_axes, kv_head_axis, execution.pipeline, execution.cache_axes)
        self.compiled = Compiled(self._shape, self._layout.whole)
        self.speculation = Speculation(speculation, self.compiled, platform=mesh.devices.flat[0].platform)
        ahead = mesh.devices.flat[0].platform != "cpu" if dispatch_ahead is None else dispatch_ahead
        self._dispatch_ahead = ahead and self.speculation.admits_ahead
        self._slot_counts = slot_counts(self.slots // replicas, fewest=self.speculation.fewest_slots)
        self.mesh, self.execution = mesh, execution
        together = -(-min(rows, prompts or slots) // replicas) * replicas
        counts = {"rows": together, "replicas": replicas, "longest_prompt": max_prompt_tokens, "capacity": capacity}
        self.prefill = Prefill(self.compiled, self._layout, pixels=pixels, **counts)
        self.scoring = Scoring(self.compiled, self._layout, self.prefill, self.limits)
        sizes = {"longest": capacity, "longest_prompt": max_prompt_tokens, "prompts": prompts or self.slots}
        self.cache = cache_of(self.compiled, self._layout, slots=self.slots, **sizes)
        self.weights: Weights | None = None
        self._signature: Any = None
        self.free()

    @property
    def unfinished(self) -> bool:
        """True if a request was added and has not ended."""
        return self._scheduler.unfinished

    def load(self, params: Params, version: int, *, donated: Any = None) -> None:
        """Set the weights, already in the generation layout.

        Args:
          donated: Tree of bools, True for leaves of `params` that nobody else reads. Decoding reads unstacked layers.
            Donated layer leaves are deleted once the layers are unstacked; with none (or None) the stack stays too.

        Raises:
          RuntimeError: Responses are in progress, and their cache belongs to the old weights.
          ValueError: The weights are not on the mesh, or differ from earlier weights in shape, dtype or layout, so that
            the compiled programs would not fit.
        """
        if self.book.active:
            raise RuntimeError(
                f"{self.book.active} responses are being generated with version {self._loaded().version}; "
                f"finish or free() them before loading version {version}"
            )
        checks.check_laid_out(params, self.mesh)
        donated = donated_layers(self._shape.config, donated)
        signature = donated is None, [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(params)]
        if self._signature is not None and not same_layout(self._signature, signature):
            raise ValueError("weights of another shape, dtype or layout than those loaded before; build a new Engine")
        self.unload()
        self._signature = signature
        self.weights = Weights(self.compiled, params, version, donated=donated)

    def update_weights(self, weights: PolicyWeights) -> None:
        """Set the weights, already in the generation layout; see `load`."""
        self.load(weights.params, weights.version, donated=weights.donated)

    def unload(self) -> None:
        """Free the weights and the cache; compiled programs stay."""
        self.free()
        self.weights = None

    def free(self) -> None:
        """Free the cache and drop all unfinished requests."""
        self._clear()
        if self.weights:
            self.weights.drop_copies()
        self._scheduler = Scheduler(slots=self.slots, replicas=self._shape.replicas)
        self._contents = prefix_cache_of(self._shape, slots=self.slots)
        self._prefilled: Prefilled | None = None
        self._constraints = SlotConstraints(self._shape.config.vocab_size)

    def _clear(self) -> None:
        """Free the device's arrays of the slots."""
        self.speculation.free()
        self.cache.free()
        self._slots: programs.Slots | None = None
        self.book = SlotBook(self.slots, self._shape.tokens_per_dispatch, replicas=self._shape.replicas)

    def compile_ahead(self, prompt_lengths: Sequence[int]) -> None:
        """Compile every program that prompts of these lengths need; only the largest cache if devices are described."""
        for length in self.prefill.only_busy(prompt_lengths):
            prompt = (0,) * length
            prefilled = self._prefill([prompt] * self.prefill.most(self.prefill.kind(self._contents, prompt)))
            self._seat(range(self.slots))
            for size in self.cache.sizes_for(length)[0 if self.compiled.has_devices else -1 :]:
                self.cache.grow(size)
                self._insert(prefilled, [])
                self._dispatch()  # the program ends at once, as no slot is active
                self.book.forget()
            self.free()

    def _insert(self, prefilled: Prefilled, placements: Sequence[Placement]) -> None:
        """Start up to `insertions` responses in free slots, and sample their first tokens."""
        weights, old = self._loaded(), prefilled.version
        assert old == weights.version, f"prompts prefilled by version {old} cannot be continued by {weights.version}"
        assert not self.book.unread, "a window that was not read yet may hold the last of a slot; read it first"
        self._seat([placement.slot for placement in placements])
        for row, slot, sequence in placements:
            self.book.start(slot, len(prefilled.tokens[row]), limit=sequence.limit - sequence.request.sampled)
            if isinstance(self._shape.config, ModelConfig) and not self._shape.records_routing:
                self._contents.start(slot, sequence, first=prefilled.first[row])
            if prefilled.prompts.choice_PSLk is not None:  # read when the response ends, so nothing waits for it
                sequence.prompt_choice = prefilled.prompts.choice_PSLk, row
        insertion = insertion_of(placements, self.book.slot_B, self.insertions, self._shape.most_stop_tokens)
        bits_IU = self._constraints.start({slot: sequence for _, slot, sequence in placements}, self.insertions)
        ends: Any = prefilled.prompts
        ends = ends._replace(prefix=None, choice_PSLk=None)  # so that one program serves all widths
        name: Any = ("insert", len(ends.length_P), len(self.book.slot_B), *constrained(bits_IU))
        arguments = programs.insert, weights.params, self._slots, ends, insertion._replace(bits_BU=bits_IU)
        self._slots = self.compiled.run(name, *arguments, out=self._layout.slots, donate=1)
        self.cache.place(prefilled, placements, insertion)

    def _dispatch(self) -> None:
        """Dispatch a window of tokens of every active slot, or a verification of drafts, without waiting for them."""
        weights = self._loaded()
        assert self._slots is not None, "nothing was inserted"
        self.cache.hold(np.maximum(self.book.next_tokens_B, self._contents.length_B), self.book.slot_B)
        bits_BU = self._constraints.next(self._slots, self.book.slot_B.tolist())
        call = self.speculation.next_call(self.book, bits_BU, capacity=self.cache.size)
        name = call.name, len(self.book.slot_B), self.cache.size, *call.sizes
        arguments = weights.layers(), weights.params, self.cache.arrays, self._slots, *call.arguments
        how: Any = {"out": (self.cache.layout, self._layout.slots, self._layout.whole), "donate": (2, 3)}
        self.cache.arrays, self._slots, window = self.compiled.run(name, call.program, *arguments, **how)
        self.book.dispatched(window)

    def add(self, request: Request, sampling: Sampling, *, seed: int) -> SequenceState:
        """Queue a request; `step` answers the request, and `cancel` drops it. See `RequestLimits.new_sequence`."""
        sequence = self.new_sequence(request, sampling, seed=seed)
        self.enqueue(sequence)
        return sequence

    def enqueue(self, sequence: SequenceState) -> None:
        """Queue a request whose state was made by `new_sequence`, for example in another thread."""
        self._scheduler.add(sequence)

    def new_sequence(self, request: Request, sampling: Sampling, *, seed: int) -> SequenceState:
        """Validate a request and return its state, not queued yet; see `RequestLimits.new_sequence`."""
        return self.limits.new_sequence(request, sampling, seed=seed)

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[TokenScores]:
        """Score sequences of tokens, also while responses are generated; see `Scoring.run`."""
        return self.scoring.run(sequences, self._loaded(), temperature=temperature)

    def step(self) -> list[Completion]:
        """Fill free slots with waiting requests, sample tokens in all slots, and return the responses that ended.

        Raises:
          RuntimeError: No weights are loaded.
          Diverged: The policy's logits are not finite.
        """
        version, scheduler = self._loaded().version, self._scheduler
        if scheduler.refill_due and not self.book.unread:
            if not self.book.active and not self._contents.length_B.any():
                self._clear()
            self._seat(scheduler.next_slots(self._contents.used))
            while scheduler.placeable:
                if scheduler.prefill_due:
                    self._prefilled = self._prefill(scheduler.take_prompts(self.prefill.most, self._kind))
                assert self._prefilled is not None, "a request was placed before its prompt was prefilled"
                self._insert(self._prefilled, scheduler.place(self.insertions, used=self._contents.used))
            if not scheduler.prefilled:
                self._prefilled = None
        if not self.book.unread and not self.book.active:
            return []
        if not self.book.unread:
            self._dispatch()
        # Not while requests wait: a second window would delay the refill of slots that become free.
        if self._dispatch_ahead and not (scheduler.waiting or self.speculation.pays) and self.book.outlasts:
            self._dispatch()
        ended = self._read()
        if not scheduler.waiting and (fewer := self.book.without_idle(self._contents.length_B > 0, self._slot_counts)):
            self._rearrange(fewer)
        return [sequence.complete(version) for sequence in ended]

    def _read(self) -> list[SequenceState]:
        """Wait for the oldest window, and free the slots of responses that ended in it."""
        read = [(self._scheduler.placed(window.slot), window) for window in self.book.read()]
        for sequence, window in read:
            sequence.extend(window, self._decode)
        self.speculation.read(read, rows=len(self.book.slot_B))
        ended = [sequence for sequence, window in read if not window.active or sequence.stop_text is not None]
        self._end(ended)
        return ended

    def release(self, request_id: int) -> None:
        """Release the cache that `keep` holds for a request."""
        self._contents.release(request_id)

    def cancel(self, sequence: SequenceState) -> None:
        """Drop a request and free its slot; do nothing if the request has ended."""
        if self._scheduler.is_placed(sequence):
            self._end([sequence])
        else:
            self._scheduler.drop(sequence)

    def _end(self, sequences: Sequence[SequenceState]) -> None:
        """Free the slots of sequences, and stop the slots that would sample further tokens."""
        slots = [self._scheduler.end(sequence) for sequence in sequences]
        for slot, sequence in zip(slots, sequences, strict=True):
            self._contents.end(slot, sequence)
            self._constraints.end(slot)
            self.speculation.end(slot)
        if going := [slot for slot in slots if self.book.taken_B[slot]]:
            self._rearrange(self.book.all_but(going))
            self.book.stop(going)

    def _kind(self, sequence: SequenceState) -> Kind:
        return self.prefill.kind(self._contents, sequence.request.prompt)

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefilled:
        return self.prefill.run(prompts, self._loaded(), self.cache, self._contents, self.book.slot_B)

    def _seat(self, slots: Sequence[int]) -> None:
        """Assign rows of the device's arrays to these slots, in addition to the slots in use."""
        if more := self.book.seat(slots, self._contents.length_B > 0, self._slot_counts):
            self._rearrange(more)

    def _rearrange(self, arrangement: Arrangement) -> None:
        """Rearrange the rows of the device's arrays, or stop some of them."""
        row_GB, continues_GB, slot_B = arrangement
        if slot_B is not self.book.slot_B:
            self.cache.keep(row_GB)
        if self._slots is None:
            empty = partial(programs.empty_slots, slots=row_GB.size)
            self._slots = self.compiled.run(("empty slots", row_GB.size), empty, out=self._layout.slots)
        else:
            sizes, arguments = ("keep", len(self.book.slot_B), row_GB.size), (self._slots, row_GB, continues_GB)
            self._slots = self.compiled.run(sizes, programs.keep_rows, *arguments, out=self._layout.slots)
        self.book.slot_B = slot_B

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Answer all requests; arguments and errors are as in `add` and `step`.

        The cache is freed at the end, unless one of the requests has `keep`.

        Args:
          progress: Called after every step with the number of completions so far and the number of requests.
          on_completion: Called with each completion as it is read.

        Returns:
          One completion per request, in the order of the requests.

        Raises:
          RuntimeError: Other requests are unfinished.
          ValueError: Two requests have the same request_id.
        """
        self._loaded()
        checks.check_unique(requests)
        if self.unfinished:
            raise RuntimeError(f"{self.book.active} responses are being generated; finish or free() them first")
        completions: dict[int, Completion] = {}
        stays = any(request.keep for request in requests)
        try:
            for request in requests:
                self.add(request, sampling, seed=seed)
            while self.unfinished:
                for completion in self.step():
                    completions[completion.request_id] = completion
                    if on_completion is not None:
                        on_completion(completion)
                if progress is not None:
                    progress(len(completions), len(requests))
        except BaseException:
            self.free()
            raise
        if not stays:
            self.free()
        return [completions[request.request_id] for request in requests]

    def _loaded(self) -> Weights:
        if self.weights is None:
            raise RuntimeError("the engine has no weights; call load(params, version=...) first")
        return self.weights
