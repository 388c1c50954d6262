"""Minibatches: a step's responses, shuffled and split, with a loss weight for every token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxrlhf.algos import rollout_correction, token_weights
from jaxrlhf.batch import Array, RolloutBatch, Sequences
from jaxrlhf.batching.ragged import Experience, MinibatchRows
from jaxrlhf.config import Aggregation, KLInLoss, PolicyGradient
from jaxrlhf.dataflows.step import Metrics, State, StepInput


@dataclass(frozen=True)
class Minibatches:
    """Minibatches of one rollout, with its metrics and the algorithm's next state.

    Attributes:
      policy: Minibatches for the actor, over all epochs.
      value: Minibatches for the critic; empty without a critic.
      further: Minibatches for another role that the algorithm trains, as many as for the actor or the critic.
    """

    policy: Sequence[Experience]
    value: Sequence[Experience]
    metrics: Metrics
    state: State
    further: Sequence[Experience] = ()


def mask_untrained(sequences: Sequences, trained_B: Array | None) -> Sequences:
    """Remove rows that are not trained on from the mask of sequences; None trains on all rows."""
    if trained_B is None:
        return sequences
    return replace(sequences, mask_BT=np.asarray(sequences.mask_BT) & np.asarray(trained_B)[:, None])


def shuffle_groups(prompt_id_B: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the rows in random order, with adjacent responses of one prompt.

    A minibatch of several groups then has their prompts alone, and a packed row computes a prompt once for its group.
    """
    rows = rng.permutation(len(prompt_id_B))
    _, group_B = np.unique(prompt_id_B, return_inverse=True)
    rank_G = rng.permutation(group_B.max(initial=-1) + 1)
    return rows[np.argsort(rank_G[group_B[rows]], kind="stable")]


def minibatches(
    work: StepInput[PolicyGradient],
    sequences: Sequences,
    fields: Mapping[str, Array],
    *,
    aggregation: Aggregation,
    importance_BT: Array | None = None,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
) -> MinibatchRows:
    """Split sequences into the shuffled minibatches of every epoch, with token weights normalized per minibatch.

    The shuffle depends on the step's seed alone, so all roles trained on one rollout see the same rows in the same
    order. Responses of one prompt are adjacent, so minibatches of whole groups share as many prompt tokens as
    the step does. A minibatch without a token to train on is left out if the epoch has another minibatch: with a
    gradient of 0 an optimizer would still move by its momentum. Sequences of one episode are in one minibatch.

    If there are fewer sequences than `responses_per_update`, they make one minibatch.

    Args:
      fields: `[B, T]` arrays that the loss reads, by name.
      importance_BT: Factors of the main loss's weights.
    """
    horizon = float(work.config.rollout.max_response_tokens)
    sequences = jax.tree.map(np.asarray, sequences)
    mask_BT, prompt_id_B = np.asarray(sequences.mask_BT), np.asarray(sequences.prompt_id_B)
    trained_B = np.asarray(np.any(mask_BT, axis=1)).reshape(-1)
    chosen: list[np.ndarray] = []
    for epoch in range(work.settings.epochs_per_step):
        order = shuffle_groups(prompt_id_B, np.random.default_rng([work.seed, epoch]))
        rows_of = order.reshape(-1, min(work.settings.responses_per_update, len(order)))
        chosen += [rows for rows in rows_of if trained_B[rows].any()] or [rows_of[0]]
    weights = [
        np.asarray(token_weights(mask_BT[rows], prompt_id_B[rows], aggregation=aggregation, horizon=horizon))
        for rows in chosen
    ]
    coefficients = {"kl_weight": kl_coefficient, "entropy_weight": entropy_coefficient}
    coefficients = {name: number for name, number in coefficients.items() if number}
    return MinibatchRows.of(sequences, fields, chosen, weights, importance_BT=importance_BT, coefficients=coefficients)


def policy_minibatches(
    work: StepInput[PolicyGradient],
    sequences: Sequences,
    rollout: RolloutBatch,
    advantage_BT: Array,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
    extra_fields: Mapping[str, Array] | None = None,
) -> tuple[MinibatchRows, Metrics]:
    """Build the actor's minibatches, with KL and importance weights as token weights, and importance-weight metrics.

    Args:
      extra_fields: `[B, T]` arrays by name, for the algorithm's own objective.
    """
    settings = work.settings
    fields = {"advantage": advantage_BT, **(extra_fields or {})}
    if settings.old_logp == "bypass":
        fields["old_logp"] = rollout.sampler_logp_BT
    else:
        fields |= {"sampler_logp": rollout.sampler_logp_BT} if old_logp_BT is None else {"old_logp": old_logp_BT}
    in_loss = isinstance(settings.kl, KLInLoss)
    if in_loss:
        assert ref_logp_BT is not None, "a KL requires the reference"
        fields["ref_logp"] = ref_logp_BT
    importance_BT, metrics = None, {}
    correction = settings.correction_for(work.config.rollout)
    if correction is not None or settings.rejection:
        assert old_logp_BT is not None, "importance weights require the trainer's log-probabilities"
        importance_BT, corrected = rollout_correction(
            old_logp_BT,
            rollout.sampler_logp_BT,
            sequences.mask_BT,
            importance=correction,
            rejection=settings.rejection,
        )
        metrics = {name: float(value) for name, value in corrected.items()}
    batches = minibatches(
        work,
        sequences,
        fields,
        aggregation=settings.policy.aggregation,
        importance_BT=importance_BT,
        kl_coefficient=work.state["kl_coefficient"] if in_loss else 0.0,
        entropy_coefficient=settings.policy.entropy_coefficient,
    )
    return batches, metrics
