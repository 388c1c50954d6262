"""Environments of verifiers run as agent programs, and their rewards train the policy."""

from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1")

import verifiers.v1 as vf
from scratch_learning import mean_scores
from served_models import build_engine

from jaxrlhf.config import Agent
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine import EngineService
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.environments.verifiers import Verifiers
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.server import Server

pytestmark = pytest.mark.slow
TASKS = Path(__file__).parents[1] / "support" / "verifiers_tasks.py"


@pytest.mark.parametrize("harness", ["asked", "null"])
def test_a_task_is_played_and_scored_by_its_rewards(harness):
    tokenizer = embedded_tokenizer()
    with EngineService(build_engine(tokenizer)) as service:
        model = ServedModel("policy", service, tokenizer, (tokenizer.eos_token_id,))
        program = Agent(program=f"{TASKS}:{harness}")
        with Server(model, token=None) as server, EnvironmentPool((program,)) as pool:
            for index in (2, 1):
                url, key = server.sessions.open(f"episode {index}", 1)
                score = pool.run_agent(0, 0, {"index": index}, 5, url, key).result(900)
                recorded = server.sessions.close(f"episode {index}")
                [sequence], [[reply]] = recorded.sequences, recorded.replies
                assert f"Tom has {index}" in tokenizer.decode(list(sequence.tokens))
                assert sum(sequence.mask) > 1
                said = reply.content.strip()
                assert score == pytest.approx(sum(map(str.isdigit, said)) / max(1, len(said)) + 0.5)


@pytest.mark.usefixtures("programs", "undrawn")
def test_a_task_is_learned(tmp_path):
    scores = mean_scores(Agent(program=f"{TASKS}:asked"), tmp_path)
    assert scores[0] < 0.75 and scores[-1] > 1.3, scores


def test_environments_that_cannot_be_played_are_refused():
    def environment(**settings):
        return vf.load_environment(vf.resolve_env_config({"taskset": {"id": "verifiers-digits"}} | settings))

    with pytest.raises(ValueError, match=r"verifiers 0\.3 and older"):
        Verifiers(type("SingleTurnEnv", (), {})())
    with pytest.raises(ValueError, match="2 have no client: assistant, user"):
        Verifiers(environment(id="user-sim"))
    endless = environment()
    endless.taskset.INFINITE = True
    with pytest.raises(ValueError, match="Digits is infinite"):
        Verifiers(endless)
    assert len(Verifiers(endless, tasks=2)._tasks) == 2
