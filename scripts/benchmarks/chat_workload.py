"""Workloads of a real chat model, SmolLM2-135M-Instruct: checkpoint, records, reward.

Other frameworks run the same workloads (`compare_peers.py`), so nothing of JAX is imported here at the top. A record is
a word problem of 100 to 200 tokens in the chat template, a worked solution, and a wrong solution. Responses run to
their limit in every framework: no token ends them.
"""

import argparse
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.benchmarks import workload as bench

NAME = "smollm2"
WORKLOADS = {
    "smollm2_grpo": bench.Workload(NAME, 8, 4, 192, 128),
    "smollm2_ppo": bench.Workload(NAME, 32, 1, 192, 128, "ppo"),
    "smollm2_sft": bench.Workload(NAME, 32, 1, 160, 96, "sft"),
    "smollm2_dpo": bench.Workload(NAME, 16, 2, 128, 72, "dpo"),
}
"""Workloads by name. The response of `sft` is the solution of a record; the two responses of `dpo` are a pair."""
PAD = "<|endoftext|>"
"""Padding token of the peers; TRL's PPO would mask the model's own padding token, the end of a turn, in prompts."""
STEPS = 8
"""Number of steps that the written records are enough for."""
SHORTEST = 0.8
"""Minimum length of a text, as a share of its limit."""
ATTEMPTS = 500
"""Maximum number of problems to try for each record."""

PEOPLE = ("Ada", "Ben", "Emma", "Hugo", "Ivy", "Leo", "Mia", "Nora", "Omar", "Rosa", "Tom", "Zoe")
THINGS = ("apples", "candles", "cookies", "flowers", "lemons", "marbles", "melons", "notebooks", "shells", "stamps")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
OPENING = "{name} runs a small stall at the market and begins the week with {n} {thing}."
GAINS = (
    "On {day} {name} buys {n} more {thing} from a farmer who lives nearby.",
    "On {day} a neighbour called {friend} brings {n} {thing} as a present.",
    "On {day} {name} finds {n} more {thing} in a box behind the counter.",
)
LOSSES = (
    "On {day} {n} of the {thing} are sold before noon.",
    "On {day} {name} gives {n} of the {thing} to {friend}, who helps at the stall.",
    "On {day} {n} of the {thing} are lost on the way to the market.",
)
ASIDES = (
    "It rains all afternoon, so few people come by.",
    "The stall next door sells bread and cheese.",
    "{friend} sings while the tables are carried back.",
    "A dog sleeps under the table for most of the day.",
)
QUESTION = (
    "How many {thing} does {name} have at the end of the week? Work it out step by step, and end with the answer "
    "after ####."
)


def add_flags(
    parser: argparse.ArgumentParser,
    *,
    workload: str = "smollm2_grpo",
    choices: Mapping[str, bench.Workload] = WORKLOADS,
) -> None:
    """Add flags for the workload, its sizes, and the checkpoints."""
    bench.add_flags(parser, workload=workload, choices=choices)
    parser.add_argument("--model", type=Path, help="a chat checkpoint in place of SmolLM2's: to try the script")


def checkpoint(folder: Path) -> Path:
    """Return the path of SmolLM2 in float32, as transformers reads the GGUF file; fetch and write it if missing."""
    from scripts.tools import get_smollm2

    place, unfinished = folder / NAME, folder / f"{NAME}.unfinished"
    if not place.exists():
        _write_checkpoint(get_smollm2.fetch(folder), unfinished)
        unfinished.rename(place)
    return place


def _write_checkpoint(file: Path, place: Path) -> None:
    from jaxrlhf import models

    config = models.read_config(file)
    models.save_params(models.load_params(file, config, "lm"), config, place, source=file)


