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
from dataclasses import dataclass, field
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
      images_B: object array with a tuple of `Image`s for each sequence, also if several are side by side in a row;
        None without images.
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

    @classmethod
    def of(
        cls,
        tokens: Sequence[Sequence[int]],
        masks: Sequence[Sequence[int]],
        prompt_ids: Sequence[int],
        *,
        width: int,
        images_B: np.ndarray | None = None,
    ) -> "Sequences":
        """Pad the tokens and masks of rows to left-aligned arrays of `width` columns."""
        length_B, prompt_id_B = np.array([len(row) for row in tokens], np.int32), np.array(prompt_ids, np.int64)
        padded = padded_rows(tokens, width=width, dtype=np.int32), length_B, padded_rows(masks, width=width, dtype=bool)
        return cls(*padded, prompt_id_B, images_B)


@struct.dataclass
class EpisodeRows:
    """Turns of episodes whose sequences are rows of a rollout; the rows of an episode are consecutive.

    Attributes:
      episode_B: int64 id of the episode, prompt-major.
      turn_BT: int16 turn in which the policy sampled a token, from 0; -1 elsewhere.
      reward_BT: float32, reward of the environment at the last token of a turn.
      anchor_BT: int64, equal for turns of a group that started from equal states; -1 if the environment names no state.
      record_B: `EpisodeRecord` of each row's episode.
    """

    episode_B: Array
    turn_BT: Array
    reward_BT: Array
    anchor_BT: Array
    record_B: np.ndarray

    @property
    def start_E(self) -> np.ndarray:
        """Index of each episode's first row."""
        return np.flatnonzero(np.diff(np.asarray(self.episode_B), prepend=-1))

    @property
    def rows_E(self) -> np.ndarray:
        """Number of rows of each episode."""
        return np.diff([*self.start_E, len(self.episode_B)])

    @property
    def records(self) -> list[Any]:
        """`EpisodeRecord` of each episode."""
        return list(self.record_B[self.start_E])


@struct.dataclass
class RolloutBatch:
    """Responses or episodes generated by the actor.

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

    def take(self, rows: np.ndarray | slice) -> "RolloutBatch":
        """Return some of the rows."""
        return jax.tree.map(lambda value: np.asarray(value)[rows], self)

    @classmethod
    def unsampled(cls, sequences: Sequences) -> "RolloutBatch":
        """Return a rollout of sequences without sampled tokens, such as prompts or worked solutions."""
        shape = np.shape(sequences.token_BT)
        return cls(sequences, np.zeros(shape, np.float32), np.zeros(shape[0], bool), np.full(shape, -1, np.int32))


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


def padded_rows(rows: Sequence[Any], *, width: int, dtype: Any, padding: int = 0) -> np.ndarray:
    """Pad the values of each row to one left-aligned array of `width` columns."""
    padded = np.full((len(rows), width), padding, dtype)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return padded
