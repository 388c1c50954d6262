"""Placement problem of a configuration: roles and their passes, workload, fixed layouts and pools, and notes."""

import ast
import importlib
import inspect
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from types import FunctionType

import pytest
from made_plans import a_config, machines
from tiny_runs import write_policy

from jaxrlhf.config import (
    DAPO,
    GRPO,
    PPO,
    SFT,
    Algorithm,
    ArithmeticReward,
    ColdStart,
    FormatReward,
    Gsm8k,
    KLInLoss,
    KLInReward,
    Layout,
    ModelReward,
    Pool,
    Pretrained,
    Ptx,
    RayCluster,
    ReMax,
    Rewards,
    Rollout,
    SafeRLHF,
    Training,
)
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, reference
from jaxrlhf.planner.hardware import hardware_of
from jaxrlhf.planner.problem import SCORED_TOKENS, Lengths, question_of
from jaxrlhf.planner.workload import Software, Workload
from jaxrlhf.workers.score_model import ScoreModel

FUNCTIONS = Rewards((ArithmeticReward(),))
FOLLOWED = ("learn", "actor_critic", "respond", "generate_and_score", "score")


def roles(config, **arguments):
    return {role.name: role for role in question_of(config, machines(), vocabulary=100, **arguments).problem.roles}


def verbs_called(algorithm: type[Algorithm]) -> Counter:
    """Count the calls of each method of each role in the source of an algorithm's step."""
    found, seen = Counter(), set()
    for given in (algorithm.collect, algorithm.learn):
        module, name = given.split(":")
        found += verbs_of(getattr(importlib.import_module(module), name), seen)
    return found


def verbs_of(function: FunctionType, seen: set[FunctionType]) -> Counter:
    """Count the calls of a function and of the functions that it calls, each function once."""
    if function in seen:
        return Counter()
    seen.add(function)
    calls = [node.func for node in ast.walk(ast.parse(inspect.getsource(function))) if isinstance(node, ast.Call)]
    found = Counter()
    for call in calls:
        owner = getattr(call, "value", None)
        if isinstance(owner, ast.Attribute) and getattr(owner.value, "id", None) == "roles":
            found[owner.attr, call.attr.partition("_")[0]] += 1
        passes = {"old_log_prob": "actor", "ref_log_prob": "reference"}  # functions that call a role
        if isinstance(call, ast.Name) and call.id in passes:
            found[passes[call.id], "compute"] += 1
        if isinstance(call, ast.Name) and call.id in FOLLOWED:
            found += verbs_of(function.__globals__[call.id], seen)
    return found


# Roles.


