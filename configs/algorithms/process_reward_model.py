"""Process reward model, trained on the labeled steps of Math-Shepherd.

    python -m jaxrlhf.train --config process_reward_model.py --export models/process_reward_model

The export is the checkpoint of a `ProcessModelReward`. No result yet: the run needs an accelerator.

Source: Lightman et al. 2023 (arXiv:2305.20050); Wang et al. 2024 (Math-Shepherd, arXiv:2312.08935).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, Problem, Sequences, padded_rows
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import (
    Algorithm,
    Config,
    Evaluation,
    HubSteps,
    Optimizer,
    Pretrained,
    RoleSpec,
    Rollout,
    StepFile,
    Training,
)
from jaxrlhf.config.checks.algorithms import check_critic_alone, check_labelled
from jaxrlhf.config.roles import critic
from jaxrlhf.config.settings import Positive
from jaxrlhf.data.labelled.steps import LabelledSteps
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, merged, value_of


def step_objective(
    output: Array, mask: Array, weight: Array, fields: Mapping[str, Any], settings: object
) -> algos.ObjectiveTerms:
    """Compute the cross-entropy of a step's label y, given the log-odds v after the step. Settings are not read.

        loss = -y log sigmoid(v) - (1 - y) log sigmoid(-v)

    Args:
      output: Critic's value of the prefix before each token.
      mask: Tokens that directly follow a step, whose prefix ends with the step.
      fields: `label`, 1 if the step before the token is right, else 0.

    Source: Lightman et al. 2023 (arXiv:2305.20050), section 2.6; Wang et al. 2024 (Math-Shepherd, arXiv:2312.08935).
    """
    logit, label = algos.selected(output, mask), algos.selected(fields["label"], mask)
    loss = algos.selected(jax.nn.softplus(logit) - label * logit, mask)
    right = algos.selected(((logit > 0) == (label > 0)).astype(loss.dtype), mask)
    return algos.ObjectiveTerms(algos.selected(weight, mask) * loss, {"steps/loss": loss, "steps/accuracy": right})


def learn(roles: Roles, work: StepInput["ProcessRewardModel"], problems: Sequence[Problem]) -> StepResult:
    """Make one update of a process reward model, on the mean loss over all labeled steps."""
    batch = step_experience(problems, work.config)
    critic = roles.critic.update_critic([batch], objective=step_objective, settings=None)
    return StepResult(merged(critic))


def evaluate(roles: Roles, config: Config, problems: Sequence[Problem]) -> Metrics:
    """Judge the steps of held-out solutions; `eval/accuracy` is the share of steps judged as labeled."""
    batch = step_experience(problems, config)
    value_BT, mask_BT = value_of(roles.critic.compute_values(batch.sequences)), batch.sequences.mask_BT
    judged = step_objective(value_BT, mask_BT, batch.weight_BT, batch.fields, None).metrics
    means = {name: float(np.asarray(own_BT)[mask_BT].mean()) for name, own_BT in judged.items()}
    return {
        "eval/accuracy": means["steps/accuracy"],
        "eval/loss": means["steps/loss"],
        "eval/problems": float(len(problems)),
    }


def step_experience(problems: Sequence[Problem], config: Config) -> Experience:
    """Build prompts followed by their solutions; the mask marks the position after each step, with any token in it.

    A critic values the prefix before a position, so the value there judges the step.
    """
    tokens, labels, width = list[Sequence[int]](), list[np.ndarray](), config.rollout.width
    for problem in problems:
        assert isinstance(problem, LabelledSteps), "check() refuses other problems"
        tokens.append((*problem.prompt_tokens, *problem.solution_tokens, 0))
        label_T = np.full(len(tokens[-1]), np.nan, np.float32)
        label_T[len(problem.prompt_tokens) + np.array(problem.step_ends)] = problem.step_labels
        labels.append(label_T)
    judged = [np.isfinite(label_T).tolist() for label_T in labels]
    sequences = Sequences.of(tokens, judged, [problem.prompt_id for problem in problems], width=width)
    label_BT = np.nan_to_num(padded_rows(labels, width=width, dtype=np.float32))
    weight_BT = sequences.mask_BT.astype(np.float32) / sequences.mask_BT.sum()
    return Experience.of(sequences, weight_BT, {"label": label_BT})


@dataclass(frozen=True)
class ProcessRewardModel(Algorithm):
    """Process reward model: probability that a step of a solution is right.

    The model is a critic without an actor; its value after a step's last token is the log-odds. The export is a
    sequence-classification checkpoint for `ProcessModelReward`. The last step is read at the position after the
    solution, so a solution has at most `rollout.max_response_tokens` - 1 tokens.

    Attributes:
      solutions_per_update: Number of solutions in one optimizer update.
      critic: Training of the process reward model; its trunk starts as the configuration's model.
    """

    learn = learn
    evaluation = evaluate
    positions_after: ClassVar[int | None] = 1

    solutions_per_update: Positive[int] = 32
    critic: Training = field(default_factory=lambda: Training(optimizer=Optimizer(learning_rate=1e-5)))

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (critic(self.critic),)

    def problems_per_step(self, rollout: Rollout) -> int:
        return self.solutions_per_update

    def updates_per_step(self, rollout: Rollout) -> int:
        return 1

    def check(self, config: Config) -> None:
        check_labelled(self, config, (StepFile, HubSteps), "labeled steps", give="StepFile or HubSteps")
        check_critic_alone(self, config)


def get_config() -> Config:
    """Return the configuration of the run; `rollout` limits the lengths of problems and solutions."""
    optimizer = Optimizer(learning_rate=1e-5, decay="cosine", weight_decay=0.0)
    return Config(
        name="process_reward_model",
        model=Pretrained("Qwen/Qwen2.5-0.5B-Instruct"),
        data=HubSteps("trl-lib/math_shepherd", evaluation="test"),
        algorithm=ProcessRewardModel(
            solutions_per_update=64, critic=Training(optimizer=optimizer, tokens_per_microbatch=16_384)
        ),
        rollout=Rollout(max_prompt_tokens=512, max_response_tokens=512),
        steps=2000,
        evaluation=Evaluation(every_steps=200, problems=1024),
    )
