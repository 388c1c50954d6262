"""Arrays exchanged between roles, and the naming of their shapes.

One capital letter per dimension ends an array's name: `B` responses of a batch (prompt-major, B = P * G), `P` prompts,
`G` responses per prompt, `T` token positions, `S` key positions, `V` vocabulary, `D` residual width, `F` feed-forward
width, `N`/`K`/`H` query heads, key-value heads and head size, `L` layers, `R` packed rows, `W` tokens of a packed row.

Every `[B, T]` array describes the token at the same index: `logp_BT[b, t]` is the log-probability of `token_BT[b, t]`
given the tokens before it, `value_BT[b, t]` is the value of the prefix before it, `reward_BT[b, t]` is the reward for
emitting it, and `mask_BT` is True if the policy sampled it (its end-of-sequence token included). Sequences are
left-aligned; positions from `length_B` on are padding. Only the length identifies padding, never the token id.

Arrays in this module are host arrays (numpy): they are small, rewards read them as text, and packing runs on the host.
Workers move them to their devices.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from flax import struct

Array = jax.Array | np.ndarray
Params = dict[str, Any]


class Diverged(FloatingPointError):
    """Error: values of a model are not finite, and further steps cannot repair them."""


@dataclass(frozen=True)
class Image:
    """Image of a prompt, by reference; its pixels are read by the process that computes with them.

    Attributes:
      source: Key by which a reader finds the pixels, usually the file and the position in it.
      digest: Text that differs if the pixels differ.
      grid: Number of frames, rows and columns of patches.
      start: Index in the prompt of the first placeholder token of the image's features.
      tokens: Number of placeholder tokens, all consecutive.
    """

    source: Hashable
    digest: str
    grid: tuple[int, int, int]
    start: int
    tokens: int


class SeenPrompt(tuple[int, ...]):
    """Prompt with images, as a cache key: two prompts are equal only if text and pixels are equal.

    The tuple holds token ids; placeholders of image features are replaced by negative numbers derived from the pixels.

    Attributes:
      tokens: Token ids, placeholders included.
      images: Images in order.
    """

    tokens: tuple[int, ...]
    images: tuple[Image, ...]

    @classmethod
    def of(cls, tokens: tuple[int, ...], images: tuple[Image, ...]) -> "tuple[int, ...]":
        """Return the prompt; without images, the tokens themselves."""
        if not images:
            return tokens
        numbers = list(tokens)
        for image in images:
            digest = hashlib.shake_128(image.digest.encode()).digest(8 * image.tokens)
            below_zero = -1 - (np.frombuffer(digest, "<u8") >> np.uint64(1)).astype(np.int64)
            numbers[image.start : image.start + image.tokens] = below_zero.tolist()
        prompt = cls(numbers)
        prompt.tokens, prompt.images = tokens, images
        return prompt


def tokens_of(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return the token ids of a prompt."""
    return prompt.tokens if isinstance(prompt, SeenPrompt) else prompt


def images_of(prompt: tuple[int, ...]) -> tuple[Image, ...]:
    """Return the images of a prompt."""
    return prompt.images if isinstance(prompt, SeenPrompt) else ()


