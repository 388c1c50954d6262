"""Objective of preference pairs: a loss of two whole answers, computed between a forward pass and its backward pass.

Both answers of a pair are in one microbatch on one device (`Experience.together`), so a microbatch knows the whole loss
of each of its pairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Num

from jaxrlhf.algos.masked import selected
from jaxrlhf.algos.objectives import Fields, Mask, ObjectiveTerms, TokenOutput, TokenValues
from jaxrlhf.batch import Array

AnswerSums = Mapping[str, Float[Array, "P 2"]]
"""Sums over the tokens of the chosen and of the rejected answer, by name.

`value` is the log-probability or the score, `tokens` the number of tokens; other names are fields of the experience.
"""


class PairRewards(NamedTuple):
    """Loss and rewards of preference pairs.

    Attributes:
      loss_P: Loss of a pair.
      chosen_P: Reward of the chosen answer: the policy's implicit reward, a score, or minus a cost.
      rejected_P: Reward of the rejected answer.
    """

    loss_P: Float[Array, "P"]
    chosen_P: Float[Array, "P"]
    rejected_P: Float[Array, "P"]

    @property
    def metrics(self) -> dict[str, Float[Array, "P"]]:
        """Loss, accuracy, margin and rewards of each pair; a pair of equal rewards counts as half right."""
        margin_P = self.chosen_P - self.rejected_P
        return {
            "preference/loss": self.loss_P,
            "preference/accuracy": (margin_P > 0) + 0.5 * (margin_P == 0),
            "preference/margin": margin_P,
            "preference/chosen_reward": self.chosen_P,
            "preference/rejected_reward": self.rejected_P,
        }


@dataclass(frozen=True)
class PairSettings:
    """Settings of `pair_objective`.

    Attributes:
      judge: Function from the algorithm's settings and the sums over answers to losses and rewards.
      algorithm: Settings of the algorithm.
      pairs: P, number of pairs of the update.
    """

    judge: Callable[[Any, AnswerSums], PairRewards]
    algorithm: Any
    pairs: int


def answer_sums(
    value: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    fields: Mapping[str, Num[Array, "*shape"]],
    *,
    pairs: int,
) -> AnswerSums:
    """Sum a value and fields over the masked tokens of each answer; the sums of answers that are elsewhere are 0.

    Args:
      fields: `answer`, number of the token's answer: 2 p + 1 for the chosen and 2 p + 2 for the rejected answer of pair
        p, 0 for no answer. The other fields are summed.
    """
    answer = selected(fields["answer"], mask).ravel()

    def summed(array: Array) -> Float[Array, "P 2"]:
        sums = jax.ops.segment_sum(selected(array, mask).ravel(), answer, num_segments=2 * pairs + 1)
        return sums[1:].reshape(pairs, 2)

    others = {name: summed(jnp.asarray(field)) for name, field in fields.items() if name != "answer"}
    return {"value": summed(jnp.asarray(value)), "tokens": summed(jnp.ones(jnp.shape(mask), jnp.float32)), **others}


def pair_objective(
    output: TokenOutput | TokenValues, mask: Mask, weight: TokenValues, fields: Fields, settings: PairSettings
) -> ObjectiveTerms:
    """Compute the loss of preference pairs, by log-probabilities or by scores.

        sum over the tokens of pair p of weight * loss_p

    Args:
      fields: `answer`; `metric_weight`, the factor that turns means over the mask into means over pairs; and what
        `settings.judge` reads.
    """
    values = output.logp if isinstance(output, TokenOutput) else output
    read = {name: field for name, field in fields.items() if name not in ("metric_weight", "router_weight", "segment")}
    rewards = settings.judge(settings.algorithm, answer_sums(values, mask, read, pairs=settings.pairs))
    pair = jnp.maximum(selected(fields["answer"], mask) - 1, 0) // 2
    scale = selected(fields["metric_weight"], mask)
    metrics = {name: scale * value_P[pair] for name, value_P in rewards.metrics.items()}
    return ObjectiveTerms(selected(weight, mask) * rewards.loss_P[pair], metrics)
