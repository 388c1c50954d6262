"""A model on its mesh: packed forward passes, and updates that are one sum of token losses."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.architecture import Head, ModelConfig
from jaxrlhf.batch import Array, Experience, Params, Sequences
from jaxrlhf.checkpoint import TreeItem
from jaxrlhf.config import Optimizer, Training
from jaxrlhf.models.decoder import hidden_states
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.models.pipeline import pipeline_over
from jaxrlhf.parallel import (
    BATCH_AXES,
    STAGE_AXES,
    TRAIN,
    Moved,
    check_divisible,
    shardings,
    to_device,
    to_host,
)
from jaxrlhf.workers.packing import Packing, Rows
from jaxrlhf.workers.protocol import Place

Metrics = dict[str, float]
Objective = Callable[..., Any]
"""`(output, mask_RW, weight_RW, fields, settings) -> (loss_RW, metrics)`; see `jaxrlhf.algos.objectives`."""


class Updated(NamedTuple):
    """What an update reports, as means over tokens.

    Attributes:
      metrics: Over all its minibatches.
      first: Over the first, in which the policy is still the one that the old log-probabilities are of.
    """

    metrics: Metrics
    first: Metrics


Progress = Callable[[str, int, int], None]
"""`(phase, done, total)`, called from the thread that does the work."""

_SMALLEST_ROW = 256
"""Rows narrower than this would leave much padding when sequences are short."""


class ModelWorker(ABC):
    """Parameters in the training layout, and what is computed from them per token.

    Args:
      role: For messages.
      config: The model's shape.
      head: What the last hidden state is read with.
      mesh: The role's factored mesh.
      params: In the training layout of `mesh`.
      training: Of the role; a frozen role is given its actor's.
      width: T, columns of the `[B, T]` arrays it is given.
      dtype: Of activations.
      progress: Told how many microbatches and minibatches were started.
      offload: Of `parameters` and `optimizer`, what waits in host memory while it is not in use.

    Attributes:
      place: Of this process in the mesh. The arrays that it is given are its own part of a batch.
    """

    def __init__(
        self,
        role: str,
        config: ModelConfig,
        head: Head,
        mesh: Mesh,
        params: Params,
        training: Training,
        *,
        width: int,
        dtype: jnp.dtype,
        progress: Progress,
        offload: Collection[str] = (),
    ) -> None:
        self.role, self.config, self.head, self.mesh = role, config, head, mesh
        self.place = Place.of(mesh)
        self._parts: dict[str, Any] = {"parameters": params}
        self._layout = jax.tree.map(lambda x: x.sharding, params)
        self._offload, self._users = frozenset(offload), Counter[str]()
        self._moves: list[Moved] = []
        self._pipeline = pipeline_over(mesh, STAGE_AXES, row_axes=BATCH_AXES, weight_axes=("fsdp",))
        self.dtype = dtype
        self._progress = progress
        self._width = width
        self._remat = training.remat
        self._row_tokens, self._rows = microbatch_shape(training, mesh, width=width, role=role)
        self._batch_sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self._forward = jax.jit(self._output, out_shardings=self._batch_sharding)
        self._send_away("parameters")

    @abstractmethod
    def _output(self, params: Params, rows: Rows, temperature: Array) -> Any:
        """What the head says of every token of packed rows."""

    def _hidden(self, params: Params, rows: Rows) -> Array:
        return hidden_states(
            params,
            self.config,
            rows.token_RW,
            rows.position_RW,
            rows.segment_RW,
            remat=self._remat,
            dtype=self.dtype,
            row_sharding=self._batch_sharding,
            pipeline=self._pipeline,
        )

    def _pack(self, sequences: Sequences) -> Packing:
        """Where the tokens of this process's sequences lie; every process makes the same number of microbatches."""
        _, parts = self.place.part(BATCH_AXES)
        return Packing(
            np.asarray(sequences.length_B),
            width=self._width,
            rows=self._rows // parts,
            row_tokens=self._row_tokens,
            agree=_most_of_all_hosts,
        )

    def _on_mesh(self, tree: Any) -> Any:
        """This process's rows, as rows of arrays over the whole mesh."""
        _, parts = self.place.part(BATCH_AXES)

        def put(array: np.ndarray) -> jax.Array:
            whole = (array.shape[0] * parts, *array.shape[1:])
            return jax.make_array_from_process_local_data(self._batch_sharding, array, whole)

        return jax.tree.map(put, tree)

    def _forward_all(self, sequences: Sequences, *, temperature: float = 1.0) -> Any:
        """`_output` of this process's sequences, as host `[B, T]` arrays."""
        packing = self._pack(sequences)
        scale = np.float32(temperature)
        outputs = []
        with self.on_devices("parameters"):
            for rows in packing.rows(sequences):
                outputs.append(self._forward(self.params, self._on_mesh(rows), scale))
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
        if part not in self._offload or self._users[part]:
            return
        arrays = [leaf for leaf in jax.tree.leaves(self._parts[part]) if isinstance(leaf, jax.Array)]
        if not any(array.is_deleted() for array in arrays):  # else they are in the generation layout, and come back
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
        with self._on_devices():
            return super().describe()

    def save(self, directory: Path) -> None:
        with self._on_devices():
            super().save(directory)

    def restore(self, directory: Path) -> None:
        with self._on_devices():
            super().restore(directory)


