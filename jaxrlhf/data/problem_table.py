"""The problems of a split in columns: a hundred bytes each beside their text, where objects take thousands."""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from jaxrlhf.batch import Image, Pair, Problem
from jaxrlhf.data.records import Stored, restored


class TokenLists:
    """Lists of token ids, one after another in a single int32 array."""

    def __init__(self) -> None:
        self._ids, self._ends = array("i"), array("q", [0])

    def append(self, ids: Iterable[int]) -> None:
        """Add a list at the end."""
        self._ids.extend(ids)
        self._ends.append(len(self._ids))

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self._ids[self._ends[index] : self._ends[index + 1]])

    def feed(self, take: Callable[[memoryview], object]) -> None:
        """Hand over the bytes of all lists."""
        take(memoryview(self._ids))
        take(memoryview(self._ends))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each list."""
        return np.diff(np.frombuffer(self._ends, np.int64))


class PairColumns(NamedTuple):
    """A pair's part beyond a problem: the rejected answer is in a `TokenLists` of its own."""

    margin: float
    safe: tuple[bool, bool] | None


class ProblemTable(Sequence[Problem]):
    """Problems that are made when they are asked for, and not kept.

    Attributes:
      prompt_tokens: Token ids of the prompts.
    """

    def __init__(self) -> None:
        self.prompt_tokens = TokenLists()
        self._solutions, self._masks, self._rejected = TokenLists(), TokenLists(), TokenLists()
        self._ids = array("q")
        self._prompts: list[str] = []
        self._answers: list[str | None] = []
        self._messages: list[str] = []
        self._records: list[Stored] = []
        self._pairs: list[PairColumns] = []
        self._images: dict[int, tuple[Image, ...]] = {}

    def append(
        self,
        prompt_id: int,
        prompt: str,
        prompt_tokens: Iterable[int],
        answer: str | None,
        solution_tokens: Iterable[int],
        record: Stored,
        images: tuple[Image, ...] = (),
        solution_mask: Iterable[bool] = (),
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Add a problem; the arguments are the fields of `Problem`, the record as it is kept."""
        self._ids.append(prompt_id)
        self._prompts.append(prompt)
        self.prompt_tokens.append(prompt_tokens)
        self._answers.append(answer)
        self._solutions.append(solution_tokens)
        self._masks.append(map(int, solution_mask))
        self._messages.append(json.dumps(messages) if messages else "")
        self._records.append(record)
        if images:
            self._images[len(self._ids) - 1] = images

    def make_pair(self, rejected_tokens: Iterable[int], columns: PairColumns) -> None:
        """Make a pair of the problem that was added last; of a table all problems are pairs, or none."""
        self._rejected.append(rejected_tokens)
        self._pairs.append(columns)

    @property
    def fingerprint(self) -> str:
        """A text that is another one for other problems: of their tokens, answers, records and pairs."""
        digest = hashlib.blake2b(digest_size=16)
        for tokens in (self.prompt_tokens, self._solutions, self._rejected):
            tokens.feed(digest.update)
        for answer, record in zip(self._answers, self._records, strict=True):
            digest.update(repr(answer).encode())
            digest.update(record if isinstance(record, bytes) else repr(record).encode())
        digest.update(repr([tuple(pair) for pair in self._pairs]).encode())
        if self._images:
            digest.update(
                repr([(n, [image.digest for image in images]) for n, images in self._images.items()]).encode()
            )
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Problem: ...

    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...

    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self._problem(n) for n in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        return self._problem(index % len(self))

    def _problem(self, n: int) -> Problem:
        fields: dict[str, Any] = {
            "prompt_id": self._ids[n],
            "prompt": self._prompts[n],
            "prompt_tokens": self.prompt_tokens[n],
            "answer": self._answers[n],
            "solution_tokens": self._solutions[n],
            "solution_mask": tuple(map(bool, self._masks[n])),
            "record": restored(self._records[n]),
            "images": self._images.get(n, ()),
            "messages": json.loads(self._messages[n]) if self._messages[n] else (),
        }
        if not self._pairs:
            return Problem(**fields)
        return Pair(**fields, rejected_tokens=self._rejected[n], **self._pairs[n]._asdict())
