"""Groups that are learnt from as they are complete: the update of the whole step, whichever are first."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from made_steps import Made, done, problem, rollout_of

from jaxrlhf.config import (
    DAPO,
    GPG,
    GRPO,
    PPO,
    RLOO,
    Agent,
    Aggregation,
    Arithmetic,
    ColdStart,
    Config,
    FromScratch,
    KLCovLoss,
    KLInLoss,
    PolicyLoss,
    Pool,
    Refusal,
    ReinforcePlusPlus,
    Rollout,
    RolloutServer,
    TokenRecords,
    function_of,
)
from jaxrlhf.dataflows.batches.streamed import Later, StreamedRollout
from jaxrlhf.dataflows.step import StepInput

PROMPTS, COPIES, PARTS, WIDTH = 6, 2, 3, 5
FIRST = (4, 1, 5, 0, 2, 3)
"""Problems in the order in which their groups are complete."""

GENERATION = Pool("generation", 1, ("rollout", "reward"))
APART = (Pool("policy", 1, ("actor", "reference")), GENERATION)
NO_REFERENCE = {"pools": (Pool("policy", 1, ("actor",)), GENERATION)}


def config_of(parts: int = PARTS, algorithm=None, **changes) -> Config:
    rollout = {"prompts_per_step": PROMPTS, "responses_per_prompt": COPIES, "stream_parts": parts}
    rest = {name: changes.pop(name) for name in [*changes] if name in Config.__dataclass_fields__}
    return Config(
        name="made",
        algorithm=algorithm or GRPO(responses_per_update=PROMPTS * COPIES, kl=KLInLoss()),
        steps=1,
        model=FromScratch(),
        data=Arithmetic(),
        rollout=Rollout(**rollout | changes),
        **{"pools": APART} | rest,
    )


def drawn(problems, copies):
    """Responses of other lengths in each group; the first token of each says its row of the whole batch."""
    numbers = np.repeat([one.prompt_id for one in problems], copies)
    row_B = numbers * copies + np.tile(np.arange(copies), len(problems))
    rollout = rollout_of(np.arange(WIDTH) < 1 + (row_B % 4)[:, None], numbers)
    sequences = replace(rollout.sequences, token_BT=np.tile(row_B[:, None], (1, WIDTH)).astype(np.int32))
    return replace(rollout, sequences=sequences)


def score(rollout):
    """Scores by row, of which one is unknown."""
    row_B = rollout.sequences.token_BT[:, 0]
    return np.where(row_B == 3, np.nan, row_B % 3 + 0.1 * row_B)


@dataclass
class InParts(Made):
    """Actor and reward of a step in parts.

    Attributes:
      asked_of: Prompts that each call scored.
      count: What the gradients are divided by.
    """

    asked_of: list[list[int]] = field(default_factory=list)
    count: int = 0

    def generate_part(self, problems, sampling, *, responses_per_prompt, seed, part, parts):
        size = len(problems) // parts
        chosen = sorted(FIRST[part * size : (part + 1) * size])
        return done(drawn([problems[number] for number in chosen], responses_per_prompt))

    def compute_reward(self, problems, rollout):
        if isinstance(problems, Later):
            self.asked_of.append([one.prompt_id for one in problems.result()])
        return super().compute_reward(problems, rollout)

    def compute_ref_log_prob(self, rollout):
        return done(self.compute_log_prob(rollout).result() - 0.1)

    def add_gradient(self, minibatches, *, objective, settings):
        return self.update_actor(minibatches, objective=objective, settings=settings)

    def update_by_gradients(self, count):
        self.count = count
        return done({"actor/loss": 0.0})


def step(config: Config):
    made = InParts(drawn, score)
    roles = SimpleNamespace(actor=made, reward=made, reference=made)
    problems = [problem(number) for number in range(PROMPTS)]
    work = StepInput(config, problems, 0, config.algorithm.initial_state())
    collected = function_of(config.algorithm, "collect")(roles, work)
    return made, collected, function_of(config.algorithm, "learn")(roles, work, collected)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("kind", [GRPO, RLOO])
def test_parts_have_the_weights_and_advantages_of_the_whole_step(kind, aggregation):
    policy = PolicyLoss(aggregation=aggregation, entropy_coefficient=0.01)
    algorithm = kind(responses_per_update=PROMPTS * COPIES, kl=KLInLoss(), policy=policy)
    whole, _, expected = step(config_of(1, algorithm))
    made, collected, result = step(config_of(PARTS, algorithm))
    assert made.asked_of == [[1, 4], [0, 5], [2, 3]] and len(made.minibatches) == PARTS
    for name in ("weight", "kl_weight", "entropy_weight"):
        np.testing.assert_allclose(made.rows(name) / made.count, whole.rows(name), rtol=1e-6)
    for name in ("mask", "advantage", "ref_logp", "sampler_logp"):
        np.testing.assert_array_equal(made.rows(name), whole.rows(name))
    assert result.with_updates().metrics == expected.with_updates().metrics | {"actor/loss": 0.0}
    assert isinstance(collected, StreamedRollout) and result.state == expected.state
    row_B = collected.rollout.result().sequences.token_BT[:, 0]
    assert row_B.tolist() == list(range(PROMPTS * COPIES))
    expected_B = score(drawn(collected.problems, COPIES)).astype(np.float32)
    np.testing.assert_array_equal(collected.scores.result().parts["made"], expected_B)


def test_old_log_probabilities_are_in_the_order_of_the_whole_step():
    algorithm = GRPO(responses_per_update=PROMPTS * COPIES, kl=KLInLoss(), old_logp="trainer")
    whole, _, expected = step(config_of(1, algorithm))
    made, _, result = step(config_of(PARTS, algorithm))
    np.testing.assert_array_equal(result.logp_BT, expected.logp_BT)
    np.testing.assert_array_equal(made.rows("old_logp"), whole.rows("old_logp"))


def test_a_later_value_is_computed_once_and_when_it_is_asked_for():
    seen = []
    later = Later(lambda: seen.append("computed") or 5)
    assert not later.done() and not seen
    assert (later.result(), later.result(), seen) == (5, 5, ["computed"])

    def failing():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Later(failing).result()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": ReinforcePlusPlus(responses_per_update=12)}, "ReinforcePlusPlus has advantages"),
        ({"algorithm": GPG(responses_per_update=12), **NO_REFERENCE}, "GPG has advantages"),
        ({"algorithm": PPO(responses_per_update=12), "pools": ()}, "PPO has advantages, critics"),
        ({"algorithm": DAPO(responses_per_update=12), **NO_REFERENCE}, "DAPO has advantages"),
        ({"algorithm": GRPO(responses_per_update=6), **NO_REFERENCE}, "there are 2, .*responses_per_update=12"),
        ({"algorithm": GRPO(responses_per_update=12, epochs_per_step=2), **NO_REFERENCE}, "there are 2"),
        (
            {"algorithm": GRPO(responses_per_update=12, policy=KLCovLoss()), **NO_REFERENCE},
            "KLCovLoss chooses among the tokens",
        ),
        ({"pools": ()}, "both have the same devices"),
        ({"staleness": 1}, "complete before it begins"),
        ({"environment": Agent("own.py:agent")}, "episodes and rollout.server give all at once"),
        ({"server": RolloutServer(("http://127.0.0.1:1",))}, "give all at once"),
        ({"token_records": TokenRecords(responses=2, entropy=True)}, "before the update, of all"),
        ({"parts": 4}, "stream_parts=4 does not divide prompts_per_step=6"),
    ],
)
def test_a_step_is_not_learnt_from_in_parts_where_that_is_another_update(changes, said):
    with pytest.raises(Refusal, match=said):
        config_of(**changes)


def test_a_cold_start_has_no_parts():
    cold, run = config_of(pools=APART, cold_start=ColdStart(steps=1)).phases
    assert (cold.rollout.stream_parts, run.rollout.stream_parts) == (1, PARTS)
