"""A game as OpenEnv's servers have them, and its adapter as a user names it."""

import os

from jaxrlhf.environments.openenv import OpenEnv


def move(reply):
    word = reply.content.strip().upper()
    return {"direction": word} if word in ("LEFT", "RIGHT") else "Say left or right."


path = OpenEnv(
    os.environ.get("PATH_GAME", "http://127.0.0.1:1"),
    action=move,
    view=lambda seen: f"You are at {seen['place']}.",
    prompt="Go to 3.",
)


def app():
    """The game's server: a path whose third place is worth 1."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Direction(Action):
        direction: str

    class Place(Observation):
        place: int

    class Path(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, **_):
            self.place = seed % 2
            return Place(place=self.place, reward=0.0, done=False)

        def step(self, action, **_):
            self.place += 1 if action.direction == "RIGHT" else -1
            return Place(place=self.place, reward=float(self.place == 3), done=self.place == 3)

        @property
        def state(self):
            return State()

    return create_app(Path, Direction, Place, env_name="path", max_concurrent_envs=8)
