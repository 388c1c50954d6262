"""Every algorithm's step on what has gone wrong elsewhere: holes, order, poison, silence, no spread."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from made_steps import Made, done, problem, rollout_of

from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import (
    DAPO,
    GPG,
    GRPO,
    OPO,
    PPO,
    RLOO,
    VAPO,
    Arithmetic,
    Config,
    Distillation,
    DrGRPO,
    FromScratch,
    GRPOPassK,
    KLInLoss,
    KLInReward,
    OnlineDPO,
    Pretrained,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    Rollout,
    function_of,
    load_module,
)
from jaxrlhf.dataflows.step import StepInput, StepResult

PROMPTS, COPIES, WIDTH = 2, 3, 12
IDS = np.repeat(np.arange(PROMPTS), COPIES)
LENGTHS = np.array([3, 1, 5, 2, 4, 3])
SCORES = np.array([1.0, 0.0, 0.5, 0.0, 0.0, 1.0])
COMPACT = [np.arange(2, 2 + length) for length in LENGTHS]
"""Columns of the chosen tokens of each response."""

GROUPED = {  # GSPO and others that differ from GRPO in the loss alone have its step
    "GRPO": GRPO(),
    "GRPO with a KL in the loss": GRPO(kl=KLInLoss(coefficient=0.1)),
    "DrGRPO": DrGRPO(),
    "DAPO": DAPO(),
    "RLOO": RLOO(),
    "OPO": OPO(),
    "GPG": GPG(),
    "GRPOPassK": GRPOPassK(),
    "MaxRL": load_module("maxrl").MaxRL(),
    "OnlineDPO": OnlineDPO(),
    "OptimalTokenBaseline": load_module("otb").OptimalTokenBaseline(),
    "ReinforcePlusPlusBaseline": ReinforcePlusPlusBaseline(),
    "KLCov": load_module("kl_cov").KLCov(share=0.1),
}
ALGORITHMS = {
    **GROUPED,
    "PPO": PPO(gamma=0.9, lam=0.7, kl=KLInReward(coefficient=0.1)),
    "VAPO": VAPO(gamma=0.9, critic_warmup_steps=0),
    "ReinforcePlusPlus": ReinforcePlusPlus(gamma=0.9),
    "ReMax": ReMax(),
    "Distillation": Distillation(reference_model=Pretrained("nowhere")),
}
EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


@dataclass
class Trained:
    """Training data of a step, row by row of the batch that was generated.

    Attributes:
      policy: Minibatch of the actor.
      value: Minibatch of the critic; None without one.
    """

    result: StepResult
    policy: Experience
    value: Experience | None

    def chosen(self, row: int, columns: np.ndarray) -> dict[str, np.ndarray]:
        """Numbers of a response's tokens in the two minibatches."""
        found = {}
        for name, batch in (("policy", self.policy), ("value", self.value)):
            if batch is None:
                continue
            place = int(np.flatnonzero(batch.sequences.token_BT[:, 0] == row)[0])
            arrays = {"weight": batch.weight_BT, "mask": batch.sequences.mask_BT, **batch.fields}
            found |= {f"{name}/{key}": np.asarray(array)[place, columns] for key, array in arrays.items()}
        return found


@dataclass
class Roles(Made):
    """A critic and a reference beside actor and reward; `outside` is what they say of tokens nobody chose."""

    outside: float = 0.0
    values: list[Experience] = field(default_factory=list)

    def said(self, rollout, seed: int) -> np.ndarray:
        """A number for each token, that depends on its response and its place among the chosen ones."""
        sequences = rollout.result().sequences
        mask_BT, row_B = np.asarray(sequences.mask_BT), np.asarray(sequences.token_BT)[:, 0]
        said_BT = np.full(mask_BT.shape, self.outside, np.float32)
        for row, (mask_T, number) in enumerate(zip(mask_BT, row_B, strict=True)):
            draw = np.random.default_rng([seed, number]).normal(-2.0, 0.5, size=WIDTH)
            said_BT[row, mask_T] = draw[: mask_T.sum()]
        return said_BT

    def compute_log_prob(self, rollout, *, temperature=None):
        return done(self.said(rollout, 0 if temperature is None else 3))

    def compute_ref_log_prob(self, rollout):
        return done(self.said(rollout, 1))

    def compute_values(self, rollout):
        return done(self.said(rollout, 2))

    def update_critic(self, minibatches, *, objective, settings):
        self.values += minibatches
        return done({})


