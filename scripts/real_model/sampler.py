"""Log-probabilities of the sampler beside those of the trainer, for the same weights and tokens."""

from typing import Any

import numpy as np

from jaxrlhf.batch import RolloutBatch
from jaxrlhf.config import GRPO, Config, Environment, Sampling
from jaxrlhf.dataflows.step import value_of
from jaxrlhf.tracking import RunConsole
from jaxrlhf.trainer.phase import load_split
from jaxrlhf.trainer.policy import policy_roles
from scripts.real_model import tasks
from scripts.real_model.runs import Figures, Given, config_of, prompt_file, questions, rollout, scored_by_vowels

TURN_TOKENS = 24


def gaps(rollout: RolloutBatch, logp_BT: Any) -> dict[str, float]:
    """Differences of the two log-probabilities over the tokens that the policy chose."""
    mask_BT = np.asarray(rollout.sequences.mask_BT)
    apart = np.abs(np.asarray(logp_BT) - np.asarray(rollout.sampler_logp_BT))[mask_BT]
    return {
        "tokens": int(mask_BT.sum()),
        "mean": float(apart.mean()),
        "p999": float(np.quantile(apart, 0.999)),
        "largest": float(apart.max()),
    }


def _both(config: Config, given: Given, copies: int) -> tuple[RolloutBatch, dict[str, float]]:
    """Sample with a configuration's first prompts, and compute the log-probabilities again as training does."""
    found = policy_roles(config, str(given.model))
    problems = list(load_split(found.config, found.tokenizer, "train").problems[: config.rollout.prompts_per_step])
    how: dict[str, Any] = {"responses_per_prompt": copies, "seed": 1}
    with RunConsole(steps=0) as console, found.launched(console) as roles:
        sampled = value_of(roles.actor.generate_sequences(problems, Sampling(), **how))
        return sampled, gaps(sampled, value_of(roles.actor.compute_log_prob(sampled)))


def measure(given: Given) -> Figures:
    """Compare over single responses, and over conversations of ten turns with a calculator."""
    asked = prompt_file(given, "questions", ({"prompt": record["question"]} for record in questions(given, 16)))
    sizes = rollout(16, 4, 64, prompt_tokens=256)
    single = config_of(
        given, "single", GRPO(responses_per_update=64, kl=None), data=asked, rollout=sizes, rewards=scored_by_vowels()
    )
    _, responses = _both(single, given, 4)
    sums = prompt_file(given, "sums", tasks.opening_sums(4), answer_key="answer")
    environment = Environment(
        factory="scripts.real_model.tasks:Sums",
        max_turns=tasks.TURNS,
        turn_tokens=TURN_TOKENS,
        cut_turns="close",
        observation_tokens=64,
    )
    longer = rollout(4, 2, 800, decode_tokens_per_dispatch=8)
    talk = config_of(
        given, "talk", GRPO(responses_per_update=8, kl=None), data=sums, rollout=longer, environment=environment
    )
    episodes, turns = _both(talk, given, 2)
    assert episodes.episodes is not None
    turn_BT = np.asarray(episodes.episodes.turn_BT)
    last_B = turn_BT.max(axis=1) + 1
    return {"responses": responses, "turns": turns | {"of_each": int(last_B.min())}}
