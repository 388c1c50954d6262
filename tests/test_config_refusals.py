"""Settings that mean nothing, or contradict each other, are refused with the reason."""

import math
import re
from pathlib import Path

import pytest

from jaxrlhf.config import (
    GRPO,
    PPO,
    PRIME,
    SFT,
    VAPO,
    AdaptiveKL,
    Arithmetic,
    ArithmeticReward,
    Checkpointing,
    CISPOLoss,
    ColdStart,
    Config,
    Evaluation,
    FormatReward,
    FromScratch,
    FunctionReward,
    GSPOLoss,
    IcePop,
    KLInLoss,
    KLInReward,
    Layout,
    Optimizer,
    PolicyLoss,
    PromptFile,
    Rejection,
    Rewards,
    Rollout,
    Sampling,
    SAPOLoss,
    Training,
    TruncatedImportance,
    ValueLoss,
)


def a_config(**changes) -> Config:
    settings = {"name": "test", "model": FromScratch(), "data": Arithmetic(), "algorithm": PPO(), "steps": 10}
    return Config(**{**settings, **changes})


def refused(message: str):
    return pytest.raises(ValueError, match="^" + re.escape(message))


# Each setting refuses what it cannot mean.


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: a_config(steps=0), "Config.steps must be above 0, got 0"),
        (lambda: a_config(seed=-1), "Config.seed must be 0 or more, got -1"),
        *[
            (
                lambda name=name: a_config(name=name),
                f"Config.name must be the name of a folder, without separators, got {name!r}",
            )
            for name in ("", " ", "..", "a/b", "a\\b")
        ],
        (lambda: a_config(steps="3"), "Config.steps must be int, got '3'"),
        (lambda: a_config(steps=True), "Config.steps must be int, got True"),
        (lambda: a_config(model="Qwen"), "Config.model must be FromScratch or Pretrained or Nnx, got 'Qwen'"),
        (lambda: a_config(compute_dtype="fp8"), "Config.compute_dtype must be one of 'auto', 'float32', 'bfloat16'"),
        (lambda: a_config(workdir=Path("runs")), "Config.workdir must be str or None, got"),
        (lambda: a_config(resume=1), "Config.resume must be True or False, got 1"),
        (lambda: a_config(devices=0), "Config.devices must be above 0 or None, got 0"),
        (
            lambda: a_config(rewards=Rewards(parts=[ArithmeticReward()])),
            "Config.rewards.parts must be a tuple of Gsm8kReward or",
        ),
        (
            lambda: a_config(rewards=Rewards(parts=(ArithmeticReward(weight="1"),))),
            "Config.rewards.parts.0.weight must be float, got '1'",
        ),
        (lambda: Optimizer(learning_rate=0), "Optimizer.learning_rate must be above 0, got 0"),
        (lambda: Optimizer(learning_rate="1e-3"), "Optimizer.learning_rate must be above 0, got '1e-3'"),
        (lambda: Optimizer(learning_rate=float("nan")), "Optimizer.learning_rate must be above 0, got nan"),
        (lambda: Optimizer(learning_rate=float("inf")), "Optimizer.learning_rate must be finite, got inf"),
        (lambda: Optimizer(eps=float("inf")), "Optimizer.eps must be finite, got inf"),
        (lambda: Optimizer(beta1=-0.1), "Optimizer.beta1 must be in [0.0, 1.0], got -0.1"),
        (lambda: Optimizer(beta2=1.0), "Optimizer.beta2 must be below 1, got 1"),
        (lambda: Optimizer(warmup_updates=-1), "Optimizer.warmup_updates must be 0 or more, got -1"),
        (lambda: Optimizer(weight_decay=-0.1), "Optimizer.weight_decay must be 0 or more, got -0.1"),
        (lambda: Training(tokens_per_microbatch=0), "Training.tokens_per_microbatch must be above 0, got 0"),
        (lambda: Layout(fsdp=0), "Layout.fsdp must be above 0, got 0"),
        (lambda: Layout(expert=0), "Layout.expert must be above 0, got 0"),
        (lambda: Training(router_loss=-0.1), "Training.router_loss must be 0 or more, or None, got -0.1"),
        (
            lambda: FromScratch(experts=2, experts_per_token=3),
            "FromScratch.experts_per_token=3 of experts=2; take at most all",
        ),
        (lambda: Layout(data=0), "Layout.data must be above 0 or None, got 0"),
        (lambda: Layout(generation_stage=0), "Layout.generation_stage must be above 0, got 0"),
        (
            lambda: Layout(tensor=6, generation_tensor=4).micro_tensor,
            "Layout.micro_tensor exists where training refines generation; stage=1, tensor=6 are not multiples",
        ),
        (
            lambda: Sampling(temperature=0),
            "Sampling.temperature must be above 0, got 0; for argmax decoding",
        ),
        (
            lambda: Sampling(ignore_eos=True, stop_tokens=("x", "y")),
            "Sampling.ignore_eos lets no token end a response, and stop_tokens=('x', 'y') would; give one",
        ),
        (lambda: Sampling(top_p=0), "Sampling.top_p must be in (0, 1], got 0"),
        (lambda: Sampling(top_k=-1), "Sampling.top_k must be 0 (off) or more, got -1"),
        (lambda: Sampling(min_tokens=-1), "Sampling.min_tokens must be 0 or more, got -1"),
        (lambda: Rollout(prompts_per_step=0), "Rollout.prompts_per_step must be above 0, got 0"),
        (lambda: Rollout(slots=0), "Rollout.slots must be above 0 or None, got 0"),
        (
            lambda: Rollout(max_response_tokens=8, sampling=Sampling(min_tokens=9)),
            "Sampling.min_tokens=9 is above max_response_tokens=8",
        ),
        (lambda: FromScratch(num_layers=0), "FromScratch.num_layers must be above 0, got 0"),
        (lambda: Arithmetic(difficulty=6), "Arithmetic.difficulty must be in [1, 5], got 6"),
        (lambda: Arithmetic(difficulty="2"), "Arithmetic.difficulty must be in [1, 5], got '2'"),
        (lambda: Rewards(parts=()), "Rewards.parts is empty; name at least one reward"),
        (lambda: Rewards(timeout_s=0), "Rewards.timeout_s must be above 0, got 0"),
        (lambda: Rewards(timeout_s=math.inf), "Rewards.timeout_s=inf is more than the system can wait for"),
        (lambda: FunctionReward(function="score"), "FunctionReward.function must be 'module:function' or"),
        (lambda: AdaptiveKL(horizon=0), "AdaptiveKL.horizon must be above 0, got 0"),
        (lambda: KLInReward(coefficient=0), "KLInReward.coefficient must be above 0, got 0"),
        (lambda: KLInLoss(coefficient=-1), "KLInLoss.coefficient must be above 0, got -1"),
        (lambda: PolicyLoss(entropy_coefficient=math.nan), "PolicyLoss.entropy_coefficient must be finite, got nan"),
        (lambda: SAPOLoss(entropy_coefficient=math.inf), "SAPOLoss.entropy_coefficient must be finite, got inf"),
        (lambda: PRIME(success=math.nan), "PRIME.success must be finite, got nan"),
        (lambda: VAPO(critic=Training(), success=math.inf), "VAPO.success must be finite, got inf"),
        (lambda: PolicyLoss(clip_low=0), "PolicyLoss.clip_low must be above 0, got 0"),
        (lambda: PolicyLoss(clip_low=1.1), "PolicyLoss.clip_low must be in [0.0, 1.0], got 1.1"),
        (lambda: PolicyLoss(dual_clip=1), "PolicyLoss.dual_clip must be above 1 or None, got 1"),
        (lambda: ValueLoss(clip=0), "ValueLoss.clip must be above 0, got 0"),
        (lambda: TruncatedImportance(cap=0), "TruncatedImportance.cap must be above 0, got 0"),
        (lambda: IcePop(low=1.5), "IcePop keeps ratios around 1: low <= 1 <= high must hold, got 1.5 and 5.0"),
        (lambda: Rejection(high=0), "Rejection.high must be above 0, got 0"),
        (lambda: Rejection(low=0.1), "Rejection.low must be None or at most 0, the estimate where both agree, got 0.1"),
        (
            lambda: GSPOLoss(aggregation="token-mean"),
            "GSPOLoss has one ratio per response, so each response must count once and not by its tokens: "
            "aggregation must be 'seq-mean-token-mean', got 'token-mean'",
        ),
        (lambda: GSPOLoss(clip_high=0), "GSPOLoss.clip_high must be above 0, got 0"),
        (
            lambda: CISPOLoss(ratio_high=0.5),
            "CISPOLoss bounds a ratio that starts at 1: ratio_low <= 1 <= ratio_high must hold, got 0.0 and 0.5",
        ),
        (lambda: SAPOLoss(temperature_negative=0), "SAPOLoss.temperature_negative must be above 0, got 0"),
        (lambda: PPO(gamma=1.1), "PPO.gamma must be in [0.0, 1.0], got 1.1"),
        (lambda: PPO(lam=-0.1), "PPO.lam must be in [0.0, 1.0], got -0.1"),
        (lambda: PPO(critic_warmup_steps=-1), "PPO.critic_warmup_steps must be 0 or more, got -1"),
        (lambda: GRPO(epochs_per_step=0), "GRPO.epochs_per_step must be above 0, got 0"),
        (lambda: SFT(examples_per_update=0), "SFT.examples_per_update must be above 0, got 0"),
        (lambda: ColdStart(steps=0), "ColdStart.steps must be above 0, got 0"),
        (lambda: Evaluation(every_steps=-1), "Evaluation.every_steps must be 0 or more, got -1"),
        (lambda: Evaluation(problems=0), "Evaluation.problems must be above 0, got 0"),
        (lambda: Checkpointing(keep_last=0), "Checkpointing.keep_last must be above 0, got 0"),
        (lambda: Checkpointing(keep_best=-1), "Checkpointing.keep_best must be 0 or more, got -1"),
    ],
)
def test_setting_refuses(build, message):
    with refused(message):
        build()


