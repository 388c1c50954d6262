"""The shipped GSM8K jobs from the model's file, at sizes for two cores, after a phase on worked solutions."""

import re
from typing import Any

import numpy as np
import torch

from jaxrlhf import models
from jaxrlhf.config import (
    SFT,
    Checkpointing,
    ColdStart,
    Config,
    Evaluation,
    Optimizer,
    Selection,
    load,
    override,
)
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import load_tokenizer
from scripts.real_model.logits import their_model
from scripts.real_model.runs import Figures, Given, curve, records, train

EXAMPLES, UPDATES, STEPS = 8, 10, 4
PROMPTS, RESPONSES = 8, 4
PROMPT_TOKENS, RESPONSE_TOKENS = 256, 160


def config_of(given: Given, name: str) -> Config:
    """A shipped configuration with the model's file, fewer and shorter responses, and a cold start."""
    shipped = load(name)
    groups = shipped.rollout.responses_per_prompt > 1
    changes: dict[str, Any] = {
        "model.path": str(given.model),
        "data.path": given.gsm8k,
        "selection": Selection(order="given"),
        "cold_start": ColdStart(
            steps=UPDATES,
            algorithm=SFT(examples_per_update=EXAMPLES),
            optimizer=Optimizer(learning_rate=2e-5, weight_decay=0.0),
        ),
        "algorithm.responses_per_update": PROMPTS * RESPONSES,
        "rollout.prompts_per_step": PROMPTS if groups else PROMPTS * RESPONSES,
        "rollout.responses_per_prompt": RESPONSES if groups else 1,
        "rollout.slots": PROMPTS * RESPONSES,
        "rollout.max_prompt_tokens": PROMPT_TOKENS,
        "rollout.max_response_tokens": RESPONSE_TOKENS,
        "actor.tokens_per_microbatch": 2048,
        "steps": STEPS,
        "evaluation": Evaluation(every_steps=0, problems=PROMPTS * RESPONSES),
        "checkpoint": Checkpointing(every_steps=0, keep_best=0),
        "compute_dtype": "float32",
        "devices": 1,
        "workdir": str(given.folder / name),
    }
    if hasattr(shipped.algorithm, "critic"):
        changes["algorithm.critic.tokens_per_microbatch"] = 2048
    return override(shipped, changes)


def their_loss(given: Given, config: Config) -> float:
    """Return the mean loss of transformers' model over the tokens of the first solutions that fit, ends included.

    The calculator's annotations in a solution, as in `48/2 = <<48/2=24>>24`, are not part of the text.
    """
    tokenizer = load_tokenizer(str(models.resolve(given.model)))
    problems = load_problems(config.data, tokenizer, split="train", max_prompt_tokens=PROMPT_TOKENS).problems
    solutions = [
        [
            *tokenizer.encode(re.sub("<<[^>]*>>", "", problem.record["answer"]), add_special_tokens=False),
            tokenizer.eos_token_id,
        ]
        for problem in problems[: 4 * EXAMPLES]
    ]
    fitting = [pair for pair in zip(problems, solutions, strict=False) if len(pair[1]) <= RESPONSE_TOKENS]
    model, total, count = their_model(given), 0.0, 0
    for problem, solution in fitting[:EXAMPLES]:
        prompt = list(problem.prompt_tokens)
        with torch.no_grad():
            logit_TV = model(torch.tensor([prompt + solution])).logits[0, len(prompt) - 1 : -1]
        logp_T = torch.log_softmax(logit_TV.double(), -1)[range(len(solution)), solution]
        total, count = total - float(logp_T.sum()), count + len(solution)
    return total / count


def _job(given: Given, name: str) -> tuple[Config, Figures]:
    config = config_of(given, name)
    train(config)
    steps = records(config.folder / "metrics.jsonl")
    losses = curve(config.phases[0], "actor/loss")
    phases = {
        phase: round(float(np.median([step[f"time/{phase}_s"] for step in steps[1:]])), 1)
        for phase in ("step", "generate", "prepare", "update")
    }
    return config, {
        "losses": [round(loss, 4) for loss in losses],
        "fall": round(losses[0] - float(np.mean(losses[-3:])), 4),
        "seconds": phases,
        "peak_gb": round(max(curve(config, "memory/peak_bytes")) / 1e9, 2),
        "scores": [round(score, 3) for score in curve(config, "score/mean")],
        "lengths": [round(length, 1) for length in curve(config, "response/length_mean")],
        "accuracy": [steps[0]["eval/accuracy_at_start"], steps[-1]["eval/accuracy"]],
        "gap_mean": max(step["sampler/logp_gap_mean"] for step in steps),
    }


def grpo(given: Given) -> Figures:
    """Run `grpo_gsm8k` after supervised updates, whose first loss is compared with transformers'."""
    config, found = _job(given, "grpo_gsm8k")
    theirs = their_loss(given, config)
    first = curve(config.phases[0], "actor/loss")[0]
    return found | {"losses_first": first, "their_first_loss": theirs, "loss_gap": abs(first - theirs)}


def ppo(given: Given) -> Figures:
    """Run `ppo_gsm8k` after supervised updates."""
    return _job(given, "ppo_gsm8k")[1]
