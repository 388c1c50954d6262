"""Greedy answers of the engine, of the server and of transformers."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from scripts.real_model.logits import their_model
from scripts.real_model.runs import Figures, Given, questions

PROMPTS, TOKENS, CONTEXT, SLOTS, BATCH = 64, 48, 512, 32, 16


def messages(given: Given) -> list[list[dict[str, str]]]:
    """Questions of GSM8K as chats."""
    return [[{"role": "user", "content": record["question"]}] for record in questions(given, PROMPTS)]


@contextmanager
def _server(given: Given) -> Iterator[str]:
    """Address of `jaxrlhf serve` with the model."""
    flags = f"--port 0 --no-api-key --dtype float32 --slots {SLOTS} --context {CONTEXT} --max-tokens {TOKENS}"
    command = [sys.executable, "-m", "jaxrlhf.serve", str(given.model), *flags.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("serving ")), "")
        if not line:
            raise RuntimeError("the server ended before it served")
        try:
            yield line.split()[-1]
        finally:
            process.send_signal(signal.SIGINT)


def served(given: Given, chats: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each chat as tokens, asked of the server all at once."""
    import openai

    with _server(given) as address, openai.OpenAI(base_url=address, api_key="none", timeout=600) as client:
        name = client.models.list().data[0].id

        def ask(chat: Any) -> tuple[list[int], list[int]]:
            answer: Any = client.chat.completions.create(
                model=name,
                messages=chat,
                temperature=0,
                max_tokens=TOKENS,
                extra_body={"return_token_ids": True},
            )
            return list(answer.choices[0].prompt_token_ids), list(answer.choices[0].token_ids)

        with ThreadPoolExecutor(len(chats)) as pool:
            return list(pool.map(ask, chats))


def generated(given: Given, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Answers of the engine itself."""
    from jaxrlhf.config import Sampling
    from jaxrlhf.engine import EngineService, Request
    from jaxrlhf.trainer.served_policy.flags import EngineSizes
    from jaxrlhf.trainer.served_policy.load import load_policy

    sizes = EngineSizes(slots=SLOTS, context_tokens=CONTEXT, response_tokens=TOKENS, dtype="float32")
    with EngineService(load_policy(str(given.model), sizes).engine) as service:
        asked = [
            service.submit(Request(number, tuple(prompt)), Sampling(greedy=True), seed=0)
            for number, prompt in enumerate(prompts)
        ]
        return [list(future.result().tokens) for future in asked]


def expected(model: Any, prompts: Sequence[Sequence[int]], end: int) -> list[list[int]]:
    """Answers of transformers, in batches of prompts of similar length, which are padded on the left."""
    answers: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        width = max(len(prompts[number]) for number in batch)
        token_BT = torch.tensor([[end] * (width - len(prompts[n])) + list(prompts[n]) for n in batch])
        real_BT = torch.tensor([[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in batch])
        how: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        whole_BT = model.generate(token_BT, attention_mask=real_BT, **how)
        for number, answer in zip(batch, whole_BT[:, width:].tolist(), strict=True):
            answers[number] = answer[: answer.index(end) + 1] if end in answer else answer
    return [answers[number] for number in range(len(prompts))]


def margin(model: Any, prompt: Sequence[int], answer: Sequence[int], other: Sequence[int]) -> float:
    """Difference of the two highest logits where two answers part."""
    same = next(
        (place for place, pair in enumerate(zip(answer, other, strict=False)) if pair[0] != pair[1]),
        min(len(answer), len(other)),
    )
    with torch.no_grad():
        logit_V = model(torch.tensor([[*prompt, *answer[:same]]])).logits[0, -1]
    highest = torch.topk(logit_V, 2).values
    return float(highest[0] - highest[1])


def measure(given: Given) -> Figures:
    """Count equal answers, and measure the margins where two answers part."""
    from jaxrlhf.data.tokenizer import load_tokenizer
    from jaxrlhf.models import resolve

    chats = messages(given)
    tokenizer = load_tokenizer(str(resolve(given.model)))
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    by_server = served(given, chats)
    by_engine = generated(given, prompts)
    model = their_model(given)
    theirs = expected(model, prompts, tokenizer.eos_token_id)
    answers = [answer for _, answer in by_server]
    parted = [number for number in range(PROMPTS) if by_engine[number] != theirs[number]]
    margins = [margin(model, prompts[n], theirs[n], by_engine[n]) for n in parted]
    return {
        "prompts": PROMPTS,
        "tokens": sum(map(len, theirs)),
        "prompts_equal": sum(asked == list(prompt) for (asked, _), prompt in zip(by_server, prompts, strict=True)),
        "server_equals_engine": sum(map(list.__eq__, answers, by_engine)),
        "engine_equals_theirs": PROMPTS - len(parted),
        "server_equals_theirs": sum(map(list.__eq__, answers, theirs)),
        "largest_margin": max(margins, default=0.0),
        "margins": margins,
    }
