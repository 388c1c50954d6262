"""Two environments as OpenEnv's servers have them, a game and a tool, and their adapters as a user names them."""

import os

from jaxrlhf.environments.openenv import OpenEnv


def move(reply):
    word = reply.content.strip().upper()
    return {"direction": word} if word in ("LEFT", "RIGHT") else "Say left or right."


ADDRESS = os.environ.get("OPENENV_SERVER", "http://127.0.0.1:1")
path = OpenEnv(ADDRESS, action=move, view=lambda seen: f"You are at {seen['place']}.", prompt="Go to 3.")


def walk(reply):
    return {"direction": "LEFT" if sum(map(ord, reply.text)) % 2 else "RIGHT"}


walked = OpenEnv(ADDRESS, action=walk, view=lambda seen: str(seen["place"]))


def add(reply):
    numbers = [int(each) for each in reply.text.split()]
    return {"type": "call_tool", "tool_name": "add", "arguments": {"numbers": numbers}}


adder = OpenEnv(ADDRESS, action=add, view=lambda seen: str(seen.get("result", {}).get("data", "Add.")))


def path_app():
    """The game's server: a path whose third place is worth 1, by a rubric."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_app
    from openenv.core.rubrics import Rubric

    class Direction(Action):
        direction: str

    class Place(Observation):
        place: int

    class Arrived(Rubric):
        def forward(self, action, observation):
            return float(observation.place == 3)

    class Path(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__(rubric=Arrived())

        def reset(self, seed=None, **_):
            self.place = seed % 2
            return Place(place=self.place, reward=0.0, done=False)

        def step(self, action, **_):
            self.place += 1 if action.direction == "RIGHT" else -1
            seen = Place(place=self.place, done=self.place == 3)
            seen.reward = self._apply_rubric(action, seen)
            return seen

        @property
        def state(self):
            return State()

    return create_app(Path, Direction, Place, env_name="path", max_concurrent_envs=8)


def adder_app():
    """The tool's server, whose environment is an MCP server."""
    from fastmcp import FastMCP
    from openenv.core.env_server import CallToolAction, CallToolObservation, Observation, State, create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment

    class Adder(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            server = FastMCP("adder")

            @server.tool
            def add(numbers: list[int]) -> int:
                return sum(numbers)

            super().__init__(server)

        def reset(self, seed=None, **_):
            return Observation()

        def _step_impl(self, action, **_):
            raise NotImplementedError

        @property
        def state(self):
            return State()

    return create_app(Adder, CallToolAction, CallToolObservation, env_name="adder", max_concurrent_envs=8)
