"""Samples of the model's responses: stored in `samples.jsonl`, and shown to people."""

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
    """Sample of the policy: one response, with its prompt and scores.

    Attributes:
      score: Weighted sum of `parts`; None if the response is unscorable.
      parts: Score of each reward, by name; None if the reward failed.
      prompt_length: Number of tokens of the prompt.
      response_length: Number of tokens of the response, its end-of-sequence included.
      truncated: True if the length limit ended the response.
      logp_gap: Mean over the response's tokens of |trainer's logp - sampler's logp|; None if not measured.
      tokens: Lists with an entry for each sampled token: its `text`, the trainer's `logp`, the difference
        to the sampler's logp (`gap`), and the `entropy` of its distribution, if known; None if not recorded.
      answer: Reference answer, if there is one.
      episode: Episode with its `messages`, `turns` (reward, seconds and calls of each), reason to end (`stop`) and
        error (`failure`); None for a single response.
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
    """File `samples.jsonl`."""

    def add(self, samples: Iterable[Sample]) -> None:
        self.append(asdict(sample) for sample in samples)


def read_samples(path: Path | str, *, n: int) -> list[Sample]:
    """Read `n` samples of the last step, evenly spaced, so that their prompts differ."""
    last: list[dict] = []
    for record in read_records(path):
        if last and record["step"] != last[0]["step"]:
            last.clear()
        last.append(record)
    known = {known.name for known in fields(Sample)}
    return [Sample(**{name: value for name, value in record.items() if name in known}) for record in spread(last, n)]


def spread(items: Sequence[Any], n: int) -> Sequence[Any]:
    """Return `n` items at even distances; all items if there are fewer."""
    return items if len(items) <= n else [items[i * len(items) // n] for i in range(n)]


def show_samples(samples: Sequence[Sample], *, source: str | None = None, console: Console | None = None) -> None:
    """Print samples: in frames on a terminal or in a notebook, as plain lines elsewhere.

    Args:
      source: Name of the policy that generated the samples; None is the run's own policy at the step of the samples.
    """
    console = console or Console()
    for sample in samples:
        # Text, not str: text of a model may look like rich's markup.
        if console.is_terminal or console.is_jupyter:
            body = Group(Text(visible(sample.prompt), style="dim"), Rule(style="dim"), Text(visible(sample.response)))
            if sample.episode is not None:
                body = Group(*(_formatted(message) for message in sample.episode["messages"]))
            console.print(
                Panel(body, title=Text(_caption(sample, source)), title_align="left", border_style=_colour(sample))
            )
        else:
            plain = f"--- {_caption(sample, source)}\n{visible(sample.prompt)}\n>>>\n{visible(sample.response)}\n"
            if sample.episode is not None:
                conversation = "\n".join(_formatted(message).plain for message in sample.episode["messages"])
                plain = f"--- {_caption(sample, source)}\n{conversation}\n"
            console.print(Text(plain), soft_wrap=True)


def _formatted(message: Mapping[str, Any]) -> Text:
    """Format a message of a conversation: the policy's messages in full color, all others dimmed."""
    parts = [str(message.get("content") or "")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        match call:
            case {"function": {"name": name, "arguments": arguments}}:
                parts.append(f"{name}({json.dumps(arguments, ensure_ascii=False)})")
            case _:  # an environment may have other forms of calls
                parts.append(json.dumps(call, ensure_ascii=False))
    if message.get("reasoning_content"):
        parts.insert(0, f"<think>{message['reasoning_content']}</think>")
    style = "" if message["role"] == "assistant" else "dim"
    return Text(visible(f"{message['role']}: {' '.join(part for part in parts if part)}"), style=style)


def visible(text: str) -> str:
    """Escape control characters, which a terminal would obey, and lone surrogates with backslashes."""
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode()


def _caption(sample: Sample, source: str | None) -> str:
    score = "unscorable" if sample.score is None else f"score {sample.score:.3g}"
    answer = "" if sample.answer is None else f" · answer {sample.answer}"
    cut = " (cut)" if sample.truncated else ""
    turns = "" if sample.episode is None else f" · {len(sample.episode['turns'])} turns, {sample.episode['stop']}"
    origin = source or f"step {sample.step}"
    return visible(f"{origin} · {score}{answer} · {sample.response_length} tokens{cut}{turns}")


def _colour(sample: Sample) -> str:
    if sample.score is None:
        return "yellow"
    return "green" if sample.score > 0 else "red"
