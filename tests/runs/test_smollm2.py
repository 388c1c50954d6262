"""A user's first hour with the published SmolLM2: supervised updates and greedy answers, beside transformers'."""

import json

import pytest
import torch
from command_lines import run_module
from transformers import PreTrainedTokenizerFast

from jaxrlhf.config import (
    SFT,
    Checkpointing,
    Config,
    Evaluation,
    Optimizer,
    Pretrained,
    PromptFile,
    Rewards,
    Rollout,
    Selection,
    Training,
)
from jaxrlhf.models.huggingface.hub import resolve
from jaxrlhf.trainer.run import run
from tests.models.test_smollm2 import theirs  # noqa: F401 - a fixture

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("optimized", "undrawn")]

RECORDS = [
    {"prompt": f"Tom has {first} apples and buys {second}. How many has he?", "solution": f"#### {first + second}"}
    for first, second in ((2, 3), (10, 7), (41, 1), (5, 50))
]
QUESTIONS = ["What is the capital of France?", "Name a colour.", "Say hello."]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return PreTrainedTokenizerFast.from_pretrained(resolve(smollm2))


def opened(tokenizer, text):
    """Tokens of a chat with one message, up to where the reply begins."""
    chat = [{"role": "user", "content": text}]
    return tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def test_supervised_updates_begin_at_transformers_loss_and_lower_it(smollm2, theirs, tokenizer, tmp_path):  # noqa: F811
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    total, count = 0.0, 0
    for record in RECORDS:
        prompt = opened(tokenizer, record["prompt"])
        solution = [*tokenizer.encode(record["solution"], add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logit_TV = theirs(torch.tensor([prompt + solution])).logits[0, len(prompt) - 1 : -1]
        logp_T = torch.log_softmax(logit_TV.double(), -1)[range(len(solution)), solution]
        total, count = total - float(logp_T.sum()), count + len(solution)
    config = Config(
        name="sft",
        algorithm=SFT(examples_per_update=len(RECORDS)),
        steps=2,
        model=Pretrained(str(smollm2)),
        data=PromptFile(train=str(file), answer_key=None, solution_key="solution"),
        selection=Selection(order="given"),
        rewards=Rewards(parts=()),
        rollout=Rollout(max_prompt_tokens=64, max_response_tokens=8),
        actor=Training(optimizer=Optimizer(learning_rate=1e-5, weight_decay=0.0), tokens_per_microbatch=512),
        evaluation=Evaluation(every_steps=0),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        devices=1,
        trackers=(),
        workdir=str(tmp_path / "run"),
    )
    run(config)
    losses = [json.loads(line)["actor/loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(total / count, abs=1e-4)
    assert losses[1] < losses[0] - 0.1


def test_greedy_answers_of_the_file_are_transformers(smollm2, theirs, tokenizer, tmp_path):  # noqa: F811
    asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    asked.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    run_module("generate", smollm2, asked, answered, "--rollout.max-response-tokens", 12, "--devices", 1)
    answers = [json.loads(line)["completion"] for line in answered.read_text().splitlines()]
    for question, answer in zip(QUESTIONS, answers, strict=True):
        ids = torch.tensor([opened(tokenizer, question)])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert answer == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
