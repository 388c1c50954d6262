"""Plans as settings, Python, JSON, tables and pictures."""

import json
from dataclasses import replace

import pytest
from made_plans import a_config, a_search, machines, split, together
from rich.console import Console

from jaxrlhf.config import (
    PPO,
    ROLLOUT,
    SFT,
    Config,
    KLInReward,
    Layout,
    ModelReward,
    Pool,
    Rewards,
    Rollout,
    Training,
    override,
)
from jaxrlhf.planner.apply import planned_config, planned_settings, snippet, without_placement
from jaxrlhf.planner.picture import bars_of, draw_timeline
from jaxrlhf.planner.plan import (
    Cost,
    PlacementPlan,
    PlannedCall,
    PlannedPool,
    plan_from_json,
    plan_to_json,
    read_plan,
    save_plan,
)
from jaxrlhf.planner.report import bottleneck, critical_calls, layout_text, report, seconds_text, why_it_lost


def shown(content) -> str:
    """Return the text as printed to a wide terminal."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(content)
    return capture.get()


def supervised() -> PlacementPlan:
    """Return a plan of an actor that only trains, split over two stages and two tensor shards."""
    pool = PlannedPool(("actor",), 8, {"actor": Layout(2, 1, 2, 2)}, 1.0, "actor update")
    return PlacementPlan(
        (pool,), (), (PlannedCall("update", 0, "actor", "update", Cost(compute_s=1.0)),), {"update": 1.0}
    )


# As settings.


def test_a_plan_fills_in_a_configuration():
    config = a_config(placement="auto", hardware="a100", devices=6)
    planned = planned_config(config, split())
    assert planned == a_config(
        pools=(Pool("actor-reference", 4, ("actor", "reference")), Pool("critic-reward", 2, ("critic", "reward"))),
        actor=Training(layout=Layout(tensor=2)),
        reference_layout=Layout(fsdp=4),
        rewards=Rewards((ModelReward("Qwen/Qwen2.5-0.5B", layout=Layout(tensor=2)),)),
        offload=("actor.optimizer", "reward"),
        rollout=replace(config.rollout, slots=64),
    )
    assert planned.algorithm == config.algorithm  # the critic has the default layout


def test_one_pool_of_all_is_called_so():
    planned = planned_config(a_config(), together())
    assert planned.pools == (Pool("all", 8, ("actor", "critic", "reference", "reward")),)
    assert planned.rollout.slots is None  # None means all 128 responses


def test_generation_apart_gives_the_actor_its_generation_layout():
    policy, judging = split().pools
    layouts = {ROLLOUT: Layout(1, generation_tensor=2)}
    plan = replace(split(), pools=(policy, judging, PlannedPool((ROLLOUT,), 2, layouts, 1.0, "rollout generate")))
    planned = planned_config(a_config(), plan)
    assert planned.pools[2] == Pool("rollout", 2, ("rollout",))
    assert planned.actor.layout == Layout(tensor=2, generation_tensor=2)


def test_what_only_trains_is_evaluated_as_it_is_split():
    planned = planned_config(a_config(algorithm=SFT(), rewards=Rewards()), supervised())
    assert planned.actor.layout == Layout(stage=2, tensor=2, generation_stage=2, generation_tensor=2)
    assert planned.reference_layout is None


def test_a_budget_holds_a_sequence_for_each_data_parallel_device():
    small = Training(tokens_per_microbatch=1600)
    judged = replace(small, remat="none")
    config = a_config(actor=small, algorithm=PPO(responses_per_update=32, kl=KLInReward(), critic=judged))
    planned = planned_config(config, together())  # 8 devices, sequences of up to 100 + 300 tokens
    assert planned.actor.tokens_per_microbatch == planned.algorithm.critic.tokens_per_microbatch == 3200
    assert planned.algorithm.critic.remat == "none"
    assert planned_config(config, split()).actor.tokens_per_microbatch == 1600  # 2 x 400 fit


def test_several_reward_models_are_one_role_of_a_pool():
    judges = (ModelReward("Qwen/Qwen2.5-0.5B"), ModelReward("Qwen/Qwen3-0.6B"))
    policy, judging = split().pools
    layouts = {"critic": Layout(2), "reward_0": Layout(2), "reward_1": Layout(1, tensor=2)}
    both = replace(judging, roles=("critic", "reward_0", "reward_1"), layouts=layouts)
    plan = replace(split(), pools=(policy, both), offload=("reward_0", "reward_1.parameters"))
    planned = planned_config(a_config(rewards=Rewards(judges)), plan)
    assert planned.pools[1] == Pool("critic-reward", 2, ("critic", "reward"))
    assert [part.layout for part in planned.rewards.parts] == [Layout(), Layout(tensor=2)]
    assert planned.offload == ("reward", "reward.parameters")


def test_a_plan_of_other_roles_is_refused(refused):
    with refused():
        planned_settings(a_config(), supervised())


@pytest.mark.parametrize("plan", [split(), together()], ids=["split", "together"])
@pytest.mark.parametrize("given", [{}, {"placement": "auto", "hardware": "h100", "devices": 8}])
def test_the_python_to_paste_makes_the_planned_configuration(plan, given):
    names = {"config": a_config(**given), "Layout": Layout, "Pool": Pool, "override": override}
    exec(snippet(names["config"], plan), names)
    assert isinstance(names["config"], Config)
    assert names["config"] == planned_config(a_config(**given), plan)
    assert snippet(names["config"], plan) == ""  # no setting changes


def test_a_configuration_without_its_placement_is_the_original():
    planned = planned_config(a_config(), replace(split(), slots=None))
    assert without_placement(planned) == a_config()


# As JSON.


@pytest.mark.parametrize("plan", [split(), supervised()])
def test_a_plan_survives_json(plan):
    data = json.loads(json.dumps(plan_to_json(plan)))
    assert plan_from_json(data) == plan
    assert data["seconds"] == plan.seconds


@pytest.mark.parametrize("broken", [{}, {"pools": [{"strange": 1}]}, {"offload": 3}])
def test_what_is_no_plan_is_refused(refused, broken):
    with refused():
        plan_from_json(plan_to_json(split()) | broken if broken else {})


def test_a_plan_is_kept_with_its_hardware(refused, tmp_path):
    assert read_plan(tmp_path) is None
    save_plan(split(), machines(), tmp_path)
    saved = read_plan(tmp_path)
    assert saved.plan == split()
    roles = ("actor", "critic", "reference", "reward")
    assert saved.why_not(devices=8, roles=roles) is None  # the plan uses six of two machines of four
    assert saved.why_not(devices=6, roles=roles) == "the plan is for 8 devices, but there are 6"
    assert saved.why_not(devices=8, roles=roles[:1]) == (
        "the plan places actor, critic, reference, reward, but the run has actor"
    )
    (tmp_path / "plan.json").write_text("{")
    with refused():
        read_plan(tmp_path)


# In words.


def test_the_report_says_what_and_why():
    text = shown(report(a_search(), machines(), ("lengths are guessed",)))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "8 devices: 2 machines of 4 x made"
    # The first pool determines two stages of the split plan, the second pool the last: 10 + 3 + 8 s.
    assert "1 actor + reference 4 | actor 1-2-2 1-1 10.0 3.00 8.00 21.0 3.0 compute; actor generate" in lines
    assert "reference 1-1-1 x4" in lines
    assert "critic + reward 2 critic 1-1-2 0.5" in lines
    assert "plan 1: offloaded to host memory while not in use: actor.optimizer, reward" in lines
    assert "2 actor + critic + reference + reward 8 1-1-8 1-1 6.00 4.50 15.5 26.0 4.0 compute; actor update" in lines
    assert "generate actor switch 4 1.00 1.00" in lines
    assert "critic+reward waits 2 10.0" in lines
    assert "actor+reference waits 4 2.00" in lines  # 8 s of the critic's update minus 6 s
    assert "actor generate: 1 wave" in lines
    assert "2 of 8 devices are unused: no plan is faster with them" in lines
    assert "searched 15 placements, 40 allocations and 300 layouts in 0.12 s" in lines
    assert "note: lengths are guessed" in lines


def test_why_the_second_lost():
    # Its update takes 15.5 s instead of 8 s: 5 s instead of 0 s of collectives, 10.5 s instead of 8 s of compute.
    text = why_it_lost(together(), split())
    assert text == (
        "actor+critic+reference+reward 8 is slower by 5.00 s (24%). Its update takes 7.50 s more: "
        "actor update + critic update on 8 devices in 15.5 s, against critic update on 2 devices in 8.00 s; "
        "collectives grew most, by 5.00 s. Its generate takes 4.00 s less. Its prepare takes 1.50 s more."
    )
    assert why_it_lost(split(), split()) == (
        "actor+reference 4 | critic+reward 2 is as fast, within the precision of the prediction."
    )


def test_pools_that_share_a_processor_all_count():
    plan = replace(split(), stage_seconds={"generate": 10.0, "prepare": 4.5, "update": 14.0})
    assert len(critical_calls(plan, "update")) == 3
    assert [call.role for call in critical_calls(split(), "update")] == ["critic"]
    # compute 2 + 1 + 1.5 + 1.5 + 5 + 8 = 19 against 7 of memory; the longest call is the actor's generation.
    assert bottleneck(plan) == "compute; actor generate"
    starts = {(bar.call.role, bar.call.verb): bar.start_s for bar in bars_of(plan)}
    assert starts["critic", "infer"] == 13.0  # after the 3 s of the other pool
    assert starts["critic", "update"] == 20.5


def test_seconds_have_three_digits():
    texts = {0: "0", 2e-5: "2.0e-05", 0.0123: "0.012", 1.234: "1.23", 12.34: "12.3", 1234.5: "1,234"}
    assert {seconds: seconds_text(seconds) for seconds in texts} == texts


def test_a_layout_reads_p_t_d():
    assert layout_text(Layout(data=2, stage=4, tensor=8)) == "4-8-2"
    assert layout_text(Layout(data=2, fsdp=4, tensor=8)) == "1-8-2 x4"


# As a picture.


def test_bars_follow_each_other_in_their_pool():
    starts = {(bar.call.role, bar.call.verb): (bar.start_s, bar.end_s) for bar in bars_of(split())}
    assert (starts["actor", "generate"], starts["reference", "infer"]) == ((1.0, 10.0), (11.0, 13.0))
    assert (starts["actor", "offload"], starts["critic", "update"]) == ((18.5, 19.0), (13.0, 21.0))


def test_the_picture_has_a_lane_for_each_pool_and_a_bar_for_each_call(tmp_path):
    figure = draw_timeline(split(), title="made")
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "actor + reference\n4 devices",
        "critic + reward\n2 devices",
    ]
    widths = sorted(round(patch.get_width(), 6) for patch in axes.patches if patch.get_height() < 0.9)
    # Nine calls, and a strip of 21 s in each lane.
    assert widths == [0.25, 0.5, 1.0, 1.0, 1.25, 2.0, 5.5, 8.0, 9.0, 21.0, 21.0]
    assert "21.0 s" in axes.get_title(loc="left")
    figure.savefig(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_slots_that_the_configuration_gives_are_not_raised():
    config = a_config(rollout=Rollout(prompts_per_step=32, responses_per_prompt=4, slots=32))
    assert "rollout.slots" not in planned_settings(config, split())
