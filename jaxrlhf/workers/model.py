"""A model on its mesh: packed forward passes, and parts that may wait in host memory."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.batch import Array, Params, Sequences
from jaxrlhf.batching.microbatch import packed_row_tokens
from jaxrlhf.batching.packing import Packing, Rows
from jaxrlhf.batching.transfer_protocol import Place
from jaxrlhf.checkpoint import TreeItem
from jaxrlhf.config import Refusal, Training
from jaxrlhf.models.attention.attention import Attention
from jaxrlhf.models.causal_lm import AnyModel, OwnModel
from jaxrlhf.models.config import Head
from jaxrlhf.models.decoder import hidden_states, routed_states
from jaxrlhf.models.lora.lora import adapted
from jaxrlhf.models.moe.experts import NO_ROUTER_INPUTS, RouterInputs, RouterOutputs
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.models.pipeline import pipeline_over
from jaxrlhf.resharding.offload import Moved, to_device, to_host
from jaxrlhf.sharding.mesh import BATCH_AXES, STAGE_AXES, WEIGHT_AXES
from jaxrlhf.sharding.replicas import replicas_of
from jaxrlhf.sharding.rules import TRAIN, check_divisible, shardings

Metrics = dict[str, float]
Progress = Callable[[str, int, int], None]
"""`(phase, done, total)`, called from the thread that does the work."""


class ModelWorker(ABC):
    """Parameters in the training layout, and what is computed from them per token.

    Args:
      role: For messages.
      config: The model's shape.
      head: What the last hidden state is read with.
      mesh: The role's factored mesh.
      params: In the training layout of `mesh`.
      training: Of the role; a frozen role is given its actor's.
      remat: Each layer is computed again in the backward pass.
      width: T, columns of the `[B, T]` arrays it is given.
      longest_response: Tokens of it; the rest of the width is the longest prompt's.
      dtype: Of activations.
      attention: Kernels for `mesh`.
      progress: Told how many microbatches and minibatches were started.
      offload: Of `parameters` and `optimizer`, what waits in host memory while it is not in use.

    Attributes:
      place: Of this process in the mesh. The arrays that it is given are its own part of a batch.
      replicas: Of the weights, each of which runs the role's programs over its own rows.
    """

    _replays: ClassVar[bool] = False
    """Whether tokens go through the experts that they were sampled with, where those were recorded."""

    def __init__(
        self,
        role: str,
        config: AnyModel,
        head: Head,
        mesh: Mesh,
        params: Params,
        training: Training,
        *,
        remat: bool,
        width: int,
        longest_response: int | None = None,
        dtype: jnp.dtype,
        attention: Attention,
        progress: Progress,
        offload: Collection[str] = (),
    ) -> None:
        self.role, self.config, self.head, self.mesh = role, config, head, mesh
        self.place = Place.of(mesh)
        self._parts: dict[str, Any] = {"parameters": params}
        self._layout = jax.tree.map(lambda x: x.sharding, params)
        self._offload, self._users = frozenset(offload), Counter[str]()
        self._moves: list[Moved] = []
        self.replicas = replicas_of(mesh)
        inner, row_axes = self.replicas.inner_mesh, self.replicas.row_axes
        self._pipeline = pipeline_over(inner, STAGE_AXES, row_axes=row_axes, weight_axes=WEIGHT_AXES)
        self.dtype, self._attention = dtype, replace(attention, mesh=inner, row_axes=row_axes)
        self._progress = progress
        self._width, self._longest_response = width, longest_response
        self._remat, self._training = remat, training
        self._batch_sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self.row_shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        self._row_tokens, rows = microbatch_shape(training, mesh, width=width, role=role)
        self._rows = rows // self.row_shards
        self._attention_rows: dict[int, int] = {}
        whole, each = PartitionSpec(), self.replicas.each
        forward = self.replicas.run(self._output, (whole, each, whole), each)
        self._forward = jax.jit(forward, out_shardings=self._batch_sharding)
        self._send_away("parameters")

    @abstractmethod
    def _read(self, params: Params, hidden_RWD: Array, rows: Rows, temperature: Array, *, entropy: bool = False) -> Any:
        """What the head says of the chosen tokens of packed rows, with the entropy of their distributions if asked."""

    def _output(self, params: Params, rows: Rows, temperature: Array) -> Any:
        return self._read(params, self._hidden(params, rows)[0], rows, temperature)

    def _hidden(
        self, params: Params, rows: Rows, router: RouterInputs = NO_ROUTER_INPUTS
    ) -> tuple[Array, RouterOutputs | None]:
        """The last hidden states, and what routers did."""
        tokens = rows.token_RW, rows.position_RW, rows.segment_RW
        how: dict[str, Any] = {
            "shared_prefix": rows.shared_prefix,
            "remat": self._remat,
            "dtype": self.dtype,
            "attention": self._attention,
            "row_sharding": self.replicas.row_sharding,
            "pipeline": self._pipeline,
        }
        if self.config.experts is None:
            return hidden_states(params, self.config, *tokens, **how), None
        return routed_states(params, self.config, *tokens, router=router._replace(replayed=rows.choice_RWLk), **how)

    def _pack(self, sequences: Sequences) -> Packing:
        """Where the tokens of this process's sequences lie; every process makes the same number of microbatches."""
        _, parts = self.place.part(BATCH_AXES)
        return Packing(
            sequences if self._replays else replace(sequences, choice_BTLk=None),
            rows=self._rows,
            row_tokens=self._row_tokens,
            devices=self.row_shards // parts,
            stages=1 if self._pipeline is None else self._pipeline.stages,
            longest_response=self._longest_response,
            shares=not isinstance(self.config, OwnModel),
            attention_rows=self._attention_rows,
            agree=most_of_all_hosts,
        )

    def _on_mesh(self, tree: Any) -> Any:
        """This process's rows, as rows of arrays over the whole mesh."""
        _, parts = self.place.part(BATCH_AXES)

        def put(array: np.ndarray) -> jax.Array:
            whole = (array.shape[0] * parts, *array.shape[1:])
            return jax.make_array_from_process_local_data(self._batch_sharding, array, whole)

        return jax.tree.map(put, tree)

    def _forward_all(self, sequences: Sequences, *, temperature: float = 1.0, adapters: Params | None = None) -> Any:
        """`_output` of this process's sequences, as host `[B, T]` arrays.

        Args:
          adapters: In place of those that are trained beside frozen parameters, or none of them.
        """
        packing = self._pack(sequences)
        scale = np.float32(temperature)
        outputs = []
        with self.on_devices("parameters"):
            params = self.params if adapters is None else adapted(self._parts["parameters"], adapters)
            for rows in packing.rows():
                outputs.append(self._forward(params, self._on_mesh(rows), scale))
                self._progress(f"{self.role} forward", len(outputs), packing.microbatches)
            return jax.tree.map(lambda *parts: packing.unpack(np.stack([_own_rows(x) for x in parts])), *outputs)

    @property
    def params(self) -> Params:
        """Float32 masters, or a frozen role's weights, in the training layout."""
        return self._parts["parameters"]

    @contextmanager
    def on_devices(self, *parts: str) -> Iterator[None]:
        """Within the block these parts of the model are on the devices, wherever they wait otherwise."""
        for part in parts:
            if part in self._offload and not self._users[part]:
                self._move(part, to_device)
            self._users[part] += 1
        try:
            yield
        finally:
            for part in parts:
                self._users[part] -= 1
                self._send_away(part)

    def _send_away(self, part: str) -> None:
        if part in self._offload and not self._users[part]:
            self._move(part, to_host)

    def _move(self, part: str, move: Callable[[Any], tuple[Any, Moved]]) -> None:
        self._parts[part], moved = move(self._parts[part])
        self._moves.append(moved)

    def take_metrics(self) -> Metrics:
        """What moving parts between device and host cost since the last call; nothing if none moves."""
        moves, self._moves = self._moves, []
        if not self._offload:
            return {}
        return {
            f"offload/{self.role}_s": sum(moved.seconds for moved in moves),
            f"offload/{self.role}_bytes": float(sum(moved.bytes_per_device for moved in moves)),
        }

    def items(self) -> dict[str, TreeItem]:
        """What a checkpoint of this role holds."""
        return {self.role: ResidentItem(self, "parameters")}