def trained(algorithm, columns=COMPACT, scores=SCORES, order=None, outside=0.0) -> Trained:
    """One step on responses whose chosen tokens are in these columns, in one update over all of them.

    Args:
      order: Order of the rows, prompt-major by itself.
      outside: Numbers of sampler, trainer, reference and critic for tokens that nobody chose.
    """
    order = np.arange(len(IDS)) if order is None else order

    def generate(problems, copies):
        rows = order if copies == COPIES else np.arange(0, len(IDS), COPIES)  # or the greedy responses of ReMax
        mask_BT = np.stack([np.isin(np.arange(WIDTH), columns[row]) for row in rows])
        rollout = rollout_of(mask_BT, IDS[rows])
        rollout.sequences.token_BT[:] = np.asarray(rows)[:, None]
        return replace(rollout, sampler_logp_BT=np.where(mask_BT, roles.said(done(rollout), 0), outside))

    def score(rollout):
        rows = rollout.sequences.token_BT[:, 0]
        return [0.3, 0.8] if len(rows) == PROMPTS else np.asarray(scores)[rows]

    roles = Roles(generate, score, outside=outside)
    config = Config(
        name="traps",
        algorithm=replace(algorithm, responses_per_update=len(IDS)),
        steps=1,
        model=FromScratch(),
        data=Arithmetic(),
        rollout=Rollout(prompts_per_step=PROMPTS, responses_per_prompt=COPIES, max_response_tokens=WIDTH),
    )
    settings = config.algorithm
    work = StepInput(config, [problem(n) for n in range(PROMPTS)], 0, settings.initial_state(), lambda: [])
    every = SimpleNamespace(actor=roles, reward=roles, reference=roles, critic=roles)
    collected = function_of(settings, "collect")(every, work)
    result = function_of(settings, "learn")(every, work, collected)
    [policy] = roles.minibatches
    return Trained(result, policy, roles.values[0] if roles.values else None)


def assert_same(one: Trained, columns, other: Trained, others) -> None:
    """Every chosen token is trained on in the same way in both."""
    for row in range(len(IDS)):
        mine, theirs = one.chosen(row, columns[row]), other.chosen(row, others[row])
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=2e-5, atol=2e-6, err_msg=name)
    assert any(one.chosen(row, columns[row])["policy/advantage"].any() for row in range(len(IDS)))


@EVERY
def test_what_a_tool_said_between_two_turns_changes_nothing(algorithm):
    # The second token and those after it come three places later; the fourth and after it two more.
    places = np.array([2, 6, 7, 10, 11])
    holes = [places[:length] for length in LENGTHS]
    assert_same(trained(algorithm), COMPACT, trained(algorithm, holes, outside=7.0), holes)


@EVERY
def test_log_probabilities_of_tokens_nobody_chose_reach_nothing(algorithm):
    clean, poisoned = trained(algorithm), trained(algorithm, outside=np.nan)
    assert_same(clean, COMPACT, poisoned, COMPACT)
    for batch in (poisoned.policy, poisoned.value):
        assert batch is None or np.isfinite(batch.weight_BT).all()
    assert np.isfinite(poisoned.policy.fields["advantage"]).all()
    assert poisoned.result.metrics == pytest.approx(clean.result.metrics, rel=1e-6)


# DAPO and ReMax pair rows with what they generated themselves, problem by problem.
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("DAPO", "ReMax")])
def test_the_responses_to_one_prompt_may_lie_anywhere_in_the_batch(name):
    order = np.array([4, 0, 5, 2, 3, 1])
    assert_same(trained(ALGORITHMS[name]), COMPACT, trained(ALGORITHMS[name], order=order), COMPACT)


@EVERY
def test_a_response_without_a_chosen_token_trains_nothing_and_breaks_nothing(algorithm):
    columns = [np.arange(0) if row == 4 else COMPACT[row] for row in range(len(IDS))]
    step = trained(algorithm, columns)
    for batch in (step.policy, step.value):
        if batch is None:
            continue
        [place] = np.flatnonzero(batch.sequences.token_BT[:, 0] == 4)
        assert not np.asarray(batch.weight_BT)[place].any()
        assert np.isfinite(batch.weight_BT).all() and np.asarray(batch.weight_BT).any()
        assert all(np.isfinite(array).all() for array in batch.fields.values())
    assert all(np.isfinite(value) for value in step.result.metrics.values())


@EVERY
def test_a_response_that_nothing_could_score_trains_nothing_but_what_needs_no_score(algorithm):
    step = trained(algorithm, scores=[1.0, np.nan, 0.5, 0.0, 0.0, 1.0])
    trains = isinstance(algorithm, Distillation)
    for name, value in step.chosen(1, COMPACT[1]).items():
        assert np.isfinite(value).all()
        assert trains or not value.any() or "logp" in name or "old_value" in name or "returns" in name, name
    assert step.chosen(0, COMPACT[0])["policy/weight"].any()
    assert step.result.metrics["reward/unscorable"] == 1


@pytest.mark.parametrize("name", [name for name in GROUPED if name != "DAPO"])  # which draws others in their place
def test_groups_whose_responses_all_score_the_same_teach_nothing(name):
    step = trained(replace(GROUPED[name], kl=None), scores=[0.7, 0.7, 0.7, 0.1, 0.1, 0.1])
    np.testing.assert_array_equal(step.policy.fields["advantage"], 0)
    assert step.result.metrics["group/flat_fraction"] == 1