@pytest.mark.parametrize(
    "algorithm",
    [PPO(old_logp="trainer", kl=KLInReward()), GRPO(old_logp="trainer", kl=KLInLoss()), SFT()],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_role_does_what_the_step_function_calls(algorithm):
    called = verbs_called(type(algorithm))
    planned = roles(a_config(algorithm=algorithm, data=Gsm8k()))
    assert called["actor", "update"] == 1, "the source is read as it is written"
    for name, role in planned.items():
        if name == "reward" and isinstance(algorithm, SFT):
            assert role.passes == 0  # only evaluations call it
            continue
        assert role.passes == called[name, "compute"]
        assert role.trained == (called[name, "update"] > 0)
        assert role.generates == (called[name, "generate"] > 0)
    assert {name for name, _ in called} - {"reward"} == planned.keys() - {"reward"}


@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_an_actor_whose_sampler_serves_makes_no_pass(algorithm):
    responses = 32 * 4
    for settings, passes in [
        ({"responses_per_update": responses}, 0),
        ({"responses_per_update": responses, "old_logp": "trainer"}, 1),
        ({"responses_per_update": responses, "kl": KLInReward()}, 1),
        ({"responses_per_update": responses, "kl": KLInReward(), "old_logp": "sampler"}, 0),
        ({"responses_per_update": responses // 2}, 1),
    ]:
        found = roles(a_config(algorithm=algorithm(**settings)))
        assert found["actor"].passes == passes
        assert ("reference" in found) == ("kl" in settings)
        assert "reference" not in found or found["reference"].passes == 1


def test_the_roles_of_ppo():
    config = a_config(actor=Training(tokens_per_microbatch=4096, remat="none"))
    actor, critic, reference, reward = roles(config).values()
    assert (actor.name, critic.name, reference.name, reward.name) == ("actor", "critic", "reference", "reward")
    assert [role.head for role in (actor, critic, reference, reward)] == ["lm", "value", "lm", "score"]
    assert [role.tokens_per_microbatch for role in (actor, critic, reference)] == [4096, 8192, 4096]
    assert [role.remat for role in (actor, critic, reference)] == [False, None, False]
    full = a_config(actor=Training(remat="full"), algorithm=PPO(responses_per_update=32))
    assert roles(full)["actor"].remat is True
    assert [role.within_machine for role in (actor, critic, reference, reward)] == [False, False, False, True]
    assert actor.model == critic.model == reference.model
    assert (reward.model.num_layers, reward.model.hidden_size) == (24, 896)  # Qwen2.5-0.5B's config.json


def test_reward_models_are_batched_as_their_worker_does():
    default = inspect.signature(ScoreModel).parameters["tokens_per_batch"].default
    assert roles(a_config())["reward"].tokens_per_microbatch == default == SCORED_TOKENS


def test_a_critic_may_have_a_model_of_its_own():
    config = a_config(
        algorithm=PPO(responses_per_update=32, kl=KLInReward(), critic_model=Pretrained("Qwen/Qwen2.5-7B"))
    )
    found = roles(config)
    assert found["critic"].model.hidden_size == 3584
    assert found["actor"].model.hidden_size == found["reference"].model.hidden_size == 128


def test_reward_models_share_a_pool_and_functions_are_no_role():
    judges = (ArithmeticReward(), ModelReward("Qwen/Qwen2.5-0.5B"), ModelReward("Qwen/Qwen3-0.6B"))
    problem = question_of(a_config(rewards=Rewards(judges)), machines(), vocabulary=100).problem
    assert [role.name for role in problem.roles][3:] == ["reward_1", "reward_2"]
    assert [role.model.num_layers for role in problem.roles[3:]] == [24, 28]
    assert problem.together == (("reward_1", "reward_2"),)
    assert problem.offloads[-1] == ("actor", "critic", "reference", "reward_1", "reward_2")
    assert [*roles(a_config(rewards=FUNCTIONS))] == ["actor", "critic", "reference"]
    assert question_of(a_config(), machines(), vocabulary=100).problem.together == ()


@dataclass(frozen=True)
class Debate(PPO):
    """Algorithm of a user, with a second trained role and a second frozen role."""

    opponent: Training = field(default_factory=lambda: Training(tokens_per_microbatch=2048))
    opponent_model: Pretrained = field(default_factory=lambda: Pretrained("Qwen/Qwen3-4B"))

    def roles(self, training):
        opponent = RoleSpec("opponent", "somewhere:Opponent", training=self.opponent, model=self.opponent_model)
        return (actor(training), opponent, RoleSpec("audience", "somewhere:Audience"), REWARD)


@dataclass(frozen=True)
class Preferences(SFT):
    """Algorithm that updates on given answers, with a frozen role."""

    def roles(self, training):
        return (actor(training), reference())


def test_roles_of_algorithms_to_come():
    found = roles(a_config(algorithm=Debate(responses_per_update=32), rewards=FUNCTIONS))
    opponent, audience = found["opponent"], found["audience"]
    assert (opponent.head, opponent.trained, opponent.passes) == ("lm", True, 1)
    assert opponent.tokens_per_microbatch == 2048
    assert opponent.model.hidden_size == 2560
    assert (audience.head, audience.trained, audience.passes, audience.generates) == ("lm", False, 1, False)
    found = roles(a_config(algorithm=Preferences(), rewards=FUNCTIONS))
    assert (found["actor"].generates, found["actor"].passes, found["reference"].passes) == (False, 0, 1)


# Models.


def test_a_vocabulary_from_scratch_is_rounded_to_64():
    assert roles(a_config(), lengths=None)["actor"].model.vocab_size == 128  # of 100 tokens
    own = question_of(a_config(), machines()).problem.roles[0].model.vocab_size
    from jaxrlhf.data.tokenizer import embedded_tokenizer

    assert own - 64 < len(embedded_tokenizer()) <= own
    assert own % 64 == 0


def test_a_local_checkpoint_has_the_shape_of_its_config(tmp_path):
    model = write_policy(tmp_path / "model")
    actor = question_of(a_config(model=Pretrained(str(model))), machines()).problem.roles[0]
    assert actor.model.num_layers == 2
    # A model from scratch has the vocabulary of its tokenizer, rounded up as in the checkpoint.
    scratch = question_of(a_config(tokenizer=str(model)), machines()).problem.roles[0]
    assert scratch.model.vocab_size == actor.model.vocab_size


# Workload and software.


def test_the_workload_of_a_step():
    problem = question_of(a_config(), machines(), vocabulary=100).problem
    # 32 prompts x 4 responses in updates of 32, twice over; 100 + 300 tokens at most.
    assert problem.workload == Workload(32, 128, 100.0, 300.0, 400, updates=8, epochs=2, longest_prompt_tokens=100)
    means = question_of(a_config(), machines(), lengths=Lengths(50, 120.5), vocabulary=100).problem.workload
    assert means == replace(problem.workload, prompt_tokens=50.0, response_tokens=120.5)
    slots = a_config(rollout=Rollout(prompts_per_step=32, slots=16))
    assert question_of(slots, machines(), vocabulary=100).problem.workload.slots == 16


def test_supervised_training_has_one_update_of_its_examples():
    config = a_config(algorithm=SFT(examples_per_update=48))
    expected = Workload(48, 48, 100.0, 300.0, 400, longest_prompt_tokens=100)
    assert question_of(config, machines(), vocabulary=100).problem.workload == expected


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((101, None), "a mean of 101 prompt_tokens is above rollout.max_prompt_tokens=100; lower the mean"),
        ((None, None, 0.5), "accepted=0.5 counts drafts, but rollout.speculation=None"),
        ((None, None, 1.5), "accepted=1.5 is no share"),
        ((None, 301), "a mean of 301 response_tokens is above rollout.max_response_tokens=300"),
        ((0, None), "the mean prompt_tokens must be above 0 and finite, got 0"),
        ((math.inf, None), "the mean prompt_tokens must be above 0 and finite, got inf"),
    ],
)
def test_means_that_cannot_be_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        question_of(a_config(), machines(), lengths=Lengths(*lengths), vocabulary=100)


@pytest.mark.parametrize(
    ("dtype", "shared", "compute_bytes"),
    [("auto", False, 2), ("auto", True, 4), ("float32", False, 4), ("bfloat16", True, 2)],
)
def test_masters_are_float32_and_activations_what_the_configuration_says(dtype, shared, compute_bytes):
    problem = question_of(a_config(compute_dtype=dtype), machines(shared_compute=shared), vocabulary=100).problem
    expected = Software(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, compute_bytes=compute_bytes)
    assert problem.software == expected


def test_a_cache_lies_in_pages_where_a_run_would_have_it_so():
    def pages(spec, path="Qwen/Qwen2.5-7B", **rollout):
        config = a_config(model=Pretrained(path), rollout=Rollout(prompts_per_step=32, **rollout))
        return question_of(config, hardware_of(config, spec)).problem.software.pages

    assert pages("h200") and pages("v5p-8") and not pages("cpu")
    assert not pages("h200", cache="slots") and pages("cpu", cache="pages")
    assert not pages("h200", "deepseek-ai/DeepSeek-V2-Lite"), "latents do not lie in pages"


# What is given.


def test_nothing_given_is_all_searched():
    problem = question_of(a_config(), machines(), vocabulary=100).problem
    assert problem.offloads == (
        (),
        ("actor.optimizer", "critic.optimizer"),
        ("actor", "critic", "reference", "reward"),
    )
    assert (problem.layouts, problem.pools) == (None, None)


def test_layouts_and_offload_that_are_given_are_kept():
    actor, judge = Layout(tensor=2, generation_tensor=2), ModelReward("Qwen/Qwen2.5-0.5B", layout=Layout(fsdp=2))
    given = {"actor": Training(layout=actor), "rewards": Rewards((judge,)), "offload": ("reward", "actor.optimizer")}
    problem = question_of(a_config(**given), machines(), vocabulary=100).problem
    # A reference without a layout has the training part of the actor's layout.
    kept = {"actor": (actor,), "reference": (Layout(tensor=2),), "reward": (Layout(fsdp=2),)}
    assert problem.layouts == kept
    assert problem.offloads == (("reward", "actor.optimizer"),)
    problem = question_of(a_config(**given, reference_layout=Layout()), machines(), vocabulary=100).problem
    assert problem.layouts == kept | {"reference": (Layout(),)}


def test_pools_that_are_given_are_costed_as_they_are():
    judges = Rewards((ModelReward("Qwen/Qwen2.5-0.5B"), ModelReward("Qwen/Qwen3-0.6B")))
    pools = (Pool("a", 4, ("actor", "reference")), Pool("b", 2, ("critic",)), Pool("c", 1, ("rollout",)))
    problem = question_of(a_config(pools=pools, rewards=judges), machines(), vocabulary=100).problem
    policy = ("actor", "reference", "reward_0", "reward_1")  # reward models without a pool are on the first pool
    assert problem.pools == ((policy, 4), (("critic",), 2), (("rollout",), 1))
    assert problem.offloads == ((),)
    assert problem.layouts == dict.fromkeys(("actor", "critic", "reference", "reward_0", "reward_1"), (Layout(),))
    apart = (Pool("a", 4, ("actor", "reference", "critic")), Pool("b", 2, ("reward",)))
    assert question_of(a_config(pools=apart, rewards=judges), machines(), vocabulary=100).problem.pools == (
        (("actor", "reference", "critic"), 4),
        (("reward_0", "reward_1"), 2),
    )
    assert question_of(a_config(pools=apart, rewards=FUNCTIONS), machines(), vocabulary=100).problem.pools == (
        (("actor", "reference", "critic"), 4),
    )


# Notes.


def test_the_notes_say_what_is_an_estimate():
    cold = ColdStart(steps=1)
    question = question_of(a_config(cold_start=cold, rewards=FUNCTIONS), machines(source="a datasheet"), vocabulary=100)
    notes = "\n".join(question.notes)
    for words in (
        "a datasheet",
        "100 tokens of prompt and 300 tokens of response",
        "time of reward functions",
        "cold start",
    ):
        assert words in notes
    known = question_of(a_config(), machines(), lengths=Lengths(10, 20), vocabulary=100)
    notes = "\n".join(known.notes)
    assert "the shape of Qwen/Qwen2.5-0.5B is from built-in table" in notes
    for words in ("assumed to have maximal length", "time of reward functions", "cold start"):
        assert words not in notes


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (ReMax(), "greedy answers, evaluation and checkpoints are not counted"),
        (DAPO(), "each further round generates as many again"),
        (SafeRLHF(ptx=Ptx()), "the algorithm's own examples, evaluation and checkpoints are not counted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_the_notes_say_what_is_left_out_of_an_algorithm(algorithm, words):
    config = a_config(
        algorithm=algorithm,
        rollout=replace(a_config().rollout, prompts_per_step=8, responses_per_prompt=8),
        rewards=Rewards((ArithmeticReward(), FormatReward(weight=0.0))),
    )
    assert words in "\n".join(question_of(config, machines(), vocabulary=100).notes)
    plain = "\n".join(question_of(a_config(), machines(), vocabulary=100).notes)
    assert words not in plain and "; evaluation and checkpoints are not counted" in plain


# Hardware.


def test_the_configuration_takes_as_many_devices_as_it_says():
    assert hardware_of(a_config(), "a100x2x8").devices == 16
    assert hardware_of(a_config(devices=8), "a100x2x8").machines == 1
    part = hardware_of(a_config(devices=4), "a100x2x8")
    assert (part.machines, part.devices_per_machine) == (1, 4)
    with pytest.raises(ValueError, match="devices=32, but 2 machines of 8 x a100 have 16"):
        hardware_of(a_config(devices=32), "a100x2x8")
    with pytest.raises(ValueError, match="devices=12 is not a multiple of 8, the devices of a machine"):
        hardware_of(a_config(devices=12), "a100x2x8")


def test_devices_that_are_here_are_recognised(monkeypatch):
    here = hardware_of(a_config())
    assert (here.name, here.machines, here.devices_per_machine, here.shared_compute) == ("cpu", 1, 8, True)
    two = hardware_of(a_config(devices=2))  # two devices have the whole processor
    assert two.devices == 2
    assert two.matmul_flops_per_s * 2 == pytest.approx(here.matmul_flops_per_s * 8)
    named = hardware_of(a_config(placement="auto", hardware="h100", devices=4))
    assert (named.name, named.devices) == ("h100", 4)
    with pytest.raises(ValueError, match="devices=9, but JAX sees 8 cpu devices"):
        hardware_of(a_config(devices=9))
    with pytest.raises(ValueError, match="hardware='v4' has machines of 4 devices, but this process uses 8"):
        hardware_of(a_config(placement="auto", hardware="v4"))
    monkeypatch.setattr("jaxrlhf.planner.hardware.recognise", lambda kind, platform: None)
    with pytest.raises(ValueError, match=r"'cpu', is unknown; .*a .json file with the figures"):
        hardware_of(a_config())


def test_a_cluster_has_to_be_described():
    with pytest.raises(ValueError, match="placement='auto' with a cluster requires hardware"):
        hardware_of(a_config(placement="auto", cluster=RayCluster()))
    config = a_config(placement="auto", cluster=RayCluster(), hardware="a100x16x8", devices=32)
    assert hardware_of(config).machines == 4
