"""Adapter for environments of verifiers 0.4, as agent programs scored by their rewards; needs `jaxrlhf[verifiers]`.

In a file of yours, for `Agent(program="my_tasks.py:letters")`:

    local = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    settings = {"taskset": {"id": "my-letters"}, "agent": local}
    letters = Verifiers(vf.load_environment(vf.resolve_env_config(settings)))
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from jaxrlhf.episode import Session


class Verifiers:
    """Agent program in which a verifiers environment plays one of its tasks, with its own harness and runtime.

    Args:
      environment: A `verifiers.v1.Env`, unchanged. The policy plays the one agent without a `client`.
      tasks: Number of tasks to take; None takes all tasks of a finite taskset.

    Raises:
      ValueError: An environment of a verifiers before 0.4; an infinite taskset without `tasks`; an environment in which
        the policy would play no agent or several.
    """

    def __init__(self, environment: Any, *, tasks: int | None = None) -> None:
        if not hasattr(environment, "run_episode"):
            raise ValueError(
                f"expected an environment of verifiers 0.4 (verifiers.v1.Env), got {type(environment).__name__}; "
                "environments with get_dataset, parsers and Rubric(funcs=...) are of verifiers 0.3 and older: write "
                "them as a Taskset whose Task has @reward methods"
            )
        from verifiers.v1 import AgentConfig

        played = [name for name, agent in environment.config if isinstance(agent, AgentConfig) and not agent.client]
        if len(played) != 1:
            raise ValueError(
                f"the policy plays one agent, and {len(played)} have no client: {', '.join(played)}; "
                "give the others a client"
            )
        taskset = environment.taskset
        if tasks is None and not taskset.bounded:
            raise ValueError(f"{type(taskset).__name__} is infinite; say how many tasks to take, such as tasks=1000")
        self._environment, self._played = environment, played[0]
        self._tasks = list(taskset if tasks is None else taskset.take(tasks))

    async def __call__(self, session: Session, record: Mapping[str, Any]) -> float:
        """Play the task with the record's `index`, else with the seed as index; return the mean reward of the agent.

        Raises:
          RuntimeError: The episode ended with an error.
        """
        from verifiers.v1 import EvalClientConfig, ModelContext

        client = EvalClientConfig(base_url=session.base_url, api_key_var="OPENAI_API_KEY")
        task = self._tasks[int(record.get("index", session.seed)) % len(self._tasks)]
        async with self._environment.serving():
            episode = await self._environment.run_episode(task, ModelContext(model="policy", client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        return fmean(trace.reward for trace in episode.traces if trace.agent.name == self._played)
