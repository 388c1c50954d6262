"""Environments of gymnasium and tasks of reasoning-gym run unmodified."""

from pathlib import Path
from types import SimpleNamespace

import environment_games
import numpy as np
import pytest
from scratch_learning import mean_scores

from jaxrlhf.config import Environment, load
from jaxrlhf.data.generated import generated_records
from jaxrlhf.environments import games
from jaxrlhf.environments.nemo_rl import NemoRL
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import Reply

gymnasium = pytest.importorskip("gymnasium")
reasoning_gym = pytest.importorskip("reasoning_gym")

SUPPORT = Path(__file__).parents[1] / "support"
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    output = tmp_path_factory.mktemp("games") / "output.txt"
    with EnvironmentPool((Environment(factory=f"{SUPPORT / 'environment_games.py'}:lake"),), output) as pool:
        yield pool


def text(observation) -> str:
    return observation.messages[0]["content"]


def said(words: str) -> Reply:
    return Reply(words, words)


def play(pool, number: int, words: str):
    return pool.step(number, said(words)).result(LIMIT_S)


def test_frozen_lake_is_played_to_its_end(pool):
    opening = pool.start(1, 0, {}, 0).result(LIMIT_S)
    assert text(opening) == "Go to G.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    asked_again = play(pool, 1, "I do not know")
    assert text(asked_again) == "Say one of left, down, right, up."
    assert opening.state == asked_again.state == "[S]FFF\nFHFH\nFFFH\nHFFG"  # the state of the next reply
    seen = [play(pool, 1, words) for words in ("left? no, Down!", "down", "right", "right", "down", "right")]
    assert text(seen[0]) == seen[0].state == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [one.reward for one in seen] == [0.0] * 5 + [1.0]
    assert seen[-1].metrics == {"no_action": 1.0}
    assert [one.done for one in seen] == [False] * 5 + [True]
    assert pool.finish(1).result(LIMIT_S) is None


def test_equal_seeds_give_equal_games():
    courses = []
    for seed in (5, 5, 6, 7):
        game, course = environment_games.slippery(), []
        game.reset({}, seed)
        while not course or not (course[-1].done or course[-1].truncated or len(course) > 30):
            course.append(game.step(said("right")))
        courses.append([one.state for one in course])
    assert courses[0] == courses[1]
    assert len({tuple(course) for course in courses}) > 1


def test_demonstrations_of_the_lake_move_as_in_gymnasium():
    ends = set()
    for row in generated_records(load("game_frozen_lake").data.function, "train", 200, 0):
        lake, messages = games.lake(), [{"content": row.record["prompt"]}, *row.record["solution"]]
        seen, done = lake.reset(row.record, 0).state, False
        for asked, said in zip(messages[::2], messages[1::2], strict=True):
            assert asked["content"] == seen and not done
            told = lake.step(Reply(said["content"], said["content"]))
            seen, done = told.state, told.done
        assert done or len(messages) == 24
        ends.add((seen, told.reward) if done else "tired")
    assert ends == {("5", 0.0), ("7", 0.0), ("11", 0.0), ("12", 0.0), ("15", 1.0), "tired"}


def test_taxi_and_blackjack():
    taxi, blackjack = environment_games.taxi(), environment_games.blackjack()
    opening = text(taxi.reset({}, 1))
    assert opening.startswith("+---------+\n|R: | : :G|") and "[ ]" in opening
    assert taxi.step(said("pickup")).reward == -10.0
    assert text(blackjack.reset({}, 1)).startswith("(")
    assert blackjack.step(said("stick: 0")).done


def test_tasks_of_reasoning_gym_have_its_scores():
    import environment_tasks

    tasks = reasoning_gym.create_dataset("chain_sum", size=20, seed=3)
    for record, seed in (({"index": 4}, 9), ({}, 9), ({}, 29)):
        task = tasks[record.get("index", seed) % 20]
        episode = environment_tasks.sums()
        assert episode.reset(record, seed) == task["question"] + " Say the number."
        seen = episode.step(said(f"perhaps <answer> {task['answer']} </answer>"))
        assert (seen.done, seen.reward) == (True, 1.0)
        assert episode.step(said("no idea")).reward == tasks.score_answer("no idea", task) < 1.0


@pytest.mark.seeds
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_task_of_reasoning_gym_is_learned(tmp_path):
    letters = Environment(factory=f"{SUPPORT / 'environment_tasks.py'}:letters", turn_tokens=1, cut_turns="close")
    scores = mean_scores(letters, tmp_path, prompts_per_step=16, max_prompt_tokens=72)
    assert scores[0] < 0.1 and scores[-1] > 0.5, scores


class Countdown:
    """Environment in NeMo RL's form: `step` takes a batch, and the caller stores the metadata."""

    def __init__(self, pay: float, parts: int) -> None:
        self.pay, self.parts = pay, parts

    def step(self, message_log_batch, metadata):
        said = [[message["content"] for message in log if message["role"] == "assistant"] for log in message_log_batch]
        heard = [len(log) == 2 * len(words) for log, words in zip(message_log_batch, said, strict=True)]
        right = [words[-1] == str(left) for words, left in zip(said, metadata, strict=True)]
        over = [good and left == 1 for good, left in zip(right, metadata, strict=True)]
        return SimpleNamespace(
            observations=[{"role": "environment", "content": f"{good} {all(heard)}"} for good in right],
            metadata=[left - 1 if good else None for good, left in zip(right, metadata, strict=True)],
            next_stop_strings=[None] * len(said),
            rewards=self.pay
            * (np.array(right) if self.parts == 1 else np.repeat(np.array([right]).T, self.parts, axis=1)),
            terminateds=np.array(over),
        )


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("actor", [False, True])
def test_an_episode_of_nemo_rl_is_a_batch_of_one(actor, parts):
    kind = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=Countdown)) if actor else Countdown
    episode = NemoRL(kind, 0.5, parts=parts, begin=lambda record, seed: (f"From {record['top']}", record["top"]))()
    assert episode.reset({"top": 3}, 0) == "From 3"
    seen = [episode.step(Reply(text, text)) for text in ("3", "7", "2", "1")]
    assert [one.messages[0] for one in seen] == [{"role": "user", "content": f"{n != 1} True"} for n in range(4)]
    assert [one.reward for one in seen] == [0.5 * parts, 0.0, 0.5 * parts, 0.5 * parts]
    assert [one.done for one in seen] == [False, False, False, True]