@dataclass(frozen=True)
class Problem:
    """Record of a data set, tokenized.

    Attributes:
      prompt_id: Position in its split; the group key, and part of the sampling seed.
      prompt: Text that was tokenized, chat template applied; images are represented by their names.
      prompt_tokens: Token ids of the prompt.
      answer: Reference answer for the rewards; None if the data has none.
      solution_tokens: Worked solution with the end of its turn, for supervised training; empty if there is none.
      solution_mask: Mask of the solution's tokens to imitate, if the solution has turns of others; empty is all tokens.
      further_solutions: Further worked solutions, each with EOS.
      record: Source record, passed to reward functions.
      images: Images of the prompt in order.
      messages: Chat messages of the prompt, from which an environment continues.
      source: Name of the mixture's source or of the evaluation set; "" if there is none.
    """

    prompt_id: int
    prompt: str
    prompt_tokens: tuple[int, ...]
    answer: str | None = None
    solution_tokens: tuple[int, ...] = ()
    solution_mask: tuple[bool, ...] = ()
    further_solutions: tuple[tuple[int, ...], ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    source: str = ""

    @property
    def question(self) -> str | None:
        """Prompt as users read it, without its chat template; None if there are no messages."""
        texts = [str(message.get("content") or "") for message in self.messages]
        if len(texts) == 1:
            return texts[0]
        turns = [f"{message['role']}: {text}" for message, text in zip(self.messages, texts, strict=True)]
        return "\n\n".join(turns) or None


def images_of_problems(problems: Sequence[Problem]) -> np.ndarray | None:
    """Return the images of each problem in the form of `Sequences.images_B`; None if there are none."""
    if not any(problem.images for problem in problems):
        return None
    images_B = np.empty(len(problems), object)
    for b, problem in enumerate(problems):
        images_B[b] = problem.images
    return images_B


@dataclass(frozen=True)
class Pair(Problem):
    """Problem with two answers; the answer in `solution_tokens` is preferred.

    Attributes:
      rejected_tokens: Rejected answer with the end of its turn.
      margin: Margin by which the preferred answer's score should be higher.
      safe: Pair of bools, True if the preferred and the rejected answer are harmless; None if the data does not say.
    """

    rejected_tokens: tuple[int, ...] = ()
    margin: float = 0.0
    safe: tuple[bool, bool] | None = None


ROUTING, KEPT = "routing", "kept"


@struct.dataclass
class Sequences:
    """B sequences of prompt and response tokens.

    Attributes:
      token_BT: int32 ids; 0 from the length on.
      length_B: int32, number of tokens of prompt and response together. `[B, k]` if a row has up to k sequences side by
        side (those of an episode), each in T / k columns.
      mask_BT: bool, tokens to train on.
      prompt_id_B: int64 group key.
      images_B: object array with a tuple of `Image`s per sequence, of the shape of `length_B`; None without images.
      recorded: Columns that the sampler recorded, by name, integers `[B, T, ...]`; -1 where nothing was recorded.
        `routing`: int16 `[B, T, L, k]`, the k experts of each token in each layer. `kept`: int32 `[B, T, K]`, ids of
        the candidates that a token was sampled from, padded with -1; all -1 is the whole vocabulary.
    """

    token_BT: Array
    length_B: Array
    mask_BT: Array
    prompt_id_B: Array
    images_B: np.ndarray | None = None
    recorded: Mapping[str, Array] = field(default_factory=dict)


@struct.dataclass
class EpisodeRows:
    """Turns of episodes whose sequences are rows of a rollout; the rows of an episode are consecutive.

    Attributes:
      episode_B: int64 id of the episode, prompt-major.
      turn_BT: int16 turn in which the policy sampled a token, from 0; -1 elsewhere.
      reward_BT: float32, reward of the environment at the last token of a turn.
      anchor_BT: int64, equal for turns of a group that started from equal states; -1 if the environment names no state.
    """

    episode_B: Array
    turn_BT: Array
    reward_BT: Array
    anchor_BT: Array


@struct.dataclass
class RolloutBatch:
    """Responses generated by the actor.

    Attributes:
      sequences: Prompts and responses; the mask covers the response, its EOS included.
      sampler_logp_BT: float32 log-probabilities reported by the sampler, 0 outside the mask.
      truncated_B: bool, the response was ended by the length limit.
      version_BT: int32 policy version that sampled a token, -1 outside the mask.
      episodes: Turns of the episodes that the rows belong to; None if each row is one response to a prompt.
    """

    sequences: Sequences
    sampler_logp_BT: Array
    truncated_B: Array
    version_BT: Array
    episodes: EpisodeRows | None = None


@struct.dataclass
class EpisodeBatch:
    """Episodes of the actor.

    Attributes:
      rollout: Sequences of the episodes, one or more per episode; `rollout.episodes` is set.
      record_E: `EpisodeRecord` of each episode, prompt-major.
    """

    rollout: RolloutBatch
    record_E: np.ndarray


@struct.dataclass
class Scores:
    """Scores of a rollout, one per response or episode.

    Attributes:
      score_B: float32 weighted sum of the parts; 0 where unscorable.
      scorable_B: bool, False if a reward function failed, timed out or returned no finite number. Such rows are left
        out of statistics and have no advantage.
      parts: Each part's unweighted float32 score by name, NaN where it failed.
    """

    score_B: Array
    scorable_B: Array
    parts: dict[str, Array]


@struct.dataclass
class Experience:
    """Input of an update: one sum, `sum(weight * token_loss)`, with fixed weights.

    Weights include masks, filters, importance weights and denominators of the whole update: the trainer never divides.

    Attributes:
      sequences: Tokens; the mask marks trained tokens.
      weight_BT: float32 weight of each token's main loss, 0 where untrained.
      fields: Further `[B, T]` arrays that the loss reads by name, such as `advantage`, `old_logp` and `returns`.
      prompts: Number of distinct prompts that rows are sized for; None counts the prompts of the sequences.
      together: Number of consecutive sequences that one microbatch has to hold, 2 for preference pairs.
    """

    sequences: Sequences
    weight_BT: Array
    fields: dict[str, Array]
    prompts: int | None = struct.field(pytree_node=False, default=None)
    together: int = struct.field(pytree_node=False, default=1)


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """Columns of a batch without padding: the tokens of row b are entries `offset_B[b]` to `offset_B[b + 1]`.

    Attributes:
      offset_B: int64, start of each row and the end of the last.
      columns: `[tokens, ...]` arrays by name.
      width: T, number of columns of the padded arrays.
      padding: Padding value by name; 0 for other names.
    """

    offset_B: np.ndarray
    columns: Mapping[str, np.ndarray]
    width: int
    padding: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, length_B: Array, arrays: Mapping[str, Array], padding: Mapping[str, int]) -> "RaggedBatch":
        """Return the batch of some `[B, T, ...]` arrays, without their padding."""
        length_B, width = np.asarray(length_B), np.asarray(next(iter(arrays.values()))).shape[1]
        inside_BT = np.arange(width) < length_B[:, None]
        columns = {name: np.asarray(array)[inside_BT] for name, array in arrays.items()}
        return cls(np.concatenate([[0], np.cumsum(length_B, dtype=np.int64)]), columns, width, padding)

    @property
    def length_B(self) -> np.ndarray:
        """int32, number of tokens of each row."""
        return np.diff(self.offset_B).astype(np.int32)

    def take(self, rows: np.ndarray) -> "RaggedBatch":
        """Return the batch of these rows."""
        length_B = self.length_B[rows]
        offset_B = np.concatenate([[0], np.cumsum(length_B, dtype=np.int64)])
        index = np.arange(offset_B[-1]) + np.repeat(self.offset_B[:-1][rows] - offset_B[:-1], length_B)
        columns = {name: column[index] for name, column in self.columns.items()}
        return replace(self, offset_B=offset_B, columns=columns)

    def padded(self) -> dict[str, np.ndarray]:
        """Return the `[B, T, ...]` arrays."""
        inside_BT = np.arange(self.width) < self.length_B[:, None]
        made = {}
        for name, column in self.columns.items():
            made[name] = np.full((*inside_BT.shape, *column.shape[1:]), self.padding.get(name, 0), column.dtype)
            made[name][inside_BT] = column
        return made


