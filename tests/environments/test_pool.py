"""Tools, environments and agent programs of every form."""

import os
import resource
import time
from concurrent.futures import CancelledError
from contextlib import ExitStack
from pathlib import Path

import pytest

from jaxrlhf.config import Agent, Environment, Tools
from jaxrlhf.environments import answers
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import CallRecord, EnvironmentFailure, MalformedCall, Observation, Reply, ToolCall
from jaxrlhf.processes.channel import Channel

FORMS = Path(__file__).parents[1] / "support" / "environment_forms.py"
TOOLS, COUNTER, ASYNC_COUNTER, BRIEF, MADE, ACCOUNT, TOOLED, RUN, RUN_ASYNC = range(9)
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("environments") / "output.txt"


@pytest.fixture(scope="module")
def pool(output):
    functions = ("add", "draw", "sleep", "wait", "process")
    choices = [
        Tools(functions=tuple(f"{FORMS}:{name}" for name in functions)),
        *(
            Environment(factory=f"{FORMS}:{n}")
            for n in ("Counter", "AsyncCounter", "Brief", "made", "Account", "Tooled")
        ),
        *(Agent(program=f"{FORMS}:{name}", episode_s=0.05) for name in ("run", "run_async")),
    ]
    with EnvironmentPool(choices, output) as pool:
        yield pool


@pytest.fixture
def begin(pool, request):
    """Function that starts episodes, which are dropped after the test."""
    numbers = []

    def start(choice, record=None, seed=7):
        number = abs(hash((request.node.name, len(numbers)))) % 10**9
        numbers.append(number)
        return number, pool.start(number, choice, record or {}, seed).result(LIMIT_S)

    yield start
    for number in numbers:
        pool.drop(number)


def said(text: str, *calls: ToolCall, malformed=()) -> Reply:
    return Reply(text, text, calls=calls, malformed=tuple(malformed))


@pytest.mark.slow
def test_tools_show_their_schemas_and_start_with_the_records_prompt(begin):
    _, opening = begin(TOOLS)
    assert list(opening.messages) == [] and opening.appended == ""
    assert [tool["function"]["name"] for tool in opening.tools] == ["add", "draw", "sleep", "wait", "process"]
    assert opening.tools[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a", "b"],
            },
        },
    }


def test_every_call_of_a_reply_is_answered_in_order(pool, begin):
    episode, _ = begin(TOOLS)
    reply = said(
        "",
        ToolCall("wait", {"seconds": 0.0}, "first"),
        ToolCall("add", {"a": 2, "b": 3}, "second"),
        ToolCall("add", {"a": "2", "b": 3}),
        ToolCall("add", {"a": 2, "c": 3}),
        malformed=[MalformedCall("structure", "the call is not closed")],
    )
    seen = pool.step(episode, reply).result(LIMIT_S)
    assert not seen.done and seen.reward == 0.0
    assert [message["role"] for message in seen.messages] == ["tool"] * 5
    assert [message.get("tool_call_id") for message in seen.messages] == ["first", "second", None, None, None]
    texts = [message["content"] for message in seen.messages]
    assert texts[:2] == ["waited 0.0", "5"]
    assert texts[2].startswith("error: TypeError") and "unexpected keyword argument 'c'" in texts[3]
    assert texts[4] == "error: the call is not closed; the tools are add, draw, sleep, wait, process"
    assert [(call.name, call.failure) for call in seen.calls] == [
        *[("wait", None), ("add", None), ("add", "exception"), ("add", "exception")]
    ]


def test_a_reply_without_calls_ends_an_episode_of_tools(pool, begin):
    episode, _ = begin(TOOLS)
    seen = pool.step(episode, said("42")).result(LIMIT_S)
    assert seen.done and not seen.messages and not seen.calls
    assert pool.finish(episode).result(LIMIT_S) is None


def test_a_malformed_call_does_not_end_the_episode(pool, begin):
    episode, _ = begin(TOOLS)
    seen = pool.step(episode, said("", malformed=[MalformedCall("unknown_tool", "there is no tool sum")])).result(
        LIMIT_S
    )
    assert not seen.done and "there is no tool sum; the tools are add" in seen.messages[0]["content"]


def test_async_calls_run_together_and_episodes_in_parallel(pool, begin):
    episodes = [begin(TOOLS)[0] for _ in range(8)]
    waits = [pool.step(e, said("", *[ToolCall("wait", {"seconds": 0.4})] * 4)) for e in episodes]
    for one in waits:  # starts the processes
        one.result(LIMIT_S)
    start = time.monotonic()
    together = [pool.step(e, said("", *[ToolCall("wait", {"seconds": 0.4})] * 4)) for e in episodes[:4]]
    blocking = [pool.step(e, said("", ToolCall("sleep", {"seconds": 0.5}))) for e in episodes[4:]]
    for one in (*together, *blocking):
        one.result(LIMIT_S)
    assert time.monotonic() - start < 2.0  # in sequence 8.4 s


