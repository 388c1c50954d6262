"""Samples of the model's responses: kept in `samples.jsonl`, shown to people."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from jaxrlhf.tracking.records import RecordFile, read_records

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
      score: Weighted sum of the parts; None if the response is unscorable.
      parts: Each reward's own score; None where it failed.
      prompt_length: In tokens.
      response_length: In tokens, its end-of-sequence included.
      truncated: Whether the length limit ended it.
      logp_gap: Mean over its tokens of |trainer's logp - sampler's logp|; None if not measured.
      tokens: The tokens that the policy chose, one by one: their `text`, the trainer's `logp`, its difference to the
        sampler's (`gap`), and the `entropy` of their distribution, where those are known; None if not recorded.
      answer: The reference answer, if there is one.
      episode: Its `messages`, its `turns` (reward, seconds and calls of each), why it ended (`stop`) and what failed
        (`failure`); None of a single response.
    """

    step: int
    prompt: str
    response: str
    score: float | None
    prompt_length: int
    response_length: int
    truncated: bool
    parts: dict[str, float | None] = field(default_factory=dict)
    logp_gap: float | None = None
    answer: str | None = None
    episode: dict[str, Any] | None = None
    tokens: dict[str, list[Any]] | None = None


class SampleFile(RecordFile):
    """`samples.jsonl`."""

    def add(self, samples: Iterable[Sample]) -> None:
        self.append(asdict(sample) for sample in samples)


def read_samples(path: Path | str, *, n: int) -> list[Sample]:
    """`n` samples of the last step, spread over its responses, so that they differ in their prompts."""
    last: list[dict] = []
    for record in read_records(path):
        if last and record["step"] != last[0]["step"]:
            last.clear()
        last.append(record)
    chosen = last if len(last) <= n else [last[i * len(last) // n] for i in range(n)]
    known = {known.name for known in fields(Sample)}
    return [Sample(**{name: value for name, value in record.items() if name in known}) for record in chosen]


def show_samples(samples: Sequence[Sample], *, source: str | None = None, console: Console | None = None) -> None:
    """Print samples: in frames on a terminal or in a notebook, as plain lines elsewhere.

    Args:
      source: Policy that they are of; None is the run's own at their step.
    """
    console = console or Console()
    for sample in samples:
        # Text, not str: what a model writes may look like rich's markup.
        if console.is_terminal or console.is_jupyter:
            body = Group(Text(visible(sample.prompt), style="dim"), Rule(style="dim"), Text(visible(sample.response)))
            if sample.episode is not None:
                body = Group(*(_spoken(message) for message in sample.episode["messages"]))
            console.print(
                Panel(body, title=Text(_caption(sample, source)), title_align="left", border_style=_colour(sample))
            )
        else:
            plain = f"--- {_caption(sample, source)}\n{visible(sample.prompt)}\n>>>\n{visible(sample.response)}\n"
            if sample.episode is not None:
                spoken = "\n".join(_spoken(message).plain for message in sample.episode["messages"])
                plain = f"--- {_caption(sample, source)}\n{spoken}\n"
            console.print(Text(plain), soft_wrap=True)


def _spoken(message: Mapping[str, Any]) -> Text:
    """A message of a conversation, the policy's in full colour and the others dimmed."""
    said = [str(message.get("content") or "")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        match call:
            case {"function": {"name": name, "arguments": arguments}}:
                said.append(f"{name}({json.dumps(arguments, ensure_ascii=False)})")
            case _:  # an environment may have other forms
                said.append(json.dumps(call, ensure_ascii=False))
    if message.get("reasoning_content"):
        said.insert(0, f"<think>{message['reasoning_content']}</think>")
    style = "" if message["role"] == "assistant" else "dim"
    return Text(visible(f"{message['role']}: {' '.join(part for part in said if part)}"), style=style)


def visible(text: str) -> str:
    """Text with control characters, which may do anything to a terminal, and lone surrogates as backslash escapes."""
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode()


def _caption(sample: Sample, source: str | None) -> str:
    score = "unscorable" if sample.score is None else f"score {sample.score:.3g}"
    answer = "" if sample.answer is None else f" · answer {sample.answer}"
    cut = " (cut)" if sample.truncated else ""
    turns = "" if sample.episode is None else f" · {len(sample.episode['turns'])} turns, {sample.episode['stop']}"
    of = source or f"step {sample.step}"
    return visible(f"{of} · {score}{answer} · {sample.response_length} tokens{cut}{turns}")


def _colour(sample: Sample) -> str:
    if sample.score is None:
        return "yellow"
    return "green" if sample.score > 0 else "red"
