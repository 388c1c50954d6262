"""Trained model worker: each update minimizes one sum of weighted token losses."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf.batch import Array, Diverged, Params
from jaxrlhf.batching.packing import PackedBatch, Packing
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.checkpoint import TreeItem
from jaxrlhf.config import Optimizer, Refusal, Training
from jaxrlhf.models.causal_lm import AnyModel, CausalLM
from jaxrlhf.models.lora.lora import adapted, declare_adapters
from jaxrlhf.models.parameters import declare
from jaxrlhf.optimizers.groups import ParameterGroups, layers_of
from jaxrlhf.optimizers.optimizer import learning_rate, optimizer_of, without_mtp
from jaxrlhf.optimizers.state import state_layout
from jaxrlhf.sharding.described import described
from jaxrlhf.workers.model import Metrics, ModelSetup, ModelWorker
from jaxrlhf.workers.offloadable import Offloadable, OffloadableItem
from jaxrlhf.workers.role_weights import layout_in
from jaxrlhf.workers.router_replay import router_coefficient, router_inputs, router_metrics

Objective = Callable[..., Any]
"""Function `(output, mask_RW, weight_RW, fields, settings) -> (loss_RW, metrics)`; see `jaxrlhf.algos.objectives`."""


class Updated(NamedTuple):
    """Metrics of an update, as means over tokens.

    Attributes:
      metrics: Means over all minibatches.
      first: Means over the first minibatch, in which the policy still equals the old policy.
    """

    metrics: Metrics
    first: Metrics


class TrainedWorker(ModelWorker):
    """Worker of one model with an optimizer.

    Args:
      total_updates: Number of updates of the whole run, over which the learning rate may decay.
      adapters: Adapters to train while the parameters are frozen; None trains the parameters.

    Attributes:
      trained: The parameters, or the adapters if there are any.
      optimizer: Optimizer state, made at its first use: a policy that is only evaluated needs no memory for moments.
    """

    def __init__(
        self,
        setup: ModelSetup,
        params: Params,
        *,
        optimizer: Optimizer,
        total_updates: int,
        adapters: Params | None = None,
    ) -> None:
        super().__init__(setup, params)
        self._router_loss = router_coefficient(self.config, setup.training.router_loss, role=self.role)
        self._mtp_loss = mtp_coefficient(self.config, setup.training, role=self.role) if setup.head == "lm" else 0.0
        trained = params if adapters is None else adapters
        layout = layout_in(trained)
        self.adapters = None if adapters is None else Offloadable(adapters)
        self.trained = self.adapters or self.parameters
        self._schedule = learning_rate(optimizer, total_updates=total_updates)
        lora = setup.training.lora
        declared = declare(self.config, setup.head)
        if adapters is not None and lora is not None:
            declared = declare_adapters(self.config, setup.head, lora)
        self._groups = ParameterGroups.of(optimizer, declared, layers_of(self.config))
        self._optimizer = optimizer_of(optimizer, declared, self._groups, total_updates=total_updates)
        self._whole = whole = NamedSharding(self.mesh, PartitionSpec())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trained)
        state = jax.eval_shape(self._optimizer.init, shapes)
        self._state_layout = state_layout(state, shapes, layout, whole)
        self.optimizer = Offloadable(self._initial_state, offload="optimizer" in setup.offload)
        self.updates = 0
        replicas = self.replicas
        self._stacked = jax.tree.map(replicas.stacked, layout)
        self._zeros = jax.jit(
            partial(jax.tree.map, lambda x: jnp.zeros(replicas.stacked_shape(x.shape), x.dtype)),
            out_shardings=self._stacked,
        )
        self._sum: Any = lambda gradient: gradient
        if replicas.axes:
            add_up = partial(jax.tree.map, lambda parts: parts.sum(axis=0))
            self._sum = jax.jit(add_up, out_shardings=layout)
        self._apply = jax.jit(
            self._apply_gradient, donate_argnums=(0, 1), out_shardings=(layout, self._state_layout, whole)
        )
        self._gradient_programs: dict[tuple[Hashable, Hashable], Any] = {}

    @property
    def params(self) -> Params:
        """Parameters used by forward passes, adapters applied."""
        return adapted(self._frozen, self.trained.tree)

    @property
    def _frozen(self) -> Params:
        """Frozen parameters; empty if the parameters are trained."""
        return {} if self.adapters is None else self.parameters.tree

    def counters(self) -> dict[str, int]:
        """Return the number of updates so far and the padded sizes for images, as JSON for a checkpoint."""
        return {**super().counters(), self.role: self.updates}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        super().set_counters(counters)
        self.updates = counters[self.role]

    def items(self) -> dict[str, TreeItem]:
        name = self.role if self.adapters is None else f"{self.role}_adapters"
        return {name: OffloadableItem(self.trained), f"{self.role}_optimizer": OffloadableItem(self.optimizer)}

    @property
    def trees(self) -> dict[str, Offloadable]:
        adapters = {} if self.adapters is None else {"adapters": self.adapters}
        return {"parameters": self.parameters, **adapters, "optimizer": self.optimizer}

    def _initial_state(self) -> Any:
        with self.parameters.on_devices():
            return jax.jit(self._optimizer.init, out_shardings=self._state_layout)(self.trained.tree)

    def _apply_gradient(self, trained: Params, state: Any, gradient: Params) -> tuple[Params, Any, jax.Array]:
        changes, state = self._optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, changes), state, optax.tree.norm(without_mtp(gradient))

    def gradient_program(self, objective: Objective, settings: Hashable) -> Any:
        """Return the program that adds a microbatch's gradient to each replica's gradient, compiled per objective."""
        key = (_identity(objective), settings)
        if key not in self._gradient_programs:

            def add(
                trained: Params,
                frozen: Params,
                gradient: Params,
                rows: PackedBatch,
                experience: Any,
                temperature: Array,
            ) -> Any:
                weight, fields = experience
                fields = {**fields, "segment": rows.segment_RW}
                mask = rows.mask_RW

                def loss(trained: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
                    params = adapted(frozen, self._groups.without_frozen_gradients(trained))
                    hidden_RWD, routed = self._hidden(params, rows, router_inputs(rows))
                    named = {"named_RWK": fields["named"].astype(jnp.int32)} if "named" in fields else {}
                    entropy = "entropy_weight" in fields
                    output = self._read(params, hidden_RWD, rows, temperature, entropy=entropy, **named)
                    token_loss, metrics = objective(output, mask, weight, fields, settings)
                    shares = jnp.where(mask, fields.get("router_weight", weight), 0.0)
                    if self._mtp_loss:
                        logp, read = self._mtp_logp(params, hidden_RWD, rows, temperature)
                        token_loss -= self._mtp_loss * jnp.where(read, shares * logp, 0.0)
                        metrics = {**metrics, f"mtp/{self.role}_loss": jax.lax.stop_gradient(-logp)}
                    if routed is not None:
                        assert routed.loss_RW is not None, "the routers' loss is missing"
                        token_loss += self._router_loss * shares * routed.loss_RW.mean(axis=0)
                        metrics = {**metrics, **router_metrics(routed, rows, self.config, role=self.role)}
                    sums = {name: jnp.where(mask, value, 0.0).sum() for name, value in metrics.items()}
                    return token_loss.sum(), {**sums, "tokens": mask.sum(dtype=jnp.float32)}

                (total, sums), change = jax.value_and_grad(loss, has_aux=True)(trained)
                gradient = jax.tree.map(lambda parts, part: parts + part.reshape(parts.shape), gradient, change)
                return gradient, jax.lax.psum({**sums, "loss": total}, self.replicas.axes)

            whole, each = PartitionSpec(), self.replicas.each
            program = self.replicas.run(add, (whole, whole, each, each, each, whole), (each, whole))
            self._gradient_programs[key] = jax.jit(
                program, donate_argnums=2, out_shardings=(self._stacked, self._whole)
            )
        return self._gradient_programs[key]

    def _packed(self, experience: Experience) -> tuple[Packing, Any]:
        """Return the packing of an update's sequences, and the packed weights and fields."""
        packing = self.pack(experience.batch, prompts=experience.prompts, together=experience.together)
        columns = experience.batch.columns
        return packing, jax.tree.map(packing.pack, (columns["weight"], columns["fields"]))

    def gradient(
        self, experience: Experience, objective: Objective, settings: Hashable, *, temperature: float = 1.0
    ) -> tuple[Params, list[dict[str, jax.Array]]]:
        """Return the gradient of `sum(weight * token_loss)` over all microbatches, and the metric sums of each."""
        gradient = self._zeros(self.trained.tree)
        packing, packed = self._packed(experience)
        program = self.gradient_program(objective, settings)
        trained, sums = self.trained.tree, []
        for index, rows in enumerate(packing.rows()):
            part = jax.tree.map(lambda x, i=index: packing.trim(x[i], i), packed)
            gradient, metrics = program(
                trained, self._frozen, gradient, self._on_mesh(rows), self._on_mesh(part), np.float32(temperature)
            )
            sums.append(metrics)
        return self._sum(gradient), sums

    def _lower_update(
        self, experience: Experience, objective: Objective, settings: Hashable, temperature: float
    ) -> Updated:
        """Lower the programs of an update, and return metrics of 0."""
        packing, packed = self._packed(experience)
        part = self._on_mesh(jax.tree.map(lambda x: packing.trim(x[0], 0), packed))
        rows, scale = self._on_mesh(next(packing.rows())), np.float32(temperature)
        trained, lowered = self.trained.tree, self.lowered
        lowered["zero gradient"] = self._zeros.lower(trained)
        stacked = described(lowered["zero gradient"].out_info, self._stacked)
        program = self.gradient_program(objective, settings)
        lowered["gradient"] = program.lower(trained, self._frozen, stacked, rows, part, scale)
        gradient = stacked
        if self.replicas.axes:
            lowered["sum of gradients"] = self._sum.lower(stacked)
            gradient = described(lowered["sum of gradients"].out_info, layout_in(trained))
        init = jax.jit(self._optimizer.init, out_shardings=self._state_layout)
        lowered["optimizer state"] = init.lower(trained)
        state = described(lowered["optimizer state"].out_info, self._state_layout)
        lowered["optimizer update"] = self._apply.lower(trained, state, gradient)
        _, sums = lowered["gradient"].out_info
        metrics = dict.fromkeys(sums.keys() - {"loss", "tokens"}, 0.0)
        return Updated({**metrics, f"{self.role}/tokens": 0.0}, metrics)

    def update(
        self,
        minibatches: Sequence[Experience],
        objective: Objective,
        settings: Hashable,
        *,
        temperature: float = 1.0,
    ) -> Updated:
        """Make one optimizer update per minibatch, and return the metrics.

        Raises:
          Diverged: A gradient is not finite.
        """
        if not self.has_devices:
            return self._lower_update(minibatches[0], objective, settings, temperature)
        sums, norms = [], []
        with self.optimizer.on_devices(), self.parameters.on_devices():
            for experience in minibatches:
                gradient, metrics = self.gradient(experience, objective, settings, temperature=temperature)
                norms.append(self._apply_to_trained(gradient))
                del gradient  # frees the memory for the next minibatch's gradient
                sums.append(metrics)
                self.setup.progress(f"{self.role} update", len(norms), len(minibatches))
            return self._report(norms, sums)

    def _apply_to_trained(self, gradient: Params) -> jax.Array:
        """Make one optimizer update, and return the gradient's norm."""
        trained, state, norm = self._apply(self.trained.tree, self.optimizer.tree, gradient)
        self.trained.tree, self.optimizer.tree = trained, state
        return norm

    def _report(self, norms: Any, sums: Any) -> Updated:
        """Wait for dispatched updates, and return their metrics.

        Args:
          norms: Gradient norm of each update.
          sums: Metric sums of the microbatches of each update.

        Raises:
          Diverged: A gradient is not finite.
        """
        # In one call: the first microbatches' metrics are copied while the last microbatches still run.
        rate, norms, sums = jax.device_get((self._schedule(self.updates), norms, sums))
        norms = [float(norm) for norm in norms]
        if not np.all(np.isfinite(norms)):
            raise Diverged(
                f"{self.role}: gradient norms of the last {len(norms)} updates are {norms}, and the weights in "
                "memory are invalid; resume from the last checkpoint with a lower learning rate, or inspect "
                "samples.jsonl"
            )
        self.updates += len(norms)
        totals = [_totals(parts) for parts in sums]
        means = _means(totals)
        tokens = sum(total["tokens"] for total in totals)
        own = {
            f"{self.role}/loss": means.pop("loss") * max(tokens, 1) / len(norms),
            f"{self.role}/grad_norm": float(np.mean(norms)),
            f"{self.role}/learning_rate": float(rate),
            f"{self.role}/tokens": tokens,
        }
        return Updated({**means, **own}, _means(totals[:1]))


