"""Time table: sums, shares and medians of calls with known lengths, and their picture."""

import io

import pytest
from rich.console import Console

from jaxrlhf.tracking import ON_HOST, Call, StepCalls, save_step_picture, time_spent, time_table, typical
from jaxrlhf.tracking.step_picture import draw_step, lines_of

START_S = 1000.0  # of the run


def calls(start_s: float, *, generate_s: float, twice_s: float) -> tuple[Call, ...]:
    """Generation; then two updates on the same pool, in parallel with a reward and a critic on two other pools."""
    then_s = start_s + generate_s
    return (
        Call("actor", "generate", start_s, then_s, "left"),
        Call("reward", "score", then_s, then_s + 0.5, ON_HOST),
        Call("actor", "update", then_s, then_s + twice_s, "left"),
        Call("critic", "update", then_s, then_s + 3 * twice_s, "right"),
        Call("actor", "update", then_s + 2 * twice_s, then_s + 3 * twice_s, "left"),
    )


def step(number: int, start_s: float, end_s: float, *, generate_s: float, twice_s: float) -> StepCalls:
    return StepCalls(number, start_s, end_s, calls(start_s, generate_s=generate_s, twice_s=twice_s))


STEPS = [
    step(5, START_S + 2, START_S + 52, generate_s=30, twice_s=5),  # compiles
    step(6, START_S + 53, START_S + 63, generate_s=4, twice_s=2),
    step(7, START_S + 64, START_S + 84, generate_s=10, twice_s=3),
    step(8, START_S + 85, START_S + 105, generate_s=7, twice_s=4),
]
READY_S = START_S  # where the log is opened
OUTSIDE = [
    Call("actor", "compile", READY_S, READY_S + 1.5, "left"),
    Call("actor", "generate", START_S + 105, START_S + 108, "left"),
    Call("reward", "score", START_S + 107, START_S + 109, ON_HOST),
]
END_S = START_S + 110
LINES = time_spent(STEPS, OUTSIDE, start_s=START_S - 6, ready_s=READY_S, end_s=END_S)


@pytest.mark.parametrize(
    ("lane", "name", "count", "seconds", "first", "middle"),
    [
        ("left", "actor.generate", 4, 30 + 4 + 10 + 7, 30, 7),
        ("left", "actor.update", 8, 2 * (5 + 2 + 3 + 4), 10, 6),
        ("left", "idle", None, (50 - 40) + (10 - 8) + (20 - 16) + (20 - 15), 10, 4),
        (ON_HOST, "reward.score", 4, 4 * 0.5, 0.5, 0.5),
        ("right", "critic.update", 4, 3 * (5 + 2 + 3 + 4), 15, 9),
        ("right", "idle", None, (50 - 15) + (10 - 6) + (20 - 9) + (20 - 12), 35, 8),
        ("step", "all", 4, 100, 50, 20),
    ],
)
def test_seconds_of_steps(lane, name, count, seconds, first, middle):
    [line] = [line for line in LINES if (line.lane, line.name) == (lane, name)]
    assert line.calls == count
    assert line[3:] == pytest.approx((seconds, seconds / 100, first, middle))


def test_seconds_outside_steps():
    outside = {line.name: (line.calls, line.seconds) for line in LINES if line.lane == "outside steps"}
    assert outside == {
        "reading data and models": (None, 6.0),
        "actor.compile": (1, 1.5),
        "actor.generate": (1, 3.0),
        "reward.score": (1, 2.0),
        # Before the first step 0.5, between steps 3 times 1, and after the last call 1.
        "saving, logging": (None, pytest.approx(4.5)),
    }
    assert len(LINES) == 7 + 5


def test_overlapping_calls_do_not_reduce_idle_time_twice():
    """Calls may overlap each other and the end of a step."""
    mixed = (Call("a", "f", 0, 4, "all"), Call("a", "f", 2, 5, "all"), Call("b", "g", 9, 12, "all"))
    lines = time_spent([StepCalls(1, 1.0, 10.0, mixed)], [], start_s=1.0, ready_s=1.0, end_s=10.0)
    [idle] = [line for line in lines if line.name == "idle"]
    assert idle.seconds == pytest.approx(9 - (5 - 1) - (10 - 9))


def test_typical_step_is_steady():
    assert typical(STEPS).number in (7, 8)
    assert typical(STEPS[:3]).number == 6  # the shorter of two
    assert typical(STEPS[:1]).number == 5


def test_table_names_a_pool_once():
    console = Console(width=120)
    with console.capture() as capture:
        console.print(time_table(LINES, title="where", caption="XLA: [b]2 programs"))
    words = [line.split() for line in capture.get().splitlines()]
    assert ["left", "actor.generate", "4", "51.00", "s", "51.0%", "30.00", "s", "7.00", "s"] in words
    assert ["actor.update", "8", "28.00", "s", "28.0%", "10.00", "s", "6.00", "s"] in words
    assert ["outside", "steps", "reading", "data", "and", "models", "6.00", "s"] in words
    assert ["saving,", "logging", "4.50", "s"] in words
    assert words[-1] == ["XLA:", "[b]2", "programs"]


def test_line_for_each_role_and_bar_for_each_call():
    names, bars = lines_of(STEPS[1])
    assert names == ["actor\nleft", f"reward\n{ON_HOST}", "critic\nright"]
    assert bars == [
        (0, "generate", pytest.approx(0), pytest.approx(4)),
        (1, "score", pytest.approx(4), pytest.approx(0.5)),
        (0, "update", pytest.approx(4), pytest.approx(2)),
        (2, "update", pytest.approx(4), pytest.approx(6)),
        (0, "update", pytest.approx(8), pytest.approx(2)),
    ]


def test_roles_are_grouped_by_pool():
    order = [("actor", "all"), ("reward", ON_HOST), ("critic", "all")]
    made = [Call(role, "verb", n, n + 1, lane) for n, (role, lane) in enumerate(order)]
    assert lines_of(StepCalls(1, 0, 3, tuple(made))).names == ["actor", "critic", "reward"]


def test_picture_is_written(tmp_path):
    [axes] = draw_step(STEPS[1], title="a run").axes
    drawn = [(bar.get_x(), bar.get_width(), bar.get_facecolor()) for bar in axes.patches]
    assert len(drawn) == 5
    assert drawn[2][2] == drawn[3][2] == drawn[4][2] != drawn[0][2]  # updates look alike
    assert axes.get_xlim() == (0, 10)
    png = save_step_picture(STEPS[1], tmp_path / "timeline.png", title="lr $x_{ $")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_narrow_table_truncates_no_number():
    out = io.StringIO()
    Console(file=out, width=80).print(time_table(LINES, title="where", caption="all"))
    words = set(out.getvalue().split())
    for line in LINES:
        for seconds in (line.seconds, line.first_s, line.median_s):
            assert seconds is None or f"{seconds:.2f}" in words
