"""Environments of verifiers, each an agent program that its rubric scores; needs `jaxrlhf[verifiers]`.

In a file of yours, for `Agent(program="my_tasks.py:sums")`:

    sums = Verifiers(ReasoningGymEnv("chain_sum"))      # or vf.load_environment("wordle")
"""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.episode import Session


class Verifiers:
    """Agent program that has an environment roll out one row of its data set, by its own client.

    Args:
      environment: A `verifiers.Environment`, unchanged.
      evaluation: Rows are those of its held-out data.
    """

    def __init__(self, environment: Any, *, evaluation: bool = False) -> None:
        self._environment = environment
        self._rows = environment.get_eval_dataset() if evaluation else environment.get_dataset()

    async def __call__(self, session: Session, record: Mapping[str, Any]) -> float:
        """The rubric's reward for the row of the number `index` of the record, or without one of the seed.

        Raises:
          RuntimeError: The environment ended with an error.
        """
        from verifiers.types import ClientConfig

        row = self._rows[int(record.get("index", session.seed)) % len(self._rows)]
        client = ClientConfig(api_base_url=session.base_url, api_key_var="OPENAI_API_KEY", max_retries=0)
        ended = await self._environment.run_rollout(row, client, "policy", {}, state_columns=["error"])
        if ended.get("error"):
            raise RuntimeError(str(ended["error"]))
        return float(ended["reward"])
