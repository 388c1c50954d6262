"""Problems of a split in columns: a hundred bytes per problem in addition to its text; objects take thousands."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from jaxrlhf.batch import Image, Pair, Problem
from jaxrlhf.data.labelled.steps import LabelledSteps
from jaxrlhf.data.records import Stored, restored
from jaxrlhf.data.table import column_values
from jaxrlhf.data.table.columns import Bytes, TokenLists

_COLUMNS = (
    "prompt_tokens",
    "solutions",
    "masks",
    "rejected",
    "ids",
    "prompts",
    "answers",
    "messages",
    "records",
    "pairs",
    "steps",
    "further",
)
_FACTS = "table.json"
_JSON, _PICKLED = b"J", b"P"


class ProblemTable(Sequence[Problem]):
    """Sequence of problems; a `Problem` object is built at each access and not kept.

    Args:
      folder: New folder in which the columns are kept; None keeps them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._take({name: Bytes(folder and folder / name) for name in _COLUMNS})
        self._images: dict[int, tuple[Image, ...]] = {}
        self._sources: list[tuple[int, str]] = []
        self._fingerprint: str | None = None

    def _take(self, columns: Mapping[str, Bytes]) -> None:
        self._columns = columns
        self.prompt_tokens, self._solutions = TokenLists(columns["prompt_tokens"]), TokenLists(columns["solutions"])
        self._rejected = TokenLists(columns["rejected"])

    @classmethod
    def mapped(cls, folder: Path) -> "ProblemTable":
        """Map the table that `keep` wrote to a folder."""
        table, facts = cls(), json.loads((folder / _FACTS).read_text())
        table._take({name: Bytes.mapped(folder / name) for name in _COLUMNS})
        table._sources = [(start, name) for start, name in facts["sources"]]
        table._fingerprint = facts["fingerprint"]
        return table

    def keep(self) -> None:
        """End the writing of problems to the folder, so that it can be mapped."""
        assert self._folder is not None and not self._images, "pixels are not kept"
        for column in self._columns.values():
            column.seal()
        facts = {"sources": self._sources, "fingerprint": self.fingerprint}
        (self._folder / _FACTS).write_text(json.dumps(facts))

    def begin(self, source: str) -> None:
        """Start a source; the following problems belong to it."""
        self._sources.append((len(self), source))

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
        further: Sequence[Sequence[int]] = (),
    ) -> None:
        """Add a problem; the arguments are the fields of `Problem`, with the record in its stored form."""
        columns = self._columns
        columns["ids"].append(prompt_id.to_bytes(8, "little"))
        columns["prompts"].append(prompt.encode())
        self.prompt_tokens.append(prompt_tokens)
        columns["answers"].append(b"" if answer is None else b"=" + answer.encode())
        self._solutions.append(solution_tokens)
        columns["masks"].append(bytes(solution_mask))
        columns["messages"].append(json.dumps(messages).encode() if messages else b"")
        columns["further"].append(json.dumps(further).encode() if further else b"")
        columns["records"].append(
            _JSON + record if isinstance(record, bytes) else _PICKLED + column_values.dumps(record)
        )
        if images:
            self._images[len(self) - 1] = images

    def make_pair(self, rejected_tokens: Iterable[int], margin: float, safe: tuple[bool, bool] | None) -> None:
        """Make the problem that was added last a pair; either all problems of a table are pairs, or none."""
        self._rejected.append(rejected_tokens)
        self._columns["pairs"].append(json.dumps([margin, safe]).encode())

    def make_steps(self, ends: Iterable[int], labels: Iterable[bool]) -> None:
        """Label the solution steps of the problem that was added last; all problems of a table have labels, or none."""
        self._columns["steps"].append(json.dumps([[*ends], [*labels]]).encode())

    def prompt(self, n: int) -> str:
        """Return the prompt of problem n, rendered by the chat template."""
        return self._columns["prompts"][n].decode()

    def question(self, n: int) -> str:
        """Return the texts of the prompt of problem n, without chat template and roles."""
        return "\n".join(message["content"] for message in json.loads(self._columns["messages"][n] or "[]"))

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each problem's worked solution, or of its prompt if no problem has a solution."""
        solutions = self._solutions.lengths
        return solutions if solutions.any() else self.prompt_tokens.lengths

    @property
    def sources(self) -> list[tuple[str, np.ndarray]]:
        """Name of each source, in order, with the indices of the source's problems."""
        starts = [start for start, _ in self._sources] or [0]
        names = [name for _, name in self._sources] or [""]
        ends = [*starts[1:], len(self)]
        return [(name, np.arange(*bounds)) for name, *bounds in zip(names, starts, ends, strict=True)]

    @property
    def fingerprint(self) -> str:
        """Text that identifies the problems: a digest of their tokens, answers, records, pairs and labels."""
        if self._fingerprint is not None:
            return self._fingerprint
        digest = hashlib.blake2b(digest_size=16)
        for tokens in (self.prompt_tokens, self._solutions, self._rejected):
            tokens.feed(digest.update)
        for n in range(len(self)):
            digest.update(repr(self._answer(n)).encode())
            record = self._record(n)
            digest.update(record if isinstance(record, bytes) else repr(record).encode())
        digest.update(b"[")
        for n in range(len(self._columns["pairs"])):
            digest.update((", " * (n > 0) + repr(self._pair(n))).encode())
        digest.update(b"]")
        if len(self._columns["steps"]):
            self._columns["steps"].feed(digest.update, unit=1)
        if any(self._columns["further"][n] for n in range(len(self))):
            self._columns["further"].feed(digest.update, unit=1)
        if any(name for _, name in self._sources):
            digest.update(repr(self._sources).encode())
        if self._images:
            digest.update(
                repr([(n, [image.digest for image in images]) for n, images in self._images.items()]).encode()
            )
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._columns["ids"])

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

    def _answer(self, n: int) -> str | None:
        kept = self._columns["answers"][n]
        return kept[1:].decode() if kept else None

    def _record(self, n: int) -> Stored:
        kept = self._columns["records"][n]
        return kept[1:] if kept[:1] == _JSON else column_values.loads(kept[1:])

    def _pair(self, n: int) -> tuple[float, tuple[bool, bool] | None]:
        margin, safe = json.loads(self._columns["pairs"][n])
        return margin, safe and (safe[0], safe[1])

    def _problem(self, n: int) -> Problem:
        messages = self._columns["messages"][n]
        fields: dict[str, Any] = {
            "prompt_id": int.from_bytes(self._columns["ids"][n], "little"),
            "prompt": self.prompt(n),
            "prompt_tokens": self.prompt_tokens[n],
            "answer": self._answer(n),
            "solution_tokens": self._solutions[n],
            "solution_mask": tuple(map(bool, self._columns["masks"][n])),
            "further_solutions": tuple(map(tuple, json.loads(self._columns["further"][n] or "[]"))),
            "record": restored(self._record(n)),
            "images": self._images.get(n, ()),
            "messages": json.loads(messages) if messages else (),
            "source": next((name for start, name in reversed(self._sources) if start <= n), ""),
        }
        if len(self._columns["steps"]):
            ends, labels = json.loads(self._columns["steps"][n])
            return LabelledSteps(**fields, step_ends=tuple(ends), step_labels=tuple(labels))
        if not len(self._columns["pairs"]):
            return Problem(**fields)
        margin, safe = self._pair(n)
        return Pair(**fields, rejected_tokens=self._rejected[n], margin=margin, safe=safe)
