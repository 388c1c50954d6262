"""An environment of verifiers rolls out through the endpoint, and its rubric scores what was drawn."""

from pathlib import Path

import pytest

pytest.importorskip("verifiers")

from served_models import build_engine

from jaxrlhf.config import Agent
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine import EngineService
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.server import Server

pytestmark = pytest.mark.slow
PROGRAM = Agent(program=f"{Path(__file__).parents[1] / 'support' / 'verifiers_tasks.py'}:lengths")


def test_a_row_is_rolled_out_and_scored_by_its_rubric():
    tokenizer = embedded_tokenizer()
    with EngineService(build_engine(tokenizer)) as service:
        model = ServedModel("policy", service, tokenizer, (tokenizer.eos_token_id,))
        with Server(model, token=None) as server, EnvironmentPool((PROGRAM,)) as pool:
            url, key = server.sessions.open("an episode", 1)
            score = pool.run_agent(0, 0, {"index": 2}, 5, url, key).result(900)
            recorded = server.sessions.close("an episode")
    [sequence], [[reply]] = recorded.sequences, recorded.replies
    assert "Tom has 2" in tokenizer.decode(list(sequence.tokens))
    assert sum(sequence.mask) > 1
    assert score == len(reply.content) > 0