class ResidentItem(TreeItem):
    """A part of a model in a checkpoint; it is brought to the devices to be saved or restored."""

    def __init__(self, worker: ModelWorker, part: str) -> None:
        super().__init__(lambda: worker._parts[part], lambda tree: worker._parts.__setitem__(part, tree))
        self._on_devices = partial(worker.on_devices, part)

    def describe(self) -> dict[str, str]:
        with self._on_devices():  # an optimizer's state is made when it is first asked for
            return super().describe()

    def save(self, directory: Path) -> None:
        with self._on_devices():
            super().save(directory)

    def restore(self, directory: Path) -> None:
        with self._on_devices():
            super().restore(directory)


def _own_rows(array: jax.Array) -> np.ndarray:
    """The rows that this process's devices hold, as a host array."""
    if array.is_fully_addressable:
        return np.asarray(array)
    blocks = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(blocks[start]) for start in sorted(blocks)])


def most_of_all_hosts(numbers: np.ndarray) -> np.ndarray:
    """The largest of each of the numbers that the processes of this program give."""
    if jax.process_count() == 1:
        return numbers
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(numbers.astype(np.int32))).max(axis=0)


def microbatch_shape(training: Training, mesh: Mesh, *, width: int, role: str) -> tuple[int, int]:
    """Tokens of a packed row, and rows of a microbatch, from the token budget.

    Raises:
      Refusal: The budget does not hold one row for each shard of the batch.
    """
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    row_tokens = packed_row_tokens(width, budget=training.tokens_per_microbatch // shards)
    rows = training.tokens_per_microbatch // row_tokens // shards
    stages = training.layout.stage
    rows = (rows // stages * stages if rows > stages else rows) * shards  # whole rounds keep a pipeline busy
    if rows == 0:
        raise Refusal(
            f"{role}.tokens_per_microbatch={training.tokens_per_microbatch} does not hold a row of {row_tokens} tokens "
            f"on each of {shards} data-parallel devices; raise it to at least {row_tokens * shards}"
        )
    return row_tokens, rows


def layout_of(mesh: Mesh, config: AnyModel, head: Head, *, role: str) -> Any:
    """The training shardings of a model's parameters, checked to split evenly."""
    stages = math.prod(mesh.shape[axis] for axis in STAGE_AXES)
    if isinstance(config, OwnModel) and stages > 1:
        raise Refusal(f"{role}: {stages} stages divide the layers of the decoder, not {config.name}; use stage=1")
    dims = param_dims(config, head)
    check_divisible(mesh, dims, param_shapes(config, head, jnp.float32), TRAIN, role=role)
    return shardings(mesh, dims, TRAIN)