class TrainedWorker(ModelWorker):
    """A model with an optimizer.

    Args:
      total_updates: Updates of the whole run, over which the learning rate may decay.
    """

    def __init__(self, *args: Any, optimizer: Optimizer, total_updates: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._schedule = learning_rate(optimizer, total_updates=total_updates)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(optimizer.max_grad_norm),
            optax.adamw(
                self._schedule,
                b1=optimizer.beta1,
                b2=optimizer.beta2,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
            ),
        )
        layout = self._layout
        self._whole = whole = NamedSharding(self.mesh, PartitionSpec())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.params)
        state = jax.eval_shape(self._optimizer.init, shapes)
        self._state_layout = optax.tree_utils.tree_map_params(
            self._optimizer, lambda _, sharding: sharding, state, layout, transform_non_params=lambda _: whole
        )
        self.updates = 0
        self._zeros = jax.jit(partial(jax.tree.map, jnp.zeros_like), out_shardings=layout)
        self._apply = jax.jit(
            self._apply_gradient, donate_argnums=(0, 1), out_shardings=(layout, self._state_layout, whole)
        )
        self._accumulate: dict[tuple[Objective, Hashable], Any] = {}

    @contextmanager
    def on_devices(self, *parts: str) -> Iterator[None]:
        """As for every model; the optimizer's state is made when it is first asked for."""
        if "optimizer" in parts and "optimizer" not in self._parts:
            # Not before, so that a policy that is only evaluated costs no moments.
            with super().on_devices("parameters"):
                self._parts["optimizer"] = jax.jit(self._optimizer.init, out_shardings=self._state_layout)(self.params)
            self._send_away("optimizer")
        with super().on_devices(*parts):
            yield

    def counters(self) -> dict[str, int]:
        """Updates made so far, by role; JSON of a checkpoint."""
        return {self.role: self.updates}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from the counters of a checkpoint."""
        self.updates = counters[self.role]

    def items(self) -> dict[str, TreeItem]:
        return {**super().items(), f"{self.role}_optimizer": ResidentItem(self, "optimizer")}

    def _apply_gradient(self, params: Params, state: Any, gradient: Params) -> tuple[Params, Any, jax.Array]:
        changes, state = self._optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state, optax.tree.norm(gradient)

    def _accumulator(self, objective: Objective, settings: Hashable) -> Any:
        """The program that adds one microbatch's gradient, compiled once per objective."""
        key = (objective, settings)
        if key not in self._accumulate:

            def add(params: Params, gradient: Params, rows: Rows, experience: Any, temperature: Array) -> Any:
                mask, weight, fields = experience

                def loss(params: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
                    output = self._output(params, rows, temperature)
                    token_loss, metrics = objective(output, mask, weight, fields, settings)
                    sums = {name: jnp.where(mask, value, 0.0).sum() for name, value in metrics.items()}
                    return token_loss.sum(), {**sums, "tokens": mask.sum(dtype=jnp.float32)}

                (total, sums), change = jax.value_and_grad(loss, has_aux=True)(params)
                return jax.tree.map(jnp.add, gradient, change), {**sums, "loss": total}

            self._accumulate[key] = jax.jit(add, donate_argnums=1, out_shardings=(self._layout, self._whole))
        return self._accumulate[key]

    def gradient(
        self, experience: Experience, objective: Objective, settings: Hashable, *, temperature: float = 1.0
    ) -> tuple[Params, list[dict[str, jax.Array]]]:
        """Gradient of `sum(weight * token_loss)` over all microbatches, and their metric sums."""
        packing = self._pack(experience.sequences)
        arrays = (experience.sequences.mask_BT, experience.weight_BT, experience.fields)
        packed = jax.tree.map(packing.pack, arrays)
        program = self._accumulator(objective, settings)
        gradient, sums = self._zeros(self.params), []
        for index, rows in enumerate(packing.rows(experience.sequences)):
            part = jax.tree.map(lambda x, i=index: x[i], packed)
            gradient, metrics = program(
                self.params, gradient, self._on_mesh(rows), self._on_mesh(part), np.float32(temperature)
            )
            sums.append(metrics)
        return gradient, sums

    def update(
        self,
        minibatches: Sequence[Experience],
        objective: Objective,
        settings: Hashable,
        *,
        temperature: float = 1.0,
    ) -> Updated:
        """One optimizer update per minibatch.

        Raises:
          FloatingPointError: A gradient is not finite.
        """
        sums, norms = [], []
        with self.on_devices("parameters", "optimizer"):
            for experience in minibatches:
                gradient, metrics = self.gradient(experience, objective, settings, temperature=temperature)
                self._parts["parameters"], self._parts["optimizer"], norm = self._apply(
                    self.params, self._parts["optimizer"], gradient
                )
                sums.append(metrics)
                norms.append(norm)
                self._progress(f"{self.role} update", len(norms), len(minibatches))
            norms = [float(norm) for norm in jax.device_get(norms)]
        if not np.all(np.isfinite(norms)):
            raise FloatingPointError(
                f"{self.role}: gradient norms of the last {len(norms)} updates are {norms}; the weights in memory are "
                f"spoilt, resume from the last checkpoint with a lower learning rate or look at samples.jsonl"
            )
        rate = float(self._schedule(self.updates))
        self.updates += len(minibatches)
        totals = [_totals(parts) for parts in jax.device_get(sums)]
        means = _means(totals)
        tokens = sum(total["tokens"] for total in totals)
        own = {
            f"{self.role}/loss": means.pop("loss") * max(tokens, 1) / len(minibatches),
            f"{self.role}/grad_norm": float(np.mean(norms)),
            f"{self.role}/learning_rate": rate,
            f"{self.role}/tokens": tokens,
        }
        return Updated({**means, **own}, _means(totals[:1]))


def _totals(sums: Sequence[dict[str, Any]]) -> Metrics:
    """The sums of one minibatch out of those of its microbatches."""
    return {name: float(sum(part[name] for part in sums)) for name in sums[0]}


def _means(totals: Sequence[Metrics]) -> Metrics:
    """Means per token over minibatches."""
    tokens = max(sum(total["tokens"] for total in totals), 1)
    return {name: sum(total[name] for total in totals) / tokens for name in totals[0] if name != "tokens"}


def _own_rows(array: jax.Array) -> np.ndarray:
    """The rows that this process's devices hold, as a host array."""
    if array.is_fully_addressable:
        return np.asarray(array)
    blocks = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(blocks[start]) for start in sorted(blocks)])