# Settings that contradict each other are refused together.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout": Rollout(prompts_per_step=60)},
            "algorithm.responses_per_update=64 does not divide the 60 responses of a step (60 prompts x 1); "
            "nearest that do: [20, 30, 60]",
        ),
        (
            {"algorithm": PPO(responses_per_update=32, old_logp="sampler")},
            "algorithm.old_logp='sampler' needs one update a step and no correction, and there are 2 and "
            "correction=None; choose 'auto', or raise responses_per_update to 64",
        ),
        (
            {"algorithm": PPO(epochs_per_step=3, old_logp="sampler")},
            "algorithm.old_logp='sampler' needs one update a step and no correction, and there are 3",
        ),
        (
            {"algorithm": PPO(old_logp="sampler", correction=TruncatedImportance())},
            "algorithm.old_logp='sampler' needs one update a step and no correction, and there are 1 and "
            "correction=TruncatedImportance(cap=2.0, level='token')",
        ),
        (
            {"algorithm": PPO(old_logp="sampler", rejection=(Rejection(),))},
            "algorithm.rejection goes by how far the trainer's log-probabilities are from the sampler's, and "
            "old_logp='sampler' leaves the trainer's out",
        ),
        (
            {"algorithm": PPO(old_logp="bypass", correction=IcePop())},
            "algorithm.old_logp='bypass' has the sampler's probabilities in the loss's ratio, and "
            "correction=IcePop(low=0.5, high=5.0) would count them twice",
        ),
        (
            {"algorithm": GRPO()},
            "GRPO compares the responses to one prompt: rollout.responses_per_prompt must be 2 or more, got 1",
        ),
        (
            {"actor": Training(tokens_per_microbatch=1023)},
            "actor.tokens_per_microbatch=1023 cannot hold one sequence of max_prompt_tokens + max_response_tokens = "
            "1024 tokens; raise it to at least 1024",
        ),
        (
            {"algorithm": PPO(critic=Training(tokens_per_microbatch=1023))},
            "algorithm.critic.tokens_per_microbatch=1023 cannot hold one sequence",
        ),
        (
            {"algorithm": PPO(critic_warmup_steps=10)},
            "algorithm.critic_warmup_steps=10 leaves no step of steps=10 to train the policy",
        ),
        (
            {"profile_steps": (10, 11, 0)},
            "profile_steps names [11, 0], and the run has steps 1 to 10; name some of those",
        ),
        (
            {"algorithm": SFT(), "cold_start": ColdStart(steps=3)},
            "cold_start before algorithm SFT is the same training twice",
        ),
        (
            {"algorithm": SFT(), "data": PromptFile("train.jsonl")},
            "algorithm SFT trains on worked solutions, and data.solution_key is None",
        ),
        (
            {"cold_start": ColdStart(steps=3), "data": PromptFile("train.jsonl")},
            "cold_start trains on worked solutions, and data.solution_key is None",
        ),
        (
            {"data": PromptFile("train.jsonl", answer_key=None)},
            "ArithmeticReward compares with a reference answer, and data.answer_key is None",
        ),
        *[
            (
                {"rollout": Rollout(sampling=Sampling(**{name: value}))},
                f"rollout.sampling sets {name}, and the trainer's log-probabilities are of the unfiltered policy",
            )
            for name, value in {"greedy": True, "top_p": 0.9, "top_k": 5, "min_tokens": 2}.items()
        ],
        (
            {"rewards": Rewards(parts=(FormatReward(), ArithmeticReward(weight=float("nan"))))},
            "rewards.parts.1.weight must be finite, got nan",
        ),
        (
            {"rewards": Rewards(parts=(FormatReward(weight=0), ArithmeticReward(weight=0.0)))},
            "every weight of rewards.parts is 0",
        ),
        (
            {"checkpoint": Checkpointing(every_steps=15), "evaluation": Evaluation(every_steps=10)},
            "checkpoint.every_steps=15 is no multiple of evaluation.every_steps=10, so checkpoints would have no",
        ),
    ],
)
def test_contradiction_is_refused(changes, message):
    with refused(message):
        a_config(**changes)


def test_a_file_without_answers_can_be_scored_otherwise():
    a_config(data=PromptFile("train.jsonl", answer_key=None), rewards=Rewards(parts=(FormatReward(),)))
    a_config(data=PromptFile("train.jsonl", answer_key=None, solution_key="solution"), algorithm=SFT())


def test_what_is_no_contradiction():
    sampled = Sampling(temperature=0.7, stop_tokens=("x",))
    a_config(rollout=Rollout(sampling=sampled), algorithm=PPO(policy=PolicyLoss(clip_low=1.0)))
    a_config(rollout=Rollout(sampling=Sampling(greedy=True)), algorithm=SFT())
    for saved, evaluated, best in ((20, 10, 1), (15, 10, 0), (0, 10, 1), (15, 0, 1)):
        saving = Checkpointing(every_steps=saved, keep_best=best)
        a_config(checkpoint=saving, evaluation=Evaluation(every_steps=evaluated))
