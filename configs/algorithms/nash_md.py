"""Nash-MD: a policy learns to be preferred to a mixture of itself and the reference, on arithmetic word problems.

    python -m jaxrlhf.train --config nash_md.py

The engine samples one opponent for each problem from both models together. All other settings are those of
`grpo_arithmetic.py`.

Source: Munos et al. 2023 (Nash learning from human feedback, arXiv:2312.00886).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxrlhf.batch import Array, Params, Problem, RolloutBatch
from jaxrlhf.batching.transfer_protocol import THREE_D_ALL_MICRO_DP, worker_method
from jaxrlhf.config import Config, PolicyGradient, PolicyLoss, Refusal, RoleSpec, Sampling, Training, load
from jaxrlhf.config.algorithms.algorithm import check_whole_responses
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD, reference
from jaxrlhf.config.settings import Positive, Share
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.collect import responses
from jaxrlhf.dataflows.remax import with_beside
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, value_of
from jaxrlhf.engine.rollout_engine import PolicyWeights
from jaxrlhf.models.attention.kv_cache import empty_cache
from jaxrlhf.models.causal_lm import AnyModel, CausalLM
from jaxrlhf.models.config import LAYERS, Head, ModelConfig
from jaxrlhf.models.decoder import DecodeOutput, HiddenStates, PrefillOutput, decode, hidden_states, prefill
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.heads import table
from jaxrlhf.models.parameters import declare, init_params
from jaxrlhf.models.stack import unstack_layers
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.described import are_here
from jaxrlhf.sharding.submesh import hand_over
from jaxrlhf.workers.actor import Actor
from jaxrlhf.workers.model import ModelSetup
from jaxrlhf.workers.role_weights import copied
from jaxrlhf.workers.sampler import Sampler


@dataclass(frozen=True)
class GeometricMixture(CausalLM):
    """Model whose next-token distribution is proportional to policy^(1 - share) * reference^share.

    Its logits are (1 - share) times the policy's logits plus share times the reference's logits. One product computes
    them: both hidden states, scaled and concatenated, times both tables, concatenated. The cache has the layers of
    the policy, then the layers of the reference. Pipeline stages are not supported.

    Attributes:
      base: Configuration of both policies.
      share: Weight of the reference, from 0 to 1.
    """

    base: ModelConfig
    share: float
    name: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    num_layers: int
    num_kv_heads: int

    @classmethod
    def of(cls, base: AnyModel, share: float) -> "GeometricMixture":
        """Build the mixture of two policies.

        Raises:
          Refusal: `base` is not a dense text decoder with uncapped logits, and with keys and values in all layers.
        """
        what = None
        if not isinstance(base, ModelConfig):
            what = "is not a built-in decoder"
        elif base.final_logit_softcapping is not None:
            what = "caps its logits, so the mixture's logits are no product of both hidden states"
        elif {*base.pattern.stack_of()} != {LAYERS} or base.latent is not None:
            what = "has layers of several kinds, or latents instead of keys and values"
        elif base.experts is not None or base.vision is not None:
            what = "has experts, or reads images"
        if what is not None or not isinstance(base, ModelConfig):
            raise Refusal(f"a mixture of policies requires dense text decoders, but the model {what}")
        sizes = base.vocab_size, 2 * base.hidden_size, base.max_positions, 2 * base.num_layers, base.num_kv_heads
        return cls(base, share, "a mixture of two policies", *sizes)

    def joined(self, policy: Params, reference: Params) -> Params:
        """Return the parameters of the mixture: the arrays of both policies, and both tables concatenated."""
        whole = _side_by_side(*(table(params, self.base) for params in (policy, reference)))
        return {"policy": policy, "reference": reference, "table": whole}

    def declare(self, head: Head) -> dict[str, Any]:
        return {name: declare(self.base, head) for name in ("policy", "reference")}

    def init_params(self, head: Head, key: Any) -> Params:
        return self.joined(*(init_params(self.base, head, own) for own in jax.random.split(key)))

    def table(self, params: Params) -> Array:
        return params["table"]

    def hidden_states(self, params: Params, *rows: Any, **how: Any) -> HiddenStates:
        """Run both policies over packed rows."""
        each = [hidden_states(params[name], self.base, *rows, **how) for name in ("policy", "reference")]
        return HiddenStates(self._side_by_side(*(one.hidden_RWD for one in each)))

    def empty_cache(self, **sizes: Any) -> list[Any]:
        return [*empty_cache(self.base, **sizes), *empty_cache(self.base, **sizes)]

    def prefill(
        self,
        params: Params,
        token_PS: Array,
        length_P: Array,
        *,
        layers: list[Params] | None = None,
        chunk_tokens: int | None = None,
        execution: Execution = ONE_DEVICE,
    ) -> PrefillOutput:
        assert layers is None, "a mixture does not support unstacked layers here"
        prompts, how = (token_PS, length_P), {"chunk_tokens": chunk_tokens, "execution": execution}
        policy, reference = (prefill(params[name], self.base, *prompts, **how) for name in ("policy", "reference"))
        prefix = jax.tree.map(lambda *layers: jnp.concatenate(layers), policy.prefix, reference.prefix)
        return PrefillOutput(self._side_by_side(policy.hidden_PD, reference.hidden_PD), prefix)

    def unstack_layers(self, params: Params, *, execution: Execution = ONE_DEVICE) -> list[Params]:
        names = ("policy", "reference")
        return [layer for name in names for layer in unstack_layers(params[name], self.base, execution=execution)]

    def decode(
        self,
        layers: list[Params],
        params: Params,
        token_B: Array,
        position_B: Array,
        cache: Any,
        *,
        execution: Execution = ONE_DEVICE,
    ) -> DecodeOutput:
        half, slots = self.base.num_layers, (token_B, position_B)
        policy, reference = (
            decode(layers[own], params[name], self.base, *slots, cache[own], execution=execution)
            for name, own in (("policy", slice(half)), ("reference", slice(half, None)))
        )
        hidden_BD = self._side_by_side(policy.hidden_BD, reference.hidden_BD)
        return DecodeOutput(hidden_BD, [*policy.cache, *reference.cache])

    def _side_by_side(self, policy_D: Array, reference_D: Array) -> Array:
        scales = ((1 - self.share) / self.base.logits_scaling, self.share / self.base.logits_scaling)
        return jnp.concatenate([scales[0] * policy_D, scales[1] * reference_D], axis=-1)


@jax.jit
def _side_by_side(policy_VD: Array, reference_VD: Array) -> Array:
    return jnp.concatenate([policy_VD, reference_VD], axis=1)


@dataclass(frozen=True, kw_only=True)
class MixtureSampler(Sampler):
    """Sampler of a mixture of the policy and the reference; its `config` is the mixture's.

    Attributes:
      reference: Weights of the reference in the generation layout, over the whole mesh.
    """

    reference: Params

    def load(self, weights: Any, version: int, *, donated: Any) -> None:
        """Set the engine's weights from the policy's weights, given as in `Sampler.load`; no weights are deleted."""
        assert isinstance(self.config, GeometricMixture)
        policy, reference = (hand_over(tree, self.submesh) for tree in (weights["parameters"], self.reference))
        self.engine.update_weights(PolicyWeights(self.config, self.config.joined(policy, reference), version))


class MixtureActor(Actor):
    """Actor that also samples from a mixture of its policy and the reference, the policy that it started from."""

    def __init__(
        self, setup: ModelSetup, params: Params, *, sampler: Sampler | None, hybrid: HybridEngine | None, **how: Any
    ) -> None:
        self._reference: Params | None = None
        if hybrid is not None and are_here(list(setup.mesh.devices.flat)):
            # Before the actor takes over the parameters.
            self._reference = copied(params, hybrid.generation_shapes["parameters"])
        self._opponents: MixtureSampler | None = None
        super().__init__(setup, params, sampler=sampler, hybrid=hybrid, **how)

    @worker_method(THREE_D_ALL_MICRO_DP, part="generate")
    def generate_opponents(
        self, problems: Sequence[Problem], sampling: Sampling, *, share: float, seed: int
    ) -> RolloutBatch:
        """Sample one response to each problem from the mixture of the current policy and the reference.

        Args:
          share: Share of the reference in the mixture.
          seed: Sampling seed. Seed and problem id determine a response, so use another seed than `generate_sequences`:
            the same seed would use the same random numbers.
        """
        with self._mixing(share, prompts=len(problems)) as sampler:
            return sampler.generate(problems, sampling, responses_per_prompt=1, seed=seed)

    @contextmanager
    def _mixing(self, share: float, *, prompts: int) -> Iterator[Sampler]:
        """Load the current mixture into a separate engine within the block, and yield the sampler of this engine."""
        policy = self._sampler
        assert policy is not None and policy.new_engine is not None and self._reference is not None
        if self._opponents is None:
            mixture = GeometricMixture.of(self.config, share)
            part = policy.submesh.size / policy.mesh.size  # of the problems, which this process has
            engine = policy.new_engine(mixture, math.ceil(prompts / part))
            settings = {**vars(policy), "config": mixture, "engine": engine, "most_kept": 0}
            self._opponents = MixtureSampler(**settings, reference=self._reference)
        self._sampler = self._opponents
        try:
            with self.generating() as sampler:
                yield sampler
        finally:
            self._sampler = policy


def preferred(
    score_B: Float[Array, "B"], other_B: Float[Array, "B"], *, how: Literal["bradley-terry", "higher"]
) -> Float[np.ndarray, "B"]:
    """Compute the probability that a response is preferred to another, from their scores.

    `bradley-terry` is sigmoid(score - other); `higher` is 1 for the higher score, and a half for equal ones.
    """
    ahead_B = np.asarray(score_B, np.float64) - np.asarray(other_B, np.float64)
    chance_B = (1 + np.tanh(ahead_B / 2)) / 2 if how == "bradley-terry" else (1 + np.sign(ahead_B)) / 2
    return chance_B.astype(np.float32)


def nash_advantage(
    preferred_B: Float[Array, "B"], log_ratio_B: Float[Array, "B"], *, beta: float
) -> Float[np.ndarray, "B"]:
    """Compute the advantage of a response in Nash-MD's policy gradient.

        A = P(y > y') - 1 / 2 - beta * log(pi(y) / pi_ref(y))

    Args:
      preferred_B: Probability that the response is preferred to a response y' of the mixture.
      log_ratio_B: log pi - log pi_ref of each response, summed over its tokens.
      beta: The paper's tau.

    Source: Munos et al. 2023 (arXiv:2312.00886), section 7, the gradient of Nash-MD-PG.
    """
    return np.asarray(preferred_B) - np.float32(0.5) - np.float32(beta) * np.asarray(log_ratio_B)


def collect(roles: Roles, work: StepInput["NashMD"]) -> ScoredRollout:
    """Sample responses, and with another seed one opponent response per problem from the mixture, as `beside`."""
    sampled = responses(roles, work)
    seed = int(np.random.SeedSequence([work.seed, 1]).generate_state(1)[0] >> 1)
    actor: Any = roles.actor  # the algorithm's roles say that it is a `MixtureActor`
    how = {"share": work.settings.mixture, "seed": seed}
    rollout = actor.generate_opponents(sampled.problems, work.config.rollout.sampling, **how)
    scores = roles.reward.compute_reward(sampled.problems, rollout)
    return replace(sampled, beside=ScoredRollout(sampled.problems, rollout, scores))


def learn(roles: Roles, work: StepInput["NashMD"], batch: ScoredRollout) -> StepResult:
    """Learn by Nash-MD: probability of being preferred, minus 1/2, minus beta times the log-ratio to the reference."""
    settings, copies = work.settings, work.config.rollout.responses_per_prompt
    opponents = batch.beside  # None when programs are lowered
    metrics: Metrics = {}

    def advantage(returns: grpo.Returns) -> Array:
        assert returns.log_ratio_BT is not None, "NashMD has a reference"
        theirs_B, known_B = returns.score_B, np.asarray(returns.scorable_B)
        if opponents is not None:
            theirs = value_of(opponents.scores)
            theirs_B, found_B = np.repeat(theirs.score_B, copies), np.repeat(theirs.scorable_B, copies)
            known_B = known_B & found_B
        chance_B = preferred(returns.score_B, theirs_B, how=settings.preference)
        metrics["nash/preferred"] = float(np.mean(chance_B, where=known_B)) if known_B.any() else float("nan")
        log_ratio_B = np.asarray(returns.log_ratio_BT).sum(axis=1)
        return np.where(known_B, nash_advantage(chance_B, log_ratio_B, beta=settings.beta), 0)

    result = grpo.learn(roles, work, batch, advantage)
    if opponents is None:
        return result
    return with_beside(replace(result, metrics=result.metrics | metrics), "score/opponents", opponents)


@dataclass(frozen=True)
class NashMD(PolicyGradient):
    """Nash learning from human feedback by mirror descent.

    Each response of the policy is compared with an opponent, sampled token by token from a geometric mixture of the
    policy and the reference. The policy maximizes the probability of being preferred, minus 1/2. `beta` keeps it near
    the reference, so `kl` must be None. The mixture generates on the actor's devices, which hold a copy of the
    reference's weights in addition to the policy's.

    Attributes:
      beta: Weight of the log-ratio to the reference (tau in the paper).
      mixture: Share of the reference in the mixture (beta in the paper); at 0 the policy plays against itself.
      preference: Probability that a response is preferred, from both scores: `bradley-terry` is a sigmoid of the
        difference; `higher` is 1 for the higher score and 1/2 for equal scores.
      policy: Policy loss; token losses are summed over a response, so `aggregation` must be `seq-mean-token-sum`.
    """

    collect = collect
    learn = learn
    takes_several_sequences: ClassVar[bool] = False
    also_generates: ClassVar[str | None] = "the mixture's answers and weights"

    beta: Positive[float] = 0.1
    mixture: Share[float] = 0.125
    preference: Literal["bradley-terry", "higher"] = "bradley-terry"
    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(aggregation="seq-mean-token-sum"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_responses(self)

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (RoleSpec("actor", MixtureActor, training=training), reference(), REWARD)

    def check(self, config: Config) -> None:
        rollout = config.rollout
        unsupported = {
            "environment": config.environment is not None,
            "actor.lora": config.actor.lora is not None,
            "actor.layout.generation_stage": config.actor.layout.generation_stage > 1,
            "rollout.quantize": rollout.quantize is not None,
            "rollout.server": rollout.server is not None,
            "rollout.staleness": rollout.staleness > 0,
            "a pool for 'rollout'": config.generates_apart,
            "placement='auto'": config.placement == "auto",
        }
        given = [name for name, is_given in unsupported.items() if is_given]
        require(
            not given,
            "NashMD samples from a mixture of policy and reference, on the actor's devices and with whole weights; "
            f"remove {', '.join(given)}",
        )


def get_config() -> Config:
    """Return the configuration of the run."""
    algorithm = NashMD(responses_per_update=256, beta=0.01, preference="higher")
    return replace(load("grpo_arithmetic"), name="nash_md", algorithm=algorithm)
