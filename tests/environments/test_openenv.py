"""Environments of OpenEnv servers, played through OpenEnv's client."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("openenv")

from scratch_learning import mean_scores

from jaxrlhf.config import Environment
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import Reply

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[1] / "support"
LIMIT_S = 300.0


@pytest.fixture
def factory(request, monkeypatch):
    """Factory named by the parameter, with a server of its environment."""
    game, name = request.param
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--factory", f"openenv_games:{game}_app", "--port", str(port)]
    server = subprocess.Popen(command, cwd=SUPPORT)
    monkeypatch.setenv("OPENENV_SERVER", f"http://127.0.0.1:{port}")
    try:
        for _ in range(600):
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        yield f"{SUPPORT}/openenv_games.py:{name}"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def pool(factory):
    with EnvironmentPool([Environment(factory=factory, call_s=LIMIT_S)]) as made:
        yield made


@pytest.mark.parametrize("factory", [("path", "path")], indirect=True)
def test_a_game_on_a_server_is_played_to_its_end(pool):
    openings = [pool.start(number, 0, {}, number).result(LIMIT_S) for number in (0, 1)]
    texts = [opening.messages[0]["content"] for opening in openings]
    assert texts == ["Go to 3.\nYou are at 0.", "Go to 3.\nYou are at 1."]
    told = pool.step(0, Reply("hm", "hm")).result(LIMIT_S)
    assert (told.messages[0]["content"], told.state) == ("Say left or right.", "You are at 0.")
    for number, steps in ((0, 3), (1, 2)):  # each episode has its own session
        seen = [pool.step(number, Reply("right", "right")).result(LIMIT_S) for _ in range(steps)]
        assert [one.reward for one in seen] == [0.0] * (steps - 1) + [1.0]
        assert [one.done for one in seen] == [False] * (steps - 1) + [True]
        assert seen[-1].state == "You are at 3."
        assert pool.finish(number).result(LIMIT_S) is None


@pytest.mark.parametrize("factory", [("adder", "adder")], indirect=True)
def test_a_tool_of_an_mcp_server_is_an_action(pool):
    [opened] = pool.start(0, 0, {}, 0).result(LIMIT_S).messages
    told = pool.step(0, Reply("3 4 5", "3 4 5")).result(LIMIT_S)
    assert (opened["content"], told.messages[0]["content"], told.done) == ("Add.", "12", False)


@pytest.mark.usefixtures("programs", "undrawn")
@pytest.mark.parametrize("factory", [("path", "walked")], indirect=True)
def test_a_game_is_learned(factory, tmp_path):
    game = Environment(factory=factory, max_turns=6, turn_tokens=1, cut_turns="close", call_s=LIMIT_S, in_flight=8)
    scores = mean_scores(game, tmp_path, max_response_tokens=48)
    assert scores[0] < 0.6 and scores[-1] > 0.9, scores
