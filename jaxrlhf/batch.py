"""Arrays that travel between the roles, and the notation that names their shapes.

One capital per dimension ends an array's name: `B` responses of a batch (prompt-major,
B = P * G), `P` prompts, `G` responses per prompt, `T` token positions, `S` key positions,
`V` vocabulary, `D` residual width, `F` feed-forward width, `N`/`K`/`H` query heads,
key-value heads and head width, `L` layers, `R` packed rows, `W` tokens of a packed row.

Every `[B, T]` array speaks of the token at the same index: `logp_BT[b, t]` is the
log-probability of `token_BT[b, t]` given the tokens before it, `value_BT[b, t]` the value of
the prefix before it, `reward_BT[b, t]` is paid when it is emitted, and `mask_BT` is True
where the policy chose it (its own end-of-sequence included). Sequences are left-aligned;
what lies past `length_B` is padding and is known by the length alone, never by its id.

Arrays here are host arrays (numpy): they are small, rewards read them as text, and packing
is host work. Workers move them to their devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from flax import struct

Array = jax.Array | np.ndarray
Params = dict[str, Any]


class Diverged(FloatingPointError):
    """Error: a model's numbers are not finite, and no further step mends that."""


@dataclass(frozen=True)
class Problem:
    """One record of a data set, tokenised once.

    Attributes:
      prompt_id: Position in its split: the group key, and part of the sampling seed.
      prompt: The text that was tokenised, chat template applied.
      prompt_tokens: Its token ids.
      answer: Reference answer for the rewards; None if the data has none.
      solution_tokens: Worked solution with EOS, for supervised training; empty if none.
      record: The source record, handed to reward functions.
    """

    prompt_id: int
    prompt: str
    prompt_tokens: tuple[int, ...]
    answer: str | None = None
    solution_tokens: tuple[int, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair(Problem):
    """A problem with two answers, of which the one in `solution_tokens` is preferred.

    Attributes:
      rejected_tokens: The other answer with EOS.
      margin: By how much the preferred answer's score should be higher at least.
      safe: Whether the preferred answer, and the other, are harmless; None if the data does not say.
    """

    rejected_tokens: tuple[int, ...] = ()
    margin: float = 0.0
    safe: tuple[bool, bool] | None = None


@struct.dataclass
class Sequences:
    """B sequences of prompt and response tokens.

    Attributes:
      token_BT: int32 ids; 0 past the length.
      length_B: int32 tokens of prompt and response together.
      mask_BT: bool, tokens to train on.
      prompt_id_B: int64 group key.
      choice_BTLk: int16, the k experts that a token went through in each layer while it was sampled, negative where
        that is not known; None if it was not recorded.
    """

    token_BT: Array
    length_B: Array
    mask_BT: Array
    prompt_id_B: Array
    choice_BTLk: Array | None = None


@struct.dataclass
class RolloutBatch:
    """Responses that the actor generated.

    Attributes:
      sequences: Prompts and responses; the mask covers the response, its EOS included.
      sampler_logp_BT: float32 as reported while sampling, 0 outside the mask.
      truncated_B: bool, ended by the length limit.
      version_B: int32 policy version that sampled the response.
    """

    sequences: Sequences
    sampler_logp_BT: Array
    truncated_B: Array
    version_B: Array


@struct.dataclass
class Scores:
    """Scores of a rollout.

    Attributes:
      score_B: float32 weighted sum of the parts; 0 where unscorable.
      scorable_B: bool; False where a reward function failed, timed out or returned no
        finite number. Such rows take no part in statistics and have no advantage.
      parts: Each part's unweighted float32 score by name, NaN where it failed.
    """

    score_B: Array
    scorable_B: Array
    parts: dict[str, Array]


@struct.dataclass
class Experience:
    """Input of an update: one sum, `sum(weight * token_loss)`, with weights fixed here.

    Weights carry masks, filters, importance weights and denominators counted over the whole
    update, so the trainer never divides.

    Attributes:
      sequences: Tokens; the mask marks trained tokens.
      weight_BT: float32 weight of each token's main loss, 0 where untrained.
      fields: Further `[B, T]` float32 arrays that the loss reads by name
        (`advantage`, `old_logp`, `ref_logp`, `kl_weight`, `entropy_weight`, `returns`, `old_value`).
    """

    sequences: Sequences
    weight_BT: Array
    fields: dict[str, Array]


@dataclass(frozen=True, eq=False)
class MinibatchRows(Sequence[Experience]):
    """Minibatches as rows of one batch. Each is made when it is asked for, so the batch exists and travels once.

    Attributes:
      sequences: Tokens of the whole batch.
      fields: `[B, T]` arrays of the whole batch that the loss reads by name.
      rows: Rows of each minibatch.
      weights: `[b, T]` weights of each minibatch's tokens, without importance weights.
      importance_BT: Factors of the main loss's weights; None is 1.
      coefficients: Further fields that are the weights times a number.
    """

    sequences: Sequences
    fields: Mapping[str, Array]
    rows: tuple[np.ndarray, ...]
    weights: tuple[Array, ...]
    importance_BT: Array | None = None
    coefficients: Mapping[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        rows, weight_BT = self.rows[index], np.asarray(self.weights[index])
        scaled: dict[str, Array] = {name: number * weight_BT for name, number in self.coefficients.items()}
        if self.importance_BT is not None:
            weight_BT = weight_BT * np.asarray(self.importance_BT)[rows]
        chosen = {name: np.asarray(value, np.float32)[rows] for name, value in self.fields.items()}
        part = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], self.sequences)
        return Experience(part, weight_BT, {**chosen, **scaled})

    def part(self, index: int, parts: int) -> "MinibatchRows":
        """An equal share of every minibatch, and of the batch the rows that it needs."""
        cuts = [slice(index * len(rows) // parts, (index + 1) * len(rows) // parts) for rows in self.rows]
        wanted = [rows[cut] for rows, cut in zip(self.rows, cuts, strict=True)]
        needed, place = np.unique(np.concatenate(wanted), return_inverse=True)
        ends = np.cumsum([len(rows) for rows in wanted])[:-1]

        def kept(leaf: Any) -> Any:
            return np.asarray(leaf)[needed]

        return replace(
            self,
            sequences=jax.tree.map(kept, self.sequences),
            fields=jax.tree.map(kept, dict(self.fields)),
            rows=tuple(np.split(place, ends)),
            weights=tuple(np.asarray(weight)[cut] for weight, cut in zip(self.weights, cuts, strict=True)),
            importance_BT=None if self.importance_BT is None else kept(self.importance_BT),
        )
