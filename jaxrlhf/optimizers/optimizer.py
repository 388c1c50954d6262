"""Optimizers: AdamW, or an optax optimizer by name, after gradient clipping, with learning rates by parameter group."""

import inspect
import math
from functools import partial
from typing import Any

import jax
import optax

from jaxrlhf.batch import Params
from jaxrlhf.config import Optimizer, Refusal
from jaxrlhf.config.named_functions import imported
from jaxrlhf.optimizers.average import averaging
from jaxrlhf.optimizers.groups import ParameterGroups
from jaxrlhf.optimizers.rounded import rounded


def optimizer_of(
    settings: Optimizer, declared: Params, groups: ParameterGroups, *, total_updates: int
) -> optax.GradientTransformation:
    """Build AdamW, or the optimizer of the factory, after clipping by the global norm.

    Args:
      declared: Tree of `Param` of the trained parameters.
      groups: Relative learning rates of parameters. Entirely frozen parameters have no moments.

    Raises:
      Refusal: The factory does not exist, or does not take the arguments.
    """
    clip = optax.clip_by_global_norm(settings.max_grad_norm)
    if "mtp" in declared:  # apart: the layer's gradient must not shorten the policy's
        parts = {name: name if name == "mtp" else "policy" for name in declared}
        clip = optax.partition({"policy": clip, "mtp": clip}, parts)
    steps = [clip]
    made = _made(settings, declared, total_updates=total_updates)
    if not groups.freeze:
        steps.append(made)
    else:
        labels = jax.tree.map(lambda frozen: "frozen" if frozen else "trained", groups.frozen)
        steps.append(optax.partition({"trained": made, "frozen": optax.set_to_zero()}, labels))
    if not groups.alike:
        steps.append(optax.stateless(lambda changes, _: groups.scaled(changes)))
    if settings.average_decay is not None:
        steps.append(averaging(settings.average_decay))
    return optax.chain(*steps)


def without_mtp(gradient: Params) -> Params:
    """Return the gradient without that of the layer for the second next token."""
    return {name: part for name, part in gradient.items() if name != "mtp"}


def _made(settings: Optimizer, declared: Params, *, total_updates: int) -> optax.GradientTransformation:
    rate = learning_rate(settings, total_updates=total_updates)
    if settings.factory is None:
        moments = {"b1": settings.beta1, "b2": settings.beta2, "eps": settings.eps}
        adamw = optax.adamw(rate, **moments, weight_decay=settings.weight_decay)
        return adamw if settings.state_dtype == "float32" else rounded(adamw)
    factory, arguments = imported(settings.factory, "Optimizer.factory"), settings.keywords
    try:
        if _MATRICES in inspect.signature(factory).parameters:
            arguments.setdefault(_MATRICES, partial(_matrices, declared))
        return factory(learning_rate=rate, **arguments)
    except (TypeError, ValueError) as error:
        given = f"Optimizer.factory={settings.factory!r} with arguments={settings.arguments}"
        raise Refusal(f"{given} returns no optimizer: {error}") from error


_MATRICES = "muon_weight_dimension_numbers"
"""Name of the argument of factories that treat matrices separately; see `optax.contrib.muon`."""


def _matrices(declared: Params, tree: Any) -> Any:
    """Return the input (summed) and output dimensions of each parameter; None for non-matrices and vocabulary tables.

    Stacked layers and experts come first in a shape and belong to neither. Heads are separate dimensions.
    """
    params = dict(jax.tree.leaves_with_path(declared))

    def one(path: tuple[Any, ...], _: Any) -> optax.contrib.MuonDimensionNumbers | None:
        shape, dims = params[path].shape, params[path].dims
        first = sum(name in ("layers", "experts") for name in dims)
        for last in range(first + 1, len(shape)):
            if "vocab" not in dims and math.prod(shape[first:last]) == params[path].fan_in:
                return optax.contrib.MuonDimensionNumbers(range(first, last), range(last, len(shape)))
        return None

    return jax.tree.map_with_path(one, tree)


def learning_rate(optimizer: Optimizer, *, total_updates: int) -> optax.Schedule:
    """Return the schedule: linear warm-up from 0, then constant or decayed to 0 at `total_updates`."""
    peak, warmup = optimizer.learning_rate, optimizer.warmup_updates
    rest = max(total_updates - warmup, 1)
    tail = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[optimizer.decay]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), tail], [warmup]) if warmup else tail
