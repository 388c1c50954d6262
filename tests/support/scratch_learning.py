"""Runs that learn an environment of others from random weights, in twenty small steps."""

from dataclasses import replace
from pathlib import Path

from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import Checkpointing, Evaluation, load
from jaxrlhf.config.environments import Episodes
from scripts.learning.task import TINY, training


def mean_scores(environment: Episodes, workdir: Path, **rollout: int) -> list[float]:
    """Mean score of the 32 episodes of each step."""
    config = load("agent_openai")
    rollout = {"prompts_per_step": 4, "responses_per_prompt": 8, "max_response_tokens": 8} | rollout
    jaxrlhf.run(
        replace(
            config,
            model=TINY,
            cold_start=None,
            environment=environment,
            actor=training(3e-2),
            algorithm=replace(config.algorithm, responses_per_update=32),
            rollout=replace(config.rollout, **rollout),
            steps=20,
            evaluation=Evaluation(every_steps=0, problems=1),
            checkpoint=Checkpointing(every_steps=0, keep_best=0),
            workdir=str(workdir),
        )
    )
    return [record["score/mean"] for record in records(workdir / "metrics.jsonl")]
