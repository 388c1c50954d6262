"""Steps of Tunix's agentic GRPOLearner on products with a calculator. Prints one JSON line.

    python -m scripts.benchmarks.peers.tunix.agents --policy DIR --problems FILE

Run this in an environment with google-tunix 0.1.7.

`benchmarks/agents/calculator.py` writes both inputs. Without a seed in its settings, Tunix's sampler uses the same
random key for every request of a step, so that all episodes of a group are equal. This script sets a different key for
each request.
"""

import argparse
import itertools
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from transformers import PreTrainedTokenizerFast
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.agentic.agents.model_agent import ModelAgent
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from scripts.benchmarks.peers.tunix.model import MESH, load

logging.set_verbosity(logging.ERROR)
PROMPT_TOKENS, RESPONSE_TOKENS, TURNS = 32, 48, 3


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--problems", type=Path, required=True, help="JSON: a list of steps, each a list of problems")
    parser.add_argument("--responses", type=int, default=8, help="episodes that begin with one prompt")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    return parser.parse_args()


class Sums(BaseTaskEnv):
    """Environment of one product: a call is answered, any other reply is the final answer."""

    def __init__(self, single_example: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(task=single_example, max_steps=TURNS, **kwargs)

    def _initial_observation(self) -> dict[str, Any]:
        return self.task

    def _step_impl(self, action: str) -> EnvStepResult:
        """Compute the result of a call, or end the episode with the score of the reply."""
        called = re.fullmatch(r"<<([0-9*]{1,16})>>", action)
        if called:
            factors = [int(factor) for factor in called[1].split("*") if factor]
            return EnvStepResult(str(math.prod(factors)), 0.0, False, {})
        right = f"#### {np.asarray(self.task['answer']).item()}"
        return EnvStepResult(None, float(action.strip() == right), True, {})


class Caller(ModelAgent):
    """Agent that receives observations after the first as tool messages."""

    def _observation_to_messages(self, observation: Any, reward: float, done: bool, info: dict[str, Any]) -> None:
        if isinstance(observation, str):
            self._messages.append({"role": "tool", "content": observation})
        else:
            super()._observation_to_messages(observation, reward, done, info)


class Template:
    """Chat template of the embedded tokenizer."""

    def parse(self, messages: Any, add_generation_prompt: bool = False, is_first_msg: bool = False) -> str:
        """Return the text of messages, without the empty system message that Tunix adds."""
        parts = []
        for message in messages:
            role, text = message["role"], str(np.asarray(message["content"]).item()).removesuffix("<|eos|>")
            if role == "assistant":
                parts.append(f"<|assistant|>{text}<|eos|>")
            elif role != "system":
                parts.append(f"<|{'system' if role == 'tool' else role}|>{text}")
        return "".join(parts) + ("<|assistant|>" if add_generation_prompt else "")


def main() -> None:
    """Train, and print seconds and scores by step."""
    flags = arguments()
    steps = json.loads(flags.problems.read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.policy, bos_token=None)
    prompts = len(steps[0])
    cluster = RLCluster(
        actor=load(flags.policy),
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), MESH),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(1.0), optax.adamw(flags.learning_rate, weight_decay=0.0)
                ),
                eval_every_n_steps=10**9,
                max_steps=10**9,
                mini_batch_size=prompts,
                train_micro_batch_size=prompts,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=RESPONSE_TOKENS,
                max_prompt_length=PROMPT_TOKENS,
                kv_cache_size=2 * (PROMPT_TOKENS + RESPONSE_TOKENS),
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                return_logprobs=True,
            ),
        ),
    )
    draw, number = cluster.rollout.generate, itertools.count()
    cluster.rollout.generate = lambda texts, config, **named: draw(
        texts, replace(config, seed=jax.random.key_data(jax.random.key(next(number)))), **named
    )
    scores: list[float] = []
    ends: list[float] = []

    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(
            num_generations=flags.responses,
            beta=0.0,
            loss_agg_mode="token-mean",
            max_response_length=RESPONSE_TOKENS,
            max_concurrency=prompts * flags.responses,
        ),
        chat_parser=Template(),
        agent_class=Caller,
        env_class=Sums,
    )
    manager, update = learner.reward_manager, cluster.update_actor

    def paid(**named: Any) -> dict[str, Any]:
        scores.extend(named["trajectory_rewards"])
        return manager(**named)

    def updated(*args: Any, **named: Any) -> None:
        update(*args, **named)
        ends.append(time.perf_counter())
        print(f"step {len(ends)}", np.mean(scores[-prompts * flags.responses :]), file=sys.stderr, flush=True)

    learner.reward_manager, cluster.update_actor = paid, updated
    began = time.perf_counter()
    fields = {"prompts": "prompt", "answer": "answer"}
    learner.train({name: [each[field] for each in step] for name, field in fields.items()} for step in steps)
    seconds = np.diff([began, *ends]).tolist()
    by_step = np.array(scores).reshape(len(steps), -1).mean(axis=1).tolist()
    print(json.dumps({"name": "tunix", "seconds": seconds, "score": by_step, "requests": next(number)}))


if __name__ == "__main__":
    main()
