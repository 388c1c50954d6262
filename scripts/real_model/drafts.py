"""Measures what drafts (`rollout.speculation`) are worth with SmolLM2-135M-Instruct, beside the same work without.

    python scripts/tools/get_smollm2.py models
    python -m scripts.real_model.drafts [--gsm8k FOLDER] [--only chat epochs tail]

Two engines of one process, one without drafts and one with them, do every part of a workload one after the other, in
changing order. The engines have answered other prompts before, which compiles the programs of single tokens. A program
of several tokens compiles once it would have saved its compilation: in three chats before the measured ones, and
within the seconds of the other workloads. Writes `drafts.json`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxrlhf.config import Sampling
from jaxrlhf.engine import Completion, Request
from jaxrlhf.trainer.served_policy.flags import EngineSizes
from jaxrlhf.trainer.served_policy.load import load_policy
from scripts.benchmarks import workload as bench
from scripts.pages import RESULTS, ROOT
from scripts.real_model.runs import Given, questions

FILE = RESULTS / "drafts.json"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TURNS = (
    "Write a short story about a lighthouse keeper, in two paragraphs.",
    "Correct the spelling of your story and write all of it again.",
    "List the three main events of the story.",
)
OTHER_TURNS = ("Describe a garden in spring, in two paragraphs.", "Write that again.", "List the plants.")
EPOCHS = 4
LONGEST = 384
"""Most tokens of a response of `tail` and `epochs`."""


class Seconds(NamedTuple):
    """Seconds on the clock, and seconds of all processors of this process, which other processes do not change."""

    wall: float
    processors: float


def _now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


class Pair:
    """Engines of the model without drafts and with them.

    Attributes:
      seconds: Seconds of each part without drafts and with them, and seconds of processors.
      tokens: Number of sampled tokens of each part.
      differ: Number of completions whose tokens differ.
    """

    def __init__(self, given: Given, *, slots: int, context: int, tokens: int) -> None:
        sizes = [EngineSizes(slots, context, tokens, dtype="float32", speculation=how) for how in (None, "auto")]
        loaded = [load_policy(str(given.model), each) for each in sizes]
        self.engines, self._tokenizer, self._given = [each.engine for each in loaded], loaded[0].tokenizer, given
        self.forget()

    def forget(self) -> None:
        """Drop what was measured so far."""
        self.seconds, self.tokens, self.differ = list[tuple[Seconds, Seconds]](), list[int](), 0
        self.engines[1].speculation.take_counts()

    def prompt(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Tokens of a chat, up to the answer."""
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, completion: Completion) -> str:
        """Answer in a completion."""
        return str(self._tokenizer.decode(list(completion.tokens), skip_special_tokens=True))

    def asked(self, start: int, prompts: int, responses: int, **options: Any) -> Iterator[Request]:
        """Requests of several responses to each of the prompts from a number on."""
        for number, record in enumerate(questions(self._given, start + prompts)[start:]):
            prompt = self.prompt([{"role": "user", "content": record["question"]}])
            yield from (Request(responses * number + copy, prompt, **options) for copy in range(responses))

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, *, first: float = 0.0
    ) -> list[Completion]:
        """Generate with both engines, and note the seconds.

        Args:
          first: Share of the responses whose seconds do not count, the ones that end first.
        """
        found: dict[int, tuple[Seconds, list[Completion]]] = {}
        for which in (0, 1) if len(self.seconds) % 2 == 0 else (1, 0):
            ends = [_now()]

            def note(_: Completion, ends: list[Seconds] = ends) -> None:
                ends.append(_now())

            done = self.engines[which].generate(requests, sampling, seed=seed, on_completion=note)
            start = ends[int(first * len(done))]
            found[which] = Seconds(ends[-1].wall - start.wall, ends[-1].processors - start.processors), done
        self.seconds.append((found[0][0], found[1][0]))
        self.tokens.append(sum(len(one.tokens) for one in found[0][1]))
        self.differ += sum(one.tokens != other.tokens for one, other in zip(found[0][1], found[1][1], strict=True))
        return found[0][1]

    def chat(self, turns: Sequence[str], sampling: Sampling, seed: int) -> None:
        """Chat with one person; each answer is a part."""
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            [done] = self.generate([Request(number, self.prompt(messages), keep=True)], sampling, seed)
            messages.append({"role": "assistant", "content": self.text(done)})
        for engine in self.engines:
            engine.free()

    def figures(self) -> dict[str, Any]:
        """Everything measured since `forget`; `times` is how many times as fast drafts are."""
        plain, drafted = ([pair[which] for pair in self.seconds] for which in (0, 1))
        wall = [sum(one.wall for one in part) for part in (plain, drafted)]
        processors = [sum(one.processors for one in part) for part in (plain, drafted)]
        counts = self.engines[1].speculation.take_counts()
        return {
            "wall_s": [round(seconds, 2) for seconds in wall],
            "times": round(wall[0] / wall[1], 3),
            "processors_s": [round(seconds, 2) for seconds in processors],
            "times_of_processors": round(processors[0] / processors[1], 3),
            "times_of_parts": [round(one.processors / other.processors, 2) for one, other in self.seconds],
            "tokens": sum(self.tokens),
            "passes": counts.calls,
            "accepted": round(counts.accepted / max(counts.drafted, 1), 3),
            "accepted_of_late_by_match": [round(rate, 2) for rate in self.engines[1].speculation.rates.tolist()],
            "tokens_per_pass": round(counts.tokens / max(counts.rows, 1), 2),
            "completions_that_differ": self.differ,
        }