def test_random_numbers_of_tools_depend_only_on_seed_turn_and_number(pool, begin):
    calls = said("", ToolCall("draw", {}), ToolCall("draw", {}))
    first, second, other = (begin(TOOLS, seed=seed)[0] for seed in (1, 1, 2))
    one = [pool.step(first, calls).result(LIMIT_S) for _ in range(2)]
    two = [pool.step(second, calls).result(LIMIT_S) for _ in range(2)]
    draws = [message["content"] for seen in one for message in seen.messages]
    assert draws == [message["content"] for seen in two for message in seen.messages]
    assert len(set(draws)) == 4
    assert pool.step(other, calls).result(LIMIT_S).messages[0]["content"] not in draws


@pytest.mark.parametrize("choice", [COUNTER, ASYNC_COUNTER])
def test_an_environment_keeps_its_state(pool, begin, output, choice):
    episode, opening = begin(choice, {"target": 5}, seed=100 + choice)
    assert [message["content"] for message in opening.messages] == ["count", f"to 5 ({100 + choice})"]
    other, _ = begin(choice, {"target": 9}, seed=200)
    seen = pool.step(episode, said("2")).result(LIMIT_S)
    assert pool.step(other, said("9")).result(LIMIT_S).done
    assert [dict(message) for message in seen.messages] == [{"role": "user", "content": "2"}]
    assert (seen.reward, seen.done, seen.state, seen.metrics, seen.max_tokens) == (
        0,
        False,
        ("sum", 2),
        {"sum": 2.0},
        5,
    )
    seen = pool.step(episode, said("3")).result(LIMIT_S)
    assert (seen.reward, seen.done, list(seen.messages)) == (1.0, True, [])
    assert pool.finish(episode).result(LIMIT_S) is None
    assert eventually(lambda: f"closed with seed {100 + choice}" in output.read_text())


@pytest.mark.parametrize("choice", [BRIEF, MADE])
def test_texts_and_tuples_are_observations_too(pool, begin, choice):
    episode, opening = begin(choice, {"word": "hi"})
    assert [dict(message) for message in opening.messages] == [{"role": "user", "content": "say hi"}]
    assert pool.step(episode, said("hi")).result(LIMIT_S).messages[0]["content"] == "once more"
    seen = pool.step(episode, said("hi")).result(LIMIT_S)
    assert (seen.messages[0]["content"], seen.reward, seen.done) == ("well", 1.0, True)
    assert pool.finish(episode).result(LIMIT_S) is None
    episode, _ = begin(choice, {"word": "hi"})
    seen = pool.step(episode, said("five")).result(LIMIT_S)
    assert (seen.reward, seen.done, seen.truncated) == (0.5, False, True)


def test_public_methods_are_tools(pool, begin):
    episode, opening = begin(ACCOUNT, {"money": 50})
    assert list(opening.messages) == [] and opening.appended == " You have 50."
    assert [tool["function"]["name"] for tool in opening.tools] == ["deposit", "interest"]
    calls = [ToolCall("interest", {"percent": 10}), ToolCall("deposit", {"amount": 50})]
    seen = pool.step(episode, said("", *calls)).result(LIMIT_S)
    assert [message["content"] for message in seen.messages] == ["110", "100"]  # async tools run last
    seen = pool.step(episode, said("", ToolCall("deposit", {"amount": -1}))).result(LIMIT_S)
    assert seen.messages[0]["content"].startswith("error: ValueError: amounts are not negative")
    assert pool.step(episode, said("done")).result(LIMIT_S).done
    assert pool.finish(episode).result(LIMIT_S) == 110.0


def test_the_tools_of_an_environment_may_depend_on_the_record(pool, begin):
    _, opening = begin(TOOLED, {"tool": "look"})
    assert opening.tools[0]["function"]["name"] == "look"


def test_calls_that_an_environment_made_itself_are_kept():
    made = CallRecord("look", 0.5, "timeout")
    assert answers.observation(Observation(done=True, calls=(made,)), 100).calls == [made]
    for wrong in (CallRecord("look", 0.5, "late"), CallRecord("look", float("nan")), "look"):
        with pytest.raises(EnvironmentFailure):
            answers.observation(Observation(done=True, calls=[wrong]), 100)


def test_episodes_of_a_group_get_the_same_random_numbers(pool, begin):
    first, second, other = (begin(TOOLED, {"tool": "look"}, seed=seed)[0] for seed in (3, 3, 4))
    rewards = [pool.step(episode, said("")).result(LIMIT_S).reward for episode in (first, second, other)]
    assert rewards[0] == rewards[1] != rewards[2]


