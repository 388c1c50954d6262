"""Arrays that travel between the roles, and the notation that names their shapes.

One capital per dimension ends an array's name: `B` responses of a batch (prompt-major, B = P * G), `P` prompts, `G`
responses per prompt, `T` token positions, `S` key positions, `V` vocabulary, `D` residual width, `F` feed-forward
width, `N`/`K`/`H` query heads, key-value heads and head width, `L` layers, `R` packed rows, `W` tokens of a packed row.

Every `[B, T]` array speaks of the token at the same index: `logp_BT[b, t]` is the log-probability of `token_BT[b, t]`
given the tokens before it, `value_BT[b, t]` the value of the prefix before it, `reward_BT[b, t]` is paid when it is
emitted, and `mask_BT` is True where the policy chose it (its own end-of-sequence included). Sequences are left-aligned;
what lies past `length_B` is padding and is known by the length alone, never by its id.

Arrays here are host arrays (numpy): they are small, rewards read them as text, and packing is host work. Workers move
them to their devices.
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
    """Error: a model's numbers are not finite, and no further step mends that."""


@dataclass(frozen=True)
class Image:
    """One image of a prompt, by reference: its pixels are read where they are computed with.

    Attributes:
      source: Text that says file and place in it, or whatever else whoever reads pixels goes by.
      digest: A text that is another one for other pixels.
      grid: Frames, rows and columns of its patches.
      start: Index in the prompt of the first token that one of its features stands for.
      tokens: Number of those, side by side.
    """

    source: Hashable
    digest: str
    grid: tuple[int, int, int]
    start: int
    tokens: int


class SeenPrompt(tuple[int, ...]):
    """A prompt with images as caches know it: alike only where text and pixels are.

    Token ids, and below zero, in the places of features, numbers that go by their image's pixels.

    Attributes:
      tokens: Token ids, placeholders included.
      images: Images in their order.
    """

    tokens: tuple[int, ...]
    images: tuple[Image, ...]

    @classmethod
    def of(cls, tokens: tuple[int, ...], images: tuple[Image, ...]) -> "tuple[int, ...]":
        """The prompt; the tokens themselves where it has no images."""
        if not images:
            return tokens
        numbers = list(tokens)
        for image in images:
            drawn = hashlib.shake_128(image.digest.encode()).digest(8 * image.tokens)
            below_zero = -1 - (np.frombuffer(drawn, "<u8") >> np.uint64(1)).astype(np.int64)
            numbers[image.start : image.start + image.tokens] = below_zero.tolist()
        prompt = cls(numbers)
        prompt.tokens, prompt.images = tokens, images
        return prompt