def tokenizer_of(model: Path) -> Any:
    """Return the tokenizer of a checkpoint, from the checkpoint's own files only."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model)


def records_file(workload: bench.Workload, folder: Path, model: Path) -> Path:
    """Return the path of the records of `STEPS` steps, in JSON lines; write the file unless it exists.

    A record has the prompt as `messages` and as `text` in the chat template, `solution`, `rejected` and `answer`.
    """
    sizes = f"{workload.algorithm}_{workload.prompts}_{workload.prompt_tokens}_{workload.new_tokens}"
    file = folder / f"{model.name}_{sizes}.jsonl"
    if not file.exists():
        found = records(workload, tokenizer_of(model), count=workload.prompts * STEPS)
        part = file.with_suffix(".part")
        part.write_text("".join(json.dumps(each) + "\n" for each in found))
        part.rename(file)
    return file


def read_records(file: Path, *, count: int) -> list[dict[str, Any]]:
    """Return the first `count` records of a file.

    Raises:
      ValueError: The file has fewer records.
    """
    lines = file.read_text().splitlines()
    if len(lines) < count:
        raise ValueError(f"{file} has {len(lines)} records, and {count} are wanted: at most {STEPS} steps")
    return [json.loads(line) for line in lines[:count]]


def records(workload: bench.Workload, tokenizer: Any, *, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return distinct records whose prompts nearly fill the workload's limit; in SFT and DPO, solutions do so too.

    Raises:
      ValueError: Too few problems fit the limits.
    """
    draw, found = random.Random(seed), dict[str, dict[str, Any]]()
    trained = workload.algorithm in ("sft", "dpo")
    for _ in range(ATTEMPTS * count):
        record = _record(draw)
        record["text"] = tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True, tokenize=False)
        answers = [record["solution"], record["rejected"]] if trained else []
        fits = _fits(tokenizer, record["text"], workload.prompt_tokens) and all(
            _fits(tokenizer, answer + tokenizer.eos_token, workload.new_tokens) for answer in answers
        )
        if fits:
            found.setdefault(record["text"], record)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"{len(found)} of {count} problems fit {workload}; take other limits")


def _fits(tokenizer: Any, text: str, limit: int) -> bool:
    length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return SHORTEST * limit <= length <= limit


def _record(draw: random.Random) -> dict[str, Any]:
    """Sample a word problem with 2 to 6 changes; a sentence that changes nothing follows some changes."""
    name, friend = draw.sample(PEOPLE, 2)
    thing, amount = draw.choice(THINGS), draw.randint(40, 90)
    sentences, lines, steps = [OPENING.replace("{n}", str(amount))], [], draw.randint(2, len(DAYS))
    for day in DAYS[:steps]:
        change, gains = draw.randint(11, 30), draw.random() < 0.6 or amount < 40
        sentence = draw.choice(GAINS if gains else LOSSES)
        sentences.append(sentence.replace("{n}", str(change)).replace("{day}", day))
        if draw.random() < 0.3:
            sentences.append(draw.choice(ASIDES))
        after = amount + change if gains else amount - change
        lines.append((day, f"{amount} {'+' if gains else '-'} {change}", after))
        amount = after
    question = " ".join((*sentences, QUESTION)).format(name=name, friend=friend, thing=thing)
    return {
        "messages": [{"role": "user", "content": question}],
        "solution": _solution(lines, thing, slip=0),
        "rejected": _solution(lines, thing, slip=draw.randint(1, 9)),
        "answer": str(amount),
    }


def _solution(lines: list[tuple[str, str, int]], thing: str, *, slip: int) -> str:
    """Return the worked lines and the answer; the last amount and the answer are too large by `slip`."""
    last = len(lines) - 1
    worked = [
        f"On {day} there are {sum_} = {after + slip * (index == last)} {thing}."
        for index, (day, sum_, after) in enumerate(lines)
    ]
    return "\n".join((*worked, f"#### {lines[-1][2] + slip}"))


def lowercase_share(prompt: str, response: str, answer: str | None, record: Any) -> float:
    """Return the reward of a response: the share of lowercase letters among its characters."""
    return len(re.findall("[a-z]", response)) / max(1, len(response))


def endless_tokenizer(model: Path) -> Any:
    """Return the model's tokenizer with an end token past the vocabulary, so that no response ends before its limit."""
    tokenizer = tokenizer_of(model)
    tokenizer.padding_side = "left"
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    if PAD in tokenizer.get_vocab():
        tokenizer.pad_token = PAD
    return tokenizer


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest difference of log-probabilities of the same solutions.

    Raises:
      ValueError: A difference exceeds 1e-3: the two sides read different models or different tokens.
    """
    largest = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    if largest > 1e-3:
        raise ValueError(f"log-probabilities of the same solutions differ by up to {largest:.3g}: {ours}, {theirs}")
    return largest
