"""The run of `tiny_episodes.py`, killed in a step of the environment's number while its episodes are under way.

JAXRLHF_TEST_DIE_AT=3 python dying_episodes.py WORKDIR
"""

import os
import signal
import sys
from dataclasses import replace

import tiny_episodes

import jaxrlhf
from jaxrlhf.agent_loop import AgentLoop


def dying(run, calls):
    """`AgentLoop.run` that dies after the first episodes of its so many-th call."""

    def run_or_die(self, *args, progress, **settings):
        dying_run.calls += 1

        def report(done, total):
            if dying_run.calls == calls and done >= 3:
                os.kill(os.getpid(), signal.SIGKILL)
            progress(done, total)

        return run(self, *args, progress=report, **settings)

    dying_run.calls = 0
    return run_or_die


def dying_run() -> None:
    """Run until the step; the evaluations before and after the second step are calls, too."""
    at = int(os.environ["JAXRLHF_TEST_DIE_AT"])
    AgentLoop.run = dying(AgentLoop.run, calls=at + 2)
    jaxrlhf.run(replace(tiny_episodes.get_config(), workdir=sys.argv[1]))


if __name__ == "__main__":
    dying_run()
