"""Episodes of TRL's own tool loop (`GRPOTrainer._generate`) with slow tools. Prints one JSON line.

    python -m scripts.benchmarks.peers.trl.tools --model DIR --episodes 256 --turns 6 --pause 2

Run this in an environment with trl 1.16.0.

A model with random weights calls no tool, so every generated reply is parsed as a call, whatever its text. The
directory contains a model and a tokenizer written by `benchmarks/agents/turns.py`. Tools are `async`, TRL's faster
kind.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

TEMPLATE = (
    "{% for message in messages %}<|{{ 'system' if message.role == 'tool' else message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template of the embedded tokenizer, with the name of each call added because TRL requires it."""


async def answer(number: int, turn: int, pause_s: float, digits: int) -> str:
    """Answer with digits after a pause.

    Args:
        number: Number of the episode.
        turn: Number of the turn.
        pause_s: Longest pause.
        digits: Length of the answer.
    """
    dice = random.Random(f"{number} {turn}")
    await asyncio.sleep(dice.uniform(0, pause_s))
    return "".join(dice.choices("0123456789", k=digits))


def nothing(completions: list[Any], **_: Any) -> list[float | None]:
    """Return zero rewards; rewards are not used here."""
    return [0.0] * len(completions)


class Calls:
    """Parser that reads every reply as a tool call in the next turn of its episode."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags, self.read = flags, 0

    def __call__(self, tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        turn, number = divmod(self.read, self.flags.episodes)
        self.read += 1
        arguments = {"number": number, "turn": turn, "pause_s": self.flags.pause, "digits": self.flags.answer_tokens}
        call = {"type": "function", "function": {"name": "answer", "arguments": arguments}}
        return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": [call]}


def trainer_of(flags: argparse.Namespace, folder: str) -> GRPOTrainer:
    """Return a trainer whose replies all have `--reply-tokens` tokens."""
    settings = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=flags.episodes,
        num_generations=flags.episodes,
        max_completion_length=flags.turns * (flags.reply_tokens + flags.answer_tokens + 32),
        max_tool_calling_iterations=flags.turns - 1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    prompt = [{"role": "user", "content": "0123456789012345"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(flags.model)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {"reads": "every reply as a call"}
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32),
        reward_funcs=nothing,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [prompt] * flags.episodes}),
        processing_class=tokenizer,
        tools=[answer],
    )
    calls = {"_sync_tool_dicts": {}, "_async_tool_dicts": {"answer": answer}}  # as the trainer's step sets them
    vars(trainer).update({name: [tools] * flags.episodes for name, tools in calls.items()})
    for length in ("max_new_tokens", "min_new_tokens"):
        setattr(trainer.generation_config, length, flags.reply_tokens)
        trainer.generation_kwargs[length] = flags.reply_tokens
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--pause", type=float, required=True)
    for name in ("--episodes", "--turns", "--reply-tokens", "--answer-tokens"):
        parser.add_argument(name, type=int, required=True)
    flags = parser.parse_args()
    transformers.logging.set_verbosity_error()
    prefilled = 0
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(flags, folder)
        generate = trainer._generate_single_turn

        def counted(prompts: list[list[int]], *rest: Any, **named: Any) -> Any:
            nonlocal prefilled
            prefilled += sum(map(len, prompts))
            return generate(prompts, *rest, **named)

        vars(trainer)["_generate_single_turn"] = counted
        vars(grpo_trainer)["parse_response"] = Calls(flags)
        prompts = [[{"role": "user", "content": "0123456789012345"}] for _ in range(flags.episodes)]
        start = time.perf_counter()
        _, _, masks, completions, *_ = trainer._generate(prompts)
        seconds = time.perf_counter() - start
    calls = sum(message["role"] == "tool" for completion in completions for message in completion)
    assert calls == flags.episodes * (flags.turns - 1), calls
    drawn = float(sum(map(sum, masks)))
    print(json.dumps({"seconds": seconds, "prefilled_tokens": float(prefilled), "drawn_tokens": drawn}))


if __name__ == "__main__":
    main()
