"""Tasks of reasoning-gym, each an episode of one reply; needs `jaxrlhf[environments]`.

In a file of yours, for `Environment(factory="my_tasks.py:sums")`:

    sums = ReasoningGym("chain_sum", size=1000, seed=0, max_terms=3)
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxrlhf.episode import Observation, Reply

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """Factory of episodes of one data set, which is made once.

    Args:
      prompt: Text after a question.
      settings: Its settings, `size` and `seed` among them.
    """

    def __init__(self, name: str, *, prompt: str = "", **settings: Any) -> None:
        import reasoning_gym

        self._tasks, self._prompt = reasoning_gym.create_dataset(name, **settings), prompt

    def __call__(self) -> "ReasoningTask":
        return ReasoningTask(self._tasks, self._prompt)


class ReasoningTask:
    """A question, and the score of its answer from 0 to 1 as reasoning-gym has it."""

    def __init__(self, tasks: Any, prompt: str) -> None:
        self._tasks, self._prompt = tasks, prompt
        self._task: dict[str, Any] = {}

    def reset(self, record: Mapping[str, Any], seed: int) -> str:
        """The question of the number `index` of the record, or without one of the seed."""
        self._task = self._tasks[int(record.get("index", seed)) % len(self._tasks)]
        return self._task["question"] + self._prompt

    def step(self, reply: Reply) -> Observation:
        """Score the answer: the last one in `<answer>` tags, or else all of the reply."""
        answers = _ANSWER.findall(reply.content) or [reply.content]
        return Observation(reward=float(self._tasks.score_answer(answers[-1].strip(), self._task)), done=True)
