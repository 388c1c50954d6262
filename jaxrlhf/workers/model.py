"""A model on its mesh: packed forward passes, and updates that are one sum of token losses."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
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
from jaxrlhf.parallel import BATCH_AXES, TRAIN, check_divisible, shardings
from jaxrlhf.workers.packing import Packing, Rows

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
    ) -> None:
        self.role, self.config, self.head, self.mesh = role, config, head, mesh
        self.params = params
        self.dtype = dtype
        self._progress = progress
        self._width = width
        self._remat = training.remat
        self._row_tokens, self._rows = microbatch_shape(training, mesh, width=width, role=role)
        self._batch_sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self._forward = jax.jit(self._output)

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
        )

    def _pack(self, sequences: Sequences) -> Packing:
        return Packing(np.asarray(sequences.length_B), width=self._width, rows=self._rows, row_tokens=self._row_tokens)

    def _on_mesh(self, tree: Any) -> Any:
        return jax.device_put(tree, self._batch_sharding)

    def _forward_all(self, sequences: Sequences, *, temperature: float = 1.0) -> Any:
        """`_output` of every sequence, as host `[B, T]` arrays."""
        packing = self._pack(sequences)
        scale = np.float32(temperature)
        outputs = []
        for rows in packing.rows(sequences):
            outputs.append(self._forward(self.params, self._on_mesh(rows), scale))
            self._progress(f"{self.role} forward", len(outputs), packing.microbatches)
        return jax.tree.map(lambda *parts: packing.unpack(np.stack(jax.device_get(parts))), *outputs)

    def items(self) -> dict[str, TreeItem]:
        """The arrays that a checkpoint of this role holds."""
        return {self.role: TreeItem(lambda: self.params, partial(setattr, self, "params"))}


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
        layout = jax.tree.map(lambda x: x.sharding, self.params)
        whole = NamedSharding(self.mesh, PartitionSpec())
        state = jax.eval_shape(self._optimizer.init, self.params)
        self._state_layout = optax.tree_utils.tree_map_params(
            self._optimizer, lambda _, sharding: sharding, state, layout, transform_non_params=lambda _: whole
        )
        self.updates = 0
        self._zeros = jax.jit(partial(jax.tree.map, jnp.zeros_like), out_shardings=layout)
        self._apply = jax.jit(
            self._apply_gradient, donate_argnums=(0, 1), out_shardings=(layout, self._state_layout, whole)
        )
        self._gradient_layout = layout
        self._accumulate: dict[tuple[Objective, Hashable], Any] = {}

    @cached_property
    def optimizer_state(self) -> Any:
        """Made on first use, so that a policy that is only evaluated costs no moments."""
        return jax.jit(self._optimizer.init, out_shardings=self._state_layout)(self.params)

    def items(self) -> dict[str, TreeItem]:
        state = TreeItem(lambda: self.optimizer_state, partial(setattr, self, "optimizer_state"))
        return {**super().items(), f"{self.role}_optimizer": state}

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
                    return token_loss.sum(), sums

                (total, sums), change = jax.value_and_grad(loss, has_aux=True)(params)
                return jax.tree.map(jnp.add, gradient, change), {**sums, "loss": total}

            self._accumulate[key] = jax.jit(add, donate_argnums=1, out_shardings=(self._gradient_layout, None))
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
        for experience in minibatches:
            gradient, metrics = self.gradient(experience, objective, settings, temperature=temperature)
            self.params, self.optimizer_state, norm = self._apply(self.params, self.optimizer_state, gradient)
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
        sums = jax.device_get(sums)
        tokens = [int(np.sum(experience.sequences.mask_BT)) for experience in minibatches]
        means = _means([part for parts in sums for part in parts], tokens=sum(tokens))
        own = {
            f"{self.role}/loss": means.pop("loss") * max(sum(tokens), 1) / len(minibatches),
            f"{self.role}/grad_norm": float(np.mean(norms)),
            f"{self.role}/learning_rate": rate,
            f"{self.role}/tokens": float(sum(tokens)),
        }
        return Updated({**means, **own}, _means(sums[0], tokens=tokens[0]))


def _means(sums: Sequence[dict[str, Any]], *, tokens: int) -> Metrics:
    """Per-token means out of the sums of microbatches."""
    return {name: float(sum(part[name] for part in sums)) / max(tokens, 1) for name in sums[0]}


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
