"""Adapter for tasks of reasoning-gym, as episodes of one reply; needs `jaxrlhf[environments]`.

In a file of yours, for `Environment(factory="my_tasks.py:sums")`:

    sums = ReasoningGym("chain_sum", size=1000, seed=0, max_terms=3)
"""

import re
from collections.abc import Mapping
from copy import copy
from typing import Any, Self

from jaxrlhf.episode import Observation, Reply

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """Question, and reasoning-gym's score of its answer, from 0 to 1; a call returns the instance for an episode.

    The data set is created once.

    Args:
      prompt: Text after a question.
      settings: Settings of the data set, including `size` and `seed`.
    """

    def __init__(self, name: str, *, prompt: str = "", **settings: Any) -> None:
        import reasoning_gym

        self._tasks, self._prompt = reasoning_gym.create_dataset(name, **settings), prompt
        self._task: dict[str, Any] = {}

    def __call__(self) -> Self:
        return copy(self)

    def reset(self, record: Mapping[str, Any], seed: int) -> str:
        """Return the question with the record's `index` or, if the record has none, with the seed as index."""
        self._task = self._tasks[int(record.get("index", seed)) % len(self._tasks)]
        return self._task["question"] + self._prompt

    def step(self, reply: Reply) -> Observation:
        """Score the answer: the text in the last `<answer>` tags or, without tags, the whole reply."""
        answers = _ANSWER.findall(reply.content) or [reply.content]
        return Observation(reward=float(self._tasks.score_answer(answers[-1].strip(), self._task)), done=True)