@cache
def _one_person(given: Given) -> Pair:
    pair = Pair(given, slots=1, context=2048, tokens=96)
    for _ in range(3):
        pair.chat(OTHER_TURNS, Sampling(greedy=True), 100)
    return pair


@cache
def _groups(given: Given) -> Pair:
    pair = Pair(given, slots=8, context=LONGEST + 256, tokens=LONGEST)
    for most in (LONGEST, LONGEST // 2):  # the rows that are left grow fewer, at short and at long lengths
        whole = enumerate(pair.asked(2, 2, 4, stop_tokens=()))
        pair.generate([replace(one, max_tokens=most - 8 * number) for number, one in whole], Sampling(), 0)
    return pair


def chat(given: Given, sampling: Sampling) -> dict[str, Any]:
    """Measure a chat with one person, of three answers of at most 96 tokens."""
    pair = _one_person(given)
    pair.forget()
    pair.chat(TURNS, sampling, 0)
    return pair.figures()


def epochs(given: Given) -> dict[str, Any]:
    """Measure `EPOCHS` epochs over 2 prompts, 4 responses each of at most `LONGEST` tokens; each epoch is a part."""
    pair = _groups(given)
    pair.forget()
    for epoch in range(EPOCHS):  # the first without earlier responses
        pair.generate(list(pair.asked(0, 2, 4)), Sampling(), epoch)
    return pair.figures()


def tail(given: Given) -> dict[str, Any]:
    """Measure the second half of two more batches of `epochs`, whose programs are compiled if that ran before."""
    pair = _groups(given)
    pair.forget()
    for start in (4, 6):
        pair.generate(list(pair.asked(start, 2, 4)), Sampling(), start, first=0.5)
    return pair.figures()


def batch(given: Given) -> dict[str, Any]:
    """Measure a batch of 16 responses of 64 tokens that no token ends: nothing to gain."""
    pair = Pair(given, slots=16, context=384, tokens=64)
    for start in (4, 0):
        pair.forget()
        pair.generate(list(pair.asked(start, 4, 4, stop_tokens=())), Sampling(), start)
    return pair.figures()


WORKLOADS: dict[str, Callable[[Given], dict[str, Any]]] = {
    "chat_greedy": lambda given: chat(given, Sampling(greedy=True)),
    "chat": lambda given: chat(given, Sampling()),
    "epochs": epochs,
    "tail": tail,
    "batch": batch,
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m scripts.real_model.drafts", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--model", type=Path, default=MODEL, help="GGUF file of the model")
    parser.add_argument("--gsm8k", default="openai/gsm8k", help="GSM8K: a hub id, or a folder with test.jsonl")
    flags = parser.parse_args()
    given = Given(flags.model.resolve(), flags.gsm8k, Path())
    for name in flags.only:
        figures = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": bench.commit()} | WORKLOADS[name](given)
        print(name, json.dumps(figures), flush=True)
        found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
        machine = bench.about("jax")["processor"]
        FILE.write_text(json.dumps(found | {name: figures | {"machine": machine}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
