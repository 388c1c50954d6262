"""Adapter for environments of verifiers, as agent programs scored by their rubric; needs `jaxrlhf[verifiers]`.

In a file of yours, for `Agent(program="my_tasks.py:sums")`:

    sums = Verifiers(ReasoningGymEnv("chain_sum"))      # or vf.load_environment("wordle")
"""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.episode import Session


class Verifiers:
    """Agent program in which a verifiers environment rolls out one row of its data set, with its own client.

    Args:
      environment: A `verifiers.Environment`, unchanged.
      evaluation: True uses the rows of the evaluation data set.
    """

    def __init__(self, environment: Any, *, evaluation: bool = False) -> None:
        self._environment = environment
        self._rows = environment.get_eval_dataset() if evaluation else environment.get_dataset()

    async def __call__(self, session: Session, record: Mapping[str, Any]) -> float:
        """Roll out the row with the record's `index`, else with the seed as index; return the rubric's reward.

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