def tokens_of(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Token ids of a prompt."""
    return prompt.tokens if isinstance(prompt, SeenPrompt) else prompt


def images_of(prompt: tuple[int, ...]) -> tuple[Image, ...]:
    """Images of a prompt."""
    return prompt.images if isinstance(prompt, SeenPrompt) else ()


@dataclass(frozen=True)
class Problem:
    """One record of a data set, tokenised once.

    Attributes:
      prompt_id: Position in its split: the group key, and part of the sampling seed.
      prompt: The text that was tokenised, chat template applied; of images it has their names.
      prompt_tokens: Its token ids.
      answer: Reference answer for the rewards; None if the data has none.
      solution_tokens: Worked solution with the end of its turn, for supervised training; empty if none.
      solution_mask: Tokens of the solution to imitate, where that has turns of others too; empty is all.
      further_solutions: Other worked solutions, each with EOS.
      record: The source record, handed to reward functions.
      images: Images of the prompt in its order.
      messages: Chat messages of the prompt, from which an environment goes on.
      source: Name of its source of a mixture, or of its evaluation set; else "".
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
        """The prompt as people read it, without its chat template; None if there are no messages."""
        texts = [str(message.get("content") or "") for message in self.messages]
        if len(texts) == 1:
            return texts[0]
        said = [f"{message['role']}: {text}" for message, text in zip(self.messages, texts, strict=True)]
        return "\n\n".join(said) or None


def images_of_problems(problems: Sequence[Problem]) -> np.ndarray | None:
    """Images of each problem, as `Sequences` has them; None if there are none."""
    if not any(problem.images for problem in problems):
        return None
    images_B = np.empty(len(problems), object)
    for b, problem in enumerate(problems):
        images_B[b] = problem.images
    return images_B


@dataclass(frozen=True)
class Pair(Problem):
    """A problem with two answers, of which the one in `solution_tokens` is preferred.

    Attributes:
      rejected_tokens: The other answer with the end of its turn.
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
      length_B: int32 tokens of prompt and response together; `[B, k]` where a row has up to k sequences side by side,
        those of an episode, each in T / k columns.
      mask_BT: bool, tokens to train on.
      prompt_id_B: int64 group key.
      choice_BTLk: int16, the k experts that a token went through in each layer while it was sampled, negative where
        that is not known; None if it was not recorded.
      images_B: Tuple of the `Image`s of each sequence, in an array of objects, `[B, k]` as lengths are; None if there
        are none.
      kept_BTK: int32, ids that a token was drawn among, -1 past them; all -1 is any, and None wherever it stands.
    """

    token_BT: Array
    length_B: Array
    mask_BT: Array
    prompt_id_B: Array
    choice_BTLk: Array | None = None
    images_B: np.ndarray | None = None
    kept_BTK: Array | None = None


@struct.dataclass
class EpisodeRows:
    """Turns of episodes whose sequences are the rows of a rollout, those of an episode one after another.

    Attributes:
      episode_B: int64 id of the episode, prompt-major.
      turn_BT: int16 turn in which the policy chose a token, from 0; -1 elsewhere.
      reward_BT: float32 paid by the environment at the last token of a turn.
      anchor_BT: int64, equal for turns of a group that were made in equal states; -1 where the environment names none.
    """

    episode_B: Array
    turn_BT: Array
    reward_BT: Array
    anchor_BT: Array


@struct.dataclass
class RolloutBatch:
    """Responses that the actor generated.

    Attributes:
      sequences: Prompts and responses; the mask covers the response, its EOS included.
      sampler_logp_BT: float32 as reported while sampling, 0 outside the mask.
      truncated_B: bool, ended by the length limit.
      version_BT: int32 policy version that drew a token, -1 outside the mask.
      episodes: Turns of the episodes that the rows are sequences of; None where each row is one response to a prompt.
    """

    sequences: Sequences
    sampler_logp_BT: Array
    truncated_B: Array
    version_BT: Array
    episodes: EpisodeRows | None = None


@struct.dataclass
class EpisodeBatch:
    """Episodes that the actor went through.

    Attributes:
      rollout: Their sequences, one or more an episode; `rollout.episodes` is there.
      record_E: `EpisodeRecord` of each episode, prompt-major.
    """

    rollout: RolloutBatch
    record_E: np.ndarray


@struct.dataclass
class Scores:
    """Scores of a rollout, one for each response or episode.

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
      prompts: Distinct prompts that it may be drawn from, by which rows are sized; None is its own.
    """

    sequences: Sequences
    weight_BT: Array
    fields: dict[str, Array]
    prompts: int | None = struct.field(pytree_node=False, default=None)


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """Columns of a batch without its padding: the tokens of row b are entries `offset_B[b]` to `offset_B[b + 1]`.

    Attributes:
      offset_B: int64, one more than there are rows.
      columns: `[tokens, ...]` arrays by name.
      width: T, columns of the padded arrays.
      padding: What lies past a row's length, by name; 0 where there is no name.
    """

    offset_B: np.ndarray
    columns: Mapping[str, np.ndarray]
    width: int
    padding: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, length_B: Array, arrays: Mapping[str, Array], padding: Mapping[str, int]) -> "RaggedBatch":
        """The batch of some `[B, T, ...]` arrays; what lies past the lengths is left out."""
        length_B, width = np.asarray(length_B), np.asarray(next(iter(arrays.values()))).shape[1]
        inside_BT = np.arange(width) < length_B[:, None]
        columns = {name: np.asarray(array)[inside_BT] for name, array in arrays.items()}
        return cls(np.concatenate([[0], np.cumsum(length_B, dtype=np.int64)]), columns, width, padding)

    @property
    def length_B(self) -> np.ndarray:
        """int32 tokens of each row."""
        return np.diff(self.offset_B).astype(np.int32)

    def take(self, rows: np.ndarray) -> "RaggedBatch":
        """The batch of these rows."""
        length_B = self.length_B[rows]
        offset_B = np.concatenate([[0], np.cumsum(length_B, dtype=np.int64)])
        index = np.arange(offset_B[-1]) + np.repeat(self.offset_B[:-1][rows] - offset_B[:-1], length_B)
        columns = {name: column[index] for name, column in self.columns.items()}
        return replace(self, offset_B=offset_B, columns=columns)

    def padded(self) -> dict[str, np.ndarray]:
        """The `[B, T, ...]` arrays."""
        inside_BT = np.arange(self.width) < self.length_B[:, None]
        made = {}
        for name, column in self.columns.items():
            made[name] = np.full((*inside_BT.shape, *column.shape[1:]), self.padding.get(name, 0), column.dtype)
            made[name][inside_BT] = column
        return made


@dataclass(frozen=True, eq=False)
class MinibatchRows(Sequence[Experience]):
    """Minibatches as rows of one batch. Each is made when it is asked for, so the batch exists and travels once.

    Attributes:
      batch: Tokens, masks and what the loss reads, of the whole batch.
      prompt_id_B: int64 group key.
      images_B: Images of each sequence, as `Sequences` has them.
      rows: Rows of each minibatch.
      weights: Weights of each minibatch's tokens, row after row without padding, and without importance weights.
      coefficients: Further fields that are the weights times a number.
      prompts: Distinct prompts of the whole batch, of which parts have it, too.
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
        """Minibatches of a batch of sequences.

        Args:
          fields: `[B, T]` arrays that the loss reads by name; what lies past the lengths is not kept.
          weights: `[b, T]` weights of each minibatch.
          importance_BT: Factors of the main loss's weights; None is 1.
        """
        arrays: dict[str, Array] = {"token": sequences.token_BT, "mask": sequences.mask_BT}
        arrays |= {f"field {name}": np.asarray(value, np.float32) for name, value in fields.items()}
        recorded = {"choice": sequences.choice_BTLk, "kept": sequences.kept_BTK}
        arrays |= {name: array for name, array in recorded.items() if array is not None}
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
        columns = made["token"], chosen.length_B, made["mask"], self.prompt_id_B[rows], made.get("choice"), images_B
        fields: dict[str, Array]
        fields = {name.removeprefix("field "): value for name, value in made.items() if name.startswith("field ")}
        return Experience(Sequences(*columns, made.get("kept")), made["weight"], fields, self.prompts)

    def part(self, index: int, parts: int) -> "MinibatchRows":
        """An equal share of every minibatch, and of the batch the rows that it needs."""
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