def test_an_instance_with_an_invalid_reward_is_closed(pool, begin, output):
    episode, _ = begin(COUNTER, {"target": 5, "paid": "much"}, seed=300)
    with pytest.raises(EnvironmentFailure, match="the final reward is a str"):
        pool.finish(episode).result(LIMIT_S)
    assert eventually(lambda: "closed with seed 300" in output.read_text())


@pytest.mark.slow
def test_each_call_of_a_request_has_its_own_time_limit(monkeypatch):
    monkeypatch.setattr("jaxrlhf.processes.workers.SLACK_S", 0.0)
    monkeypatch.setattr("jaxrlhf.processes.workers.SHOW_S", 0.0)
    choices = [Tools(functions=(f"{FORMS}:sleep",), call_s=1.0), Environment(factory=f"{FORMS}:Slow", call_s=1.0)]
    with EnvironmentPool(choices) as pool:
        slow = pool.start(0, 1, {"word": "hi"}, 0)
        pool.start(1, 0, {}, 0).result(LIMIT_S)
        seen = pool.step(1, said("", *[ToolCall("sleep", {"seconds": 0.6})] * 3)).result(LIMIT_S)
        assert [call.failure for call in seen.calls] == [None] * 3
        assert slow.result(LIMIT_S).messages[0]["content"] == "say hi"


@pytest.mark.parametrize("choice", [RUN, RUN_ASYNC])
def test_an_agent_program_gets_its_session(pool, choice):
    """The pool enforces no time limit on it."""
    futures = [pool.run_agent(n, choice, {"score": n / 2}, 5, f"http://127.0.0.1:1/{n}", f"key-{n}") for n in range(3)]
    assert [future.result(LIMIT_S) for future in futures] == [5.0, 5.5, 6.0]


def test_an_agent_program_may_return_no_score(pool):
    assert pool.run_agent(0, RUN_ASYNC, {"score": None}, 5, "http://127.0.0.1:1", "key").result(LIMIT_S) is None


def test_a_run_may_have_many_files_open():
    """Descriptors above 1023, which `select` rejects."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with ExitStack() as files:
        for _ in range(1100):
            files.callback(os.close, os.dup(0))
        with EnvironmentPool([Environment(factory=f"{FORMS}:Brief")]) as pool:
            pool.start(0, 0, {"word": "hi"}, 0).result(LIMIT_S)
            assert pool.step(0, said("hi")).result(LIMIT_S).messages[0]["content"] == "once more"


@pytest.mark.slow
def test_an_answer_may_have_output_bytes():
    with EnvironmentPool([Tools(functions=(f"{FORMS}:long",), output_bytes=20 << 20)]) as pool:
        pool.start(0, 0, {}, 0).result(LIMIT_S)
        seen = pool.step(0, said("", *[ToolCall("long", {"length": length}) for length in (20 << 20, (20 << 20) + 1)]))
        assert [call.failure for call in seen.result(LIMIT_S).calls] == [None, "output"]


def test_a_process_that_dies_while_it_gets_a_request_fails_no_episode(monkeypatch):
    flush, broken = Channel.flush, []

    def breaks(channel):
        if not broken:  # like a full socket
            broken.append(channel)
            return False
        if broken == [channel]:
            broken.append(channel)
            raise BrokenPipeError
        return flush(channel)

    with EnvironmentPool([Environment(factory=f"{FORMS}:Brief")]) as pool:
        monkeypatch.setattr(Channel, "flush", breaks)
        opening = pool.start(0, 0, {"word": "hi"}, 0).result(LIMIT_S)
        assert opening.messages[0]["content"] == "say hi" and len(broken) == 2


def test_a_dropped_episode_ends_only_its_process(pool, begin):
    episode, _ = begin(TOOLS)
    hanging = pool.step(episode, said("", ToolCall("sleep", {"seconds": 9.0})))
    time.sleep(0.1)
    pool.drop(episode)
    with pytest.raises(CancelledError):
        hanging.result(1.0)
    with pytest.raises(RuntimeError, match="there is no episode"):
        pool.finish(episode).result(LIMIT_S)
    other, _ = begin(TOOLS)
    assert pool.step(other, said("", ToolCall("add", {"a": 1, "b": 1}))).result(LIMIT_S).messages[0]["content"] == "2"


def test_misuse_of_the_pool_is_an_error(pool, begin):
    episode, _ = begin(COUNTER, {"target": 5})
    with pytest.raises(RuntimeError, match="is open already"):
        pool.start(episode, COUNTER, {"target": 5}, 0).result(LIMIT_S)
    with pytest.raises(RuntimeError, match="not an agent program"):
        pool.run_agent(-1, COUNTER, {}, 0, "", "").result(LIMIT_S)
    pool.drop(-1)


def eventually(holds, limit_s: float = 5.0) -> bool:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
