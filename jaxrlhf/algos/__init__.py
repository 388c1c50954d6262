"""RL algorithms as pure array functions: no model, no device, no I/O.

Controllers compute advantages and per-token weights from scores; trainers call the objectives. Functions take numpy or
JAX arrays, also inside `jit`.
"""

from jaxrlhf.algos.advantages import (
    Targets,
    best_of_group,
    discounted_returns,
    gae,
    greedy_relative,
    group_policy_gradient,
    group_relative,
    has_spread,
    length_adaptive_lambda,
    length_weighted,
    rloo,
    to_tokens,
)
from jaxrlhf.algos.constrained import lagrangian_advantage, next_multiplier
from jaxrlhf.algos.implicit_prm import leave_one_out_rewards, normalized_rewards, outcome_objective, process_returns
from jaxrlhf.algos.importance_sampling import ImportanceWeights, rollout_correction, sampler_gap
from jaxrlhf.algos.kl import adaptive_kl_coefficient, kl_estimate
from jaxrlhf.algos.losses import (
    PolicyTerms,
    PolicyTokens,
    cispo_loss,
    clipped_policy_loss,
    clipped_value_loss,
    dppo_loss,
    dro_loss,
    gmpo_loss,
    gspo_loss,
    sapo_loss,
)
from jaxrlhf.algos.masked import (
    masked_mean,
    masked_sum,
    masked_var,
    segment_mean,
    segment_sum,
    selected,
    whiten,
)
from jaxrlhf.algos.objectives import (
    ObjectiveTerms,
    TokenOutput,
    imitating_objective,
    mixed_objective,
    nll_objective,
    policy_objective,
    value_objective,
)
from jaxrlhf.algos.pair_objective import AnswerSums, PairRewards, PairSettings, answer_sums, pair_objective
from jaxrlhf.algos.preference import (
    best_and_worst,
    bradley_terry,
    dpo,
    ipo,
    kto,
    nll_per_token,
    odds_ratio,
    pair_cost,
    simpo,
)
from jaxrlhf.algos.process_labels import solution_score
from jaxrlhf.algos.shaping import overlong_penalty, token_rewards
from jaxrlhf.algos.turns import EpisodeTurns, turn_counts, turn_gae
from jaxrlhf.algos.weights import token_weights
