"""Problems of a split in columns: a hundred bytes per problem in addition to its text; objects take thousands."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow

from jaxrlhf.batch import Image, Pair, Problem
from jaxrlhf.data.labelled.steps import LabelledSteps
from jaxrlhf.data.records import Stored, restored
from jaxrlhf.data.table import column_values
from jaxrlhf.data.table.columns import BYTES, TOKENS, TokenColumn, Writer, mapped

_COLUMNS = {"prompt_tokens": TOKENS, "solutions": TOKENS, "rejected": TOKENS, "fields": BYTES}
_FIELDS = ("prompt_id", "prompt", "answer", "record", "solution_mask", "messages", "further", "pair", "steps")
"""Fields of a problem without its tokens, pickled together in the column `fields`; the last four are JSON texts."""
_FACTS, _ROWS = "table.json", "rows.arrow"


class ProblemTable(Sequence[Problem]):
    """Sequence of problems; a `Problem` object is built at each access and not cached.

    Args:
      folder: New folder in which the columns are stored; None keeps them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._writer = Writer(pyarrow.schema(_COLUMNS), folder and folder / _ROWS)
        self._read: Any = None
        self._images: dict[int, tuple[Image, ...]] = {}
        self._sources: list[tuple[int, str]] = []
        self._fingerprint: str | None = None

    @classmethod
    def mapped(cls, folder: Path) -> "ProblemTable":
        """Map the table that `keep` wrote to a folder."""
        table, facts = cls(), json.loads((folder / _FACTS).read_text())
        table._read = mapped(folder / _ROWS)
        table._sources = [(start, name) for start, name in facts["sources"]]
        table._fingerprint = facts["fingerprint"]
        return table

    def keep(self) -> None:
        """Complete the files of the folder, so that they can be mapped."""
        assert self._folder is not None and not self._images, "pixels are not stored"
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
        pair: tuple[Iterable[int], float, tuple[bool, bool] | None] | None = None,
        steps: tuple[Iterable[int], Iterable[bool]] | None = None,
    ) -> None:
        """Add a problem; the arguments are the fields of `Problem`, with the record in its stored form.

        Args:
          pair: Rejected tokens, margin and safety labels; all problems of a table are pairs, or none.
          steps: Ends and labels of the solution's steps; all problems of a table have labels, or none.
        """
        if images:
            self._images[len(self)] = images
        lists = messages, further, pair and pair[1:], steps and [[*part] for part in steps]
        texts = (json.dumps(value) if value else "" for value in lists)
        fields = prompt_id, prompt, answer, record, bytes(solution_mask), *texts
        self._writer.append(
            prompt_tokens=[*prompt_tokens],
            solutions=[*solution_tokens],
            rejected=None if pair is None else [*pair[0]],
            fields=column_values.dumps(fields),
        )

    @property
    def _table(self) -> Any:
        """Table of the columns; the first read ends the writing."""
        if self._read is None:
            self._read = self._writer.finished()
        return self._read

    @property
    def prompt_tokens(self) -> TokenColumn:
        """Token ids of each prompt."""
        return TokenColumn(self._table["prompt_tokens"])

    def prompt(self, n: int) -> str:
        """Return the prompt of problem n, rendered by the chat template."""
        return str(self._fields(n)["prompt"])

    def question(self, n: int) -> str:
        """Return the texts of the prompt of problem n, without chat template and roles."""
        return "\n".join(message["content"] for message in json.loads(self._fields(n)["messages"] or "[]"))

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each problem's worked solution, or of its prompt if no problem has a solution."""
        solutions = TokenColumn(self._table["solutions"]).lengths
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
        for name in ("prompt_tokens", "solutions", "rejected"):
            TokenColumn(self._table[name]).feed(digest.update)
        texts: dict[str, list[str]] = {"pair": [], "steps": [], "further": []}
        for fields in map(self._fields, range(len(self))):
            digest.update(repr(fields["answer"]).encode())
            record = fields["record"]
            digest.update(record if isinstance(record, bytes) else repr(record).encode())
            for name, values in texts.items():
                values.append(fields[name])
        pairs = (repr(_pair(text)) for text in texts["pair"] if text)
        digest.update(f"[{', '.join(pairs)}]".encode())
        for values in (texts["steps"], texts["further"]):
            if any(values):
                digest.update("".join(values).encode())
                digest.update(np.cumsum([0, *map(len, values)], dtype=np.int64).data)
        if any(name for _, name in self._sources):
            digest.update(repr(self._sources).encode())
        if self._images:
            digest.update(
                repr([(n, [image.digest for image in images]) for n, images in self._images.items()]).encode()
            )
        return digest.hexdigest()

    def __len__(self) -> int:
        return self._writer.count if self._read is None else self._read.num_rows

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

    def _fields(self, n: int) -> dict[str, Any]:
        return dict(zip(_FIELDS, column_values.loads(self._table["fields"][n].as_py()), strict=True))

    def _problem(self, n: int) -> Problem:
        fields = self._fields(n)
        pair, steps = fields.pop("pair"), fields.pop("steps")
        fields |= {
            "solution_mask": tuple(map(bool, fields["solution_mask"])),
            "messages": json.loads(fields["messages"] or "[]") or (),
            "further_solutions": tuple(map(tuple, json.loads(fields.pop("further") or "[]"))),
            "prompt_tokens": self.prompt_tokens[n],
            "solution_tokens": TokenColumn(self._table["solutions"])[n],
            "record": restored(fields["record"]),
            "images": self._images.get(n, ()),
            "source": next((name for start, name in reversed(self._sources) if start <= n), ""),
        }
        if steps:
            ends, labels = map(tuple, json.loads(steps))
            return LabelledSteps(**fields, step_ends=ends, step_labels=labels)
        if not pair:
            return Problem(**fields)
        margin, safe = _pair(pair)
        return Pair(**fields, rejected_tokens=TokenColumn(self._table["rejected"])[n], margin=margin, safe=safe)


def _pair(text: str) -> tuple[float, tuple[bool, bool] | None]:
    margin, safe = json.loads(text)
    return margin, safe and (safe[0], safe[1])
