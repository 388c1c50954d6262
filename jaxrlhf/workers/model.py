"""Model worker: packed forward passes of one model on its mesh."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import PreTrainedTokenizerBase

from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.batch import KEPT, ROUTING, Array, Params, RolloutBatch, Sequences
from jaxrlhf.batching.microbatch import packed_row_tokens
from jaxrlhf.batching.packing import PackedBatch, Packing
from jaxrlhf.batching.ragged import RaggedBatch
from jaxrlhf.batching.transfer_protocol import RankCoordinates
from jaxrlhf.checkpoint import TreeItem
from jaxrlhf.config import Refusal, Training
from jaxrlhf.models.attention.attention import Segments
from jaxrlhf.models.causal_lm import AnyModel, CausalLM
from jaxrlhf.models.config import Head
from jaxrlhf.models.decoder import HiddenStates, hidden_states
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.heads import chunk_tokens, token_logp, values
from jaxrlhf.models.lora.lora import adapted
from jaxrlhf.models.moe.experts import NO_ROUTER_INPUTS, RouterInputs
from jaxrlhf.models.mtp.loss import mtp_logp
from jaxrlhf.models.pipeline import pipeline_over
from jaxrlhf.models.vision.rows import Pixels, StripShape, no_pixels
from jaxrlhf.sharding.described import are_here
from jaxrlhf.sharding.mesh import BATCH_AXES, STAGE_AXES, TOKEN_AXES, WEIGHT_AXES
from jaxrlhf.sharding.replicas import replicas_of
from jaxrlhf.workers.offloadable import Offloadable, OffloadableItem

Metrics = dict[str, float]
Wanted = Literal["output", "entropy", "likeliest"]
"""Result of a forward pass. `output`: values or log-probabilities; `entropy`: log-probabilities and entropies;
`likeliest`: log-probabilities of the tokens, and of the likeliest tokens in their places."""
Progress = Callable[[str, int, int], None]
"""Progress callback `(phase, done, total)`, called from the thread that does the work."""


@dataclass(frozen=True)
class ModelSetup:
    """Settings of one model on its mesh.

    Attributes:
      width: T, number of columns of the model's `[B, T]` inputs.
      longest_response: Number of tokens of the longest response; the rest of the width is for the longest prompt.
      together: Number of the longest sequences that a packed row has space for, `Algorithm.together`.
      progress: Callback for the number of started microbatches and minibatches.
      offload: Parts kept in host memory while they are not in use: `parameters`, `optimizer`.
      temperature: Rollout temperature, the default for log-probabilities.
      staleness: Maximum number of versions between the policy that sampled a response and this policy.
      tokenizers: Tokenizers of the policy and of this model; None if they are the same.
    """

    role: str
    config: AnyModel
    head: Head
    mesh: Mesh
    training: Training
    width: int
    longest_response: int
    execution: Execution
    progress: Progress
    offload: Collection[str]
    temperature: float
    pixels: Pixels = no_pixels
    staleness: int = 0
    together: int = 1
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None


class ModelWorker:
    """Worker of one model, whose head is read at every token.

    Attributes:
      place: Coordinates of this process in the mesh. Arguments are this process's part of a batch.
      parameters: Float32 master weights or frozen weights, in the training layout.
      has_devices: False if the devices are only described: programs are lowered instead of run, and results are zeros.
      lowered: Lowered programs by name, if the devices are only described.
    """

    replays_routing: ClassVar[bool] = False
    """True to route tokens through the experts they were sampled with, if recorded (router replay)."""
    keeps_sampled: ClassVar[bool] = False
    """True to normalize log-probabilities over the sampling mask of each token, if recorded (keep sampling mask)."""
    likeliest_among: np.ndarray | None = None
    """bool, `[vocab]`, token ids that are read as the likeliest; None reads all."""

    def __init__(self, setup: ModelSetup, params: Params) -> None:
        self.setup, self.role, self.config, self.mesh = setup, setup.role, setup.config, setup.mesh
        self.place = RankCoordinates.of(self.mesh)
        self.has_devices, self.lowered = are_here(list(self.mesh.devices.flat)), dict[str, jax.stages.Lowered]()
        self.replicas = replicas_of(self.mesh)
        inner, row_axes = self.replicas.inner_mesh, self.replicas.row_axes
        pipeline = pipeline_over(inner, STAGE_AXES, row_axes=row_axes, weight_axes=WEIGHT_AXES)
        self._execution = replace(setup.execution, mesh=inner, row_axes=row_axes, pipeline=pipeline)
        self._batch_sharding = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        self.row_shards, self.token_shards = (
            math.prod(self.mesh.shape[axis] for axis in axes) for axes in (BATCH_AXES, TOKEN_AXES)
        )
        widest = setup.together * setup.width
        self._row_tokens, rows = microbatch_shape(setup.training, self.mesh, width=widest, role=self.role)
        self._rows = rows // self.row_shards
        self._attention_rows: dict[int, int] = {}
        self._patch_capacity: list[StripShape] = []
        whole, each = PartitionSpec(), self.replicas.each
        self._forward = {
            wanted: jax.jit(
                self.replicas.run(partial(self._output, wanted=wanted), (whole, each, whole), each),
                out_shardings=self._batch_sharding,
            )
            for wanted in get_args(Wanted)
        }
        self.parameters = Offloadable(params, offload="parameters" in setup.offload)

    @property
    def params(self) -> Params:
        """Parameters used by forward passes."""
        return self.parameters.tree

    def forward(
        self,
        sequences: Sequences,
        *,
        temperature: float = 1.0,
        adapters: Params | None = None,
        wanted: Wanted = "output",
    ) -> Any:
        """Run the model on this process's sequences, and return the head's output as host `[B, T]` arrays.

        Args:
          adapters: Adapters to use instead of the trained ones; an empty tree uses the frozen parameters alone.
          wanted: Result to return; see `Wanted`.
        """
        batch = RaggedBatch.of(replace(sequences, recorded=self._recorded(sequences.recorded)))
        packing, tokens = self.pack(batch), len(batch.columns["token"])
        scale = np.float32(temperature)
        outputs = []
        with self.parameters.on_devices():
            params = self.params if adapters is None else adapted(self.parameters.tree, adapters)
            for rows in packing.rows():
                if not self.has_devices:
                    lowered = self._lower_forward(params, rows, scale, wanted)
                    zeros = jax.tree.map(lambda leaf: np.zeros((tokens, *leaf.shape[2:]), leaf.dtype), lowered)
                    return jax.tree.map(batch.padded, zeros)
                outputs.append(self._forward[wanted](params, self._on_mesh(rows), scale))
                self.setup.progress(f"{self.role} forward", len(outputs), packing.microbatches)
            return jax.tree.map(lambda *parts: batch.padded(packing.unpack([*map(_own_rows, parts)])), *outputs)

    def _lower_forward(self, params: Params, rows: PackedBatch, scale: np.floating, wanted: Wanted) -> Any:
        """Lower the forward program, and return the shapes of the head's output."""
        name = "forward" if wanted == "output" else f"forward with {wanted}"
        self.lowered[name] = self._forward[wanted].lower(params, self._on_mesh(rows), scale)
        return self.lowered[name].out_info

    def log_prob(
        self, sampled: RolloutBatch | Sequences, *, temperature: float | None = None, adapters: Params | None = None
    ) -> Array:
        """Return log pi of every response token, `[B, T]`. `temperature=None` takes the rollout's temperature."""
        scale = self.setup.temperature if temperature is None else temperature
        output: TokenOutput = self.forward(sequences_of(sampled), temperature=scale, adapters=adapters)
        return output.logp

    def pack(self, batch: RaggedBatch, *, prompts: int | None = None, together: int = 1) -> Packing:
        """Pack this process's sequences into microbatches; every process makes the same number of microbatches.

        Args:
          prompts: Maximum number of distinct prompts of the sequences; None counts the prompts they have.
          together: Number of consecutive sequences that go into one row, at most `ModelSetup.together`.
        """
        _, parts = self.place.part(BATCH_AXES)
        vision = self.config.vision
        linear = isinstance(self.config, CausalLM) or self.config.linear is not None
        return Packing(
            replace(batch, columns=batch.columns | {"recorded": self._recorded(batch.columns["recorded"])}),
            rows=self._rows,
            row_tokens=self._row_tokens,
            devices=self.row_shards // parts,
            stages=self._execution.stages,
            token_shards=self.token_shards,
            longest_response=self.setup.longest_response,
            prompts=prompts,
            together=together,
            shares=not isinstance(self.config, CausalLM) and not (vision is not None and vision.both_ways),
            in_rows=self._execution.rows_kernel == "xla" and not linear,
            attention_rows=self._attention_rows,
            vision=vision,
            pixels=self.setup.pixels,
            patch_capacity=self._patch_capacity,
            agree=most_of_all_hosts,
        )

    def _recorded(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recorded columns that this model reads."""
        read = {ROUTING: self.replays_routing, KEPT: self.keeps_sampled}
        return {name: column for name, column in columns.items() if read.get(name)}

    def take_metrics(self) -> Metrics:
        """Return the cost of moves between device and host since the last call; empty if nothing is offloaded."""
        moves = [moved for held in self.trees.values() for moved in held.take_moves()]
        if not self.setup.offload:
            return {}
        return {
            f"offload/{self.role}_s": sum(moved.seconds for moved in moves),
            f"offload/{self.role}_bytes": float(sum(moved.bytes_per_device for moved in moves)),
        }

    def counters(self) -> dict[str, int]:
        """Return the padded sizes for images, as JSON for a checkpoint.

        Results round differently with other sizes, so a resumed run uses the same ones.
        """
        return {f"{self.role}/{name}": count for row in self._patch_capacity for name, count in row._asdict().items()}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Restore the counters of a checkpoint."""
        own = {name: counters[key] for name in StripShape._fields if (key := f"{self.role}/{name}") in counters}
        self._patch_capacity[:] = [StripShape(**own)] if own else []

    def items(self) -> dict[str, TreeItem]:
        """Return this role's items of a checkpoint."""
        return {self.role: OffloadableItem(self.parameters)}

    @property
    def trees(self) -> dict[str, Offloadable]:
        """Arrays that the worker holds between calls, by part."""
        return {"parameters": self.parameters}

    def _output(self, params: Params, rows: PackedBatch, temperature: Array, *, wanted: Wanted) -> TokenOutput | Array:
        how: dict[str, Any] = {} if wanted == "output" else {wanted: True}
        return self._read(params, self._hidden(params, rows).hidden_RWD, rows, temperature, **how)

    def _hidden(self, params: Params, rows: PackedBatch, router: RouterInputs = NO_ROUTER_INPUTS) -> HiddenStates:
        """Return the hidden states of packed rows, and the routers' outputs."""
        tokens = rows.token_RW, rows.position_RW, rows.segment_RW
        how: dict[str, Any] = {"shared_prefix": rows.shared_prefix, "execution": self._execution}
        if rows.images is not None:
            how["images"] = rows.images
        if self.config.experts is not None:
            how["router"] = router._replace(replayed=rows.recorded.get(ROUTING))
        return hidden_states(params, self.config, *tokens, **how)

    def _read(
        self,
        params: Params,
        hidden_RWD: Array,
        rows: PackedBatch,
        temperature: Array,
        *,
        entropy: bool = False,
        likeliest: bool = False,
        named_RWK: Array | None = None,
    ) -> TokenOutput | Array:
        """Return the head's output at the response tokens: values, or log-probabilities and (with `entropy`) entropies.

        Args:
          likeliest: True to return also the log-probabilities of the likeliest tokens.
          named_RWK: Further token ids to read at each token; see `token_logp`.
        """
        if self.setup.head == "value":
            assert not (entropy or likeliest), "a value head has no token distribution"
            return values(params, hidden_RWD)
        tokens = params, self.config, hidden_RWD, rows.token_RW, rows.mask_RW
        how: dict[str, Any] = {
            "kept_RWK": rows.recorded.get(KEPT),
            "temperature": temperature,
            "chunk_tokens": chunk_tokens() * self.replicas.row_shards * self.token_shards,
            "execution": self._execution,
        }
        if likeliest:
            among_V = np.ones(self.config.vocab_size, bool) if self.likeliest_among is None else self.likeliest_among
            return token_logp(*tokens, among_V=jnp.asarray(among_V), **how)
        return token_logp(*tokens, entropy=entropy, named_RWK=named_RWK, **how)

    def _mtp_logp(
        self, params: Params, hidden_RWD: Array, rows: PackedBatch, temperature: Array
    ) -> tuple[Array, Array]:
        """Return what the layer for the second next token says of the response tokens; see `mtp_logp`."""
        assert not isinstance(self.config, CausalLM), "only the decoder has such a layer"
        tokens = rows.token_RW, rows.position_RW, rows.mask_RW
        attended = Segments(rows.segment_RW) if rows.shared_prefix is None else rows.shared_prefix
        chunk = chunk_tokens() * self.replicas.row_shards * self.token_shards
        how: dict[str, Any] = {"temperature": temperature, "chunk_tokens": chunk, "execution": self._execution}
        return mtp_logp(params, self.config, hidden_RWD, *tokens, attended, **how)

    def _on_mesh(self, tree: Any) -> Any:
        """Make global arrays over the whole mesh from this process's rows."""
        _, parts = self.place.part(BATCH_AXES)

        def put(array: np.ndarray) -> Any:
            whole = (array.shape[0] * parts, *array.shape[1:])
            if not self.has_devices:
                return jax.ShapeDtypeStruct(whole, array.dtype, sharding=self._batch_sharding)
            return jax.make_array_from_process_local_data(self._batch_sharding, array, whole)

        return jax.tree.map(put, tree)


def sequences_of(sampled: RolloutBatch | Sequences) -> Sequences:
    """Return the sequences of a rollout, or the argument itself if it is sequences."""
    return sampled.sequences if isinstance(sampled, RolloutBatch) else sampled


def _own_rows(array: jax.Array) -> np.ndarray:
    """Return the rows on this process's devices as a host array."""
    if array.is_fully_addressable:
        return np.asarray(array)
    blocks = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(blocks[start]) for start in sorted(blocks)])


def most_of_all_hosts(numbers: np.ndarray) -> np.ndarray:
    """Return the elementwise maximum of the numbers over all processes."""
    if jax.process_count() == 1:
        return numbers
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(numbers.astype(np.int32))).max(axis=0)


def microbatch_shape(training: Training, mesh: Mesh, *, width: int, role: str) -> tuple[int, int]:
    """Return the tokens of a packed row and the rows of a microbatch, from the token budget.

    Raises:
      Refusal: The budget does not hold one row for each shard of the batch.
    """
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    context = training.layout.context
    row_tokens = packed_row_tokens(width, budget=training.tokens_per_microbatch // shards, token_shards=context)
    rows = training.tokens_per_microbatch // row_tokens // shards
    stages = training.layout.stage
    rows = (rows // stages * stages if rows > stages else rows) * shards  # whole rounds keep a pipeline busy
    if rows == 0:
        raise Refusal(
            f"{role}.tokens_per_microbatch={training.tokens_per_microbatch} does not hold a row of {row_tokens} "
            f"tokens on each of {shards} data-parallel devices; set at least {row_tokens * shards}"
        )
    return row_tokens, rows