def _identity(objective: Objective) -> Hashable:
    """Return a cache key that is equal for equal objectives.

    A function of a configuration file reaches a host as a new object with each call, so its module and name are the
    key. A function with a closure, or a lambda, is not determined by its name, and is its own key.
    """
    if not isinstance(objective, FunctionType) or objective.__closure__ or "<" in objective.__qualname__:
        return objective
    return objective.__module__, objective.__qualname__


def _totals(sums: Sequence[dict[str, Any]]) -> Metrics:
    """Return the metric sums of one minibatch from the sums of its microbatches."""
    return {name: float(sum(part[name] for part in sums)) for name in sums[0]}


def _means(totals: Sequence[Metrics]) -> Metrics:
    """Return the means per token over minibatches."""
    tokens = max(sum(total["tokens"] for total in totals), 1)
    return {name: sum(total[name] for total in totals) / tokens for name in totals[0] if name != "tokens"}


def mtp_coefficient(config: AnyModel, training: Training, *, role: str) -> float:
    """Return the coefficient of the loss of the layer that predicts the second next token; 0 if it is not trained.

    Raises:
      Refusal: A coefficient is configured, and the layer is absent, or frozen beside adapters.
    """
    trains = not isinstance(config, CausalLM) and config.mtp and training.lora is None
    if not trains and training.mtp_loss is not None:
        raise Refusal(
            f"{role}.mtp_loss={training.mtp_loss} trains the layer that predicts the second next token, but this "
            "model has none, or lora keeps it; set mtp_loss=None, or Pretrained(mtp=True) and lora=None"
        )
    return (0.1 if training.mtp_loss is None else training.mtp_loss) if trains else 0.0