@dataclass(frozen=True, eq=False)
class MinibatchRows(Sequence[Experience]):
    """Minibatches as rows of one batch. Each minibatch is built on access, so the batch is stored and sent once.

    Attributes:
      batch: Tokens, masks and loss inputs of the whole batch.
      prompt_id_B: int64 group key.
      images_B: Images of each sequence, as in `Sequences`.
      rows: Row indices of each minibatch.
      weights: Token weights of each minibatch, concatenated over rows without padding, before importance weights.
      coefficients: Names of further fields with a factor each; the field is the factor times the weights.
      prompts: Number of distinct prompts of the whole batch, also kept by its parts.
    """

    batch: RaggedBatch
    prompt_id_B: np.ndarray
    rows: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...]
    coefficients: Mapping[str, float] = field(default_factory=dict)
    images_B: np.ndarray | None = None
    prompts: int | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        fields: Mapping[str, Array],
        rows: Sequence[np.ndarray],
        weights: Sequence[Array],
        *,
        importance_BT: Array | None = None,
        coefficients: Mapping[str, float],
    ) -> "MinibatchRows":
        """Return the minibatches of a batch of sequences.

        Args:
          fields: `[B, T]` arrays that the loss reads by name; padding is dropped.
          weights: `[b, T]` weights of each minibatch.
          importance_BT: Factors of the main loss's weights; None is 1.
        """
        arrays: dict[str, Array] = {"token": sequences.token_BT, "mask": sequences.mask_BT}
        arrays |= {f"field {name}": np.asarray(value, np.float32) for name, value in fields.items()}
        arrays |= (recorded := {f"recorded {name}": column for name, column in sequences.recorded.items()})
        if importance_BT is not None:
            arrays["importance"] = importance_BT
        batch = RaggedBatch.of(sequences.length_B, arrays, dict.fromkeys(recorded, -1))
        inside_BT = np.arange(batch.width) < batch.length_B[:, None]
        given = tuple(np.asarray(weight)[inside_BT[own]] for own, weight in zip(rows, weights, strict=True))
        ids_B = np.asarray(sequences.prompt_id_B)
        return cls(batch, ids_B, tuple(rows), given, coefficients, sequences.images_B, len(np.unique(ids_B)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        rows, weight = self.rows[index], self.weights[index]
        chosen = self.batch.take(rows)
        scaled = {f"field {name}": number * weight for name, number in self.coefficients.items()}
        weight = weight * chosen.columns.get("importance", np.float32(1))
        made = replace(chosen, columns={**chosen.columns, **scaled, "weight": weight}).padded()
        images_B = None if self.images_B is None else self.images_B[rows]
        kinds = "field ", "recorded "
        fields, recorded = ({name[len(of) :]: made[name] for name in made if name.startswith(of)} for of in kinds)
        columns = made["token"], chosen.length_B, made["mask"], self.prompt_id_B[rows], images_B, recorded
        return Experience(Sequences(*columns), made["weight"], {**fields}, self.prompts)

    def part(self, index: int, parts: int) -> "MinibatchRows":
        """Return an equal share of every minibatch, with only the batch rows that it needs."""
        cuts = [slice(index * len(rows) // parts, (index + 1) * len(rows) // parts) for rows in self.rows]
        wanted = [rows[cut] for rows, cut in zip(self.rows, cuts, strict=True)]
        needed, place = np.unique(np.concatenate(wanted), return_inverse=True)
        ends = np.cumsum([len(rows) for rows in wanted])[:-1]
        weights = []
        for rows, cut, weight in zip(self.rows, cuts, self.weights, strict=True):
            offset_B = np.concatenate([[0], np.cumsum(self.batch.length_B[rows], dtype=np.int64)])
            weights.append(weight[offset_B[cut.start] : offset_B[cut.stop]])
        return replace(
            self,
            batch=self.batch.take(needed),
            prompt_id_B=self.prompt_id_B[needed],
            images_B=None if self.images_B is None else self.images_B[needed],
            rows=tuple(np.split(place, ends)),
            weights=tuple(weights),
        )