def _most_of_all_hosts(count: int) -> int:
    """The largest of the counts that the processes of this program give."""
    if jax.process_count() == 1:
        return count
    from jax.experimental import multihost_utils

    return int(multihost_utils.process_allgather(np.int32(count)).max())


def microbatch_shape(training: Training, mesh: Mesh, *, width: int, role: str) -> tuple[int, int]:
    """Tokens of a packed row, and rows of a microbatch, from the token budget.

    Raises:
      ValueError: The budget does not hold one row for each shard of the batch.
    """
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    row_tokens = max(width, min(_SMALLEST_ROW, training.tokens_per_microbatch // shards))
    rows = training.tokens_per_microbatch // row_tokens // shards * shards
    if rows == 0:
        raise ValueError(
            f"{role}.tokens_per_microbatch={training.tokens_per_microbatch} does not hold a row of {row_tokens} tokens "
            f"on each of {shards} data-parallel devices; raise it to at least {row_tokens * shards}"
        )
    return row_tokens, rows


def learning_rate(optimizer: Optimizer, *, total_updates: int) -> optax.Schedule:
    """Linear warm-up from 0, then constant or decayed to 0 at `total_updates`."""
    peak, warmup = optimizer.learning_rate, optimizer.warmup_updates
    rest = max(total_updates - warmup, 1)
    tail = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[optimizer.decay]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), tail], [warmup]) if warmup else tail


def layout_of(mesh: Mesh, config: ModelConfig, head: Head, *, role: str) -> Any:
    """The training shardings of a model's parameters, checked to split evenly."""
    dims = param_dims(config, head)
    check_divisible(mesh, dims, param_shapes(config, head, jnp.float32), TRAIN, role=role)
    return shardings(mesh, dims, TRAIN)
