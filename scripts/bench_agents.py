"""Measures episodes: seconds and computed tokens of many turns with slow tools, as they are, without the caches of
sessions, and turn by turn. Prints a table, and writes docs/agents.json with `--write`.

    python scripts/bench_agents.py --episodes 256 --turns 6 --pause 2

An environment talks for some turns and takes 0 to `--pause` seconds for each answer. Turn by turn means that all
answers of a turn are waited for before the next turn is drawn, as loops do that call a batch engine once a turn.
"""

import argparse
import json
import platform
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrlhf.agent_loop import AgentLoop
from jaxrlhf.batch import Problem
from jaxrlhf.config import Environment, Sampling
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine import Engine
from jaxrlhf.engine.service import EngineService
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import Observation, Reply
from jaxrlhf.models.attention.kernel_choice import choose_execution
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.parameters import param_shapes

PAGE = Path(__file__).parents[1] / "docs" / "agents.json"
REPLY_TOKENS, ANSWER_TOKENS = 24, 32


class Talks:
    """Answers with digits after a pause that depends on the record and the turn."""

    def reset(self, record: dict[str, Any], seed: int) -> str:
        self._record, self._turn = record, 0
        return "".join(random.Random(record["number"]).choices("0123456789", k=16))

    def step(self, reply: Reply) -> Observation:
        dice = random.Random(f"{self._record['number']} {self._turn}")
        time.sleep(dice.uniform(0, self._record["pause_s"]))
        self._turn += 1
        said = "".join(dice.choices("0123456789", k=ANSWER_TOKENS - 8))
        return Observation([{"role": "user", "content": said}], done=self._turn == self._record["turns"])


class TurnByTurn(EnvironmentPool):
    """Pool whose answers are held back until all episodes of the turn have theirs."""

    def __init__(self, *args: Any, episodes: int) -> None:
        super().__init__(*args)
        self._episodes = episodes
        self._lock, self._held = threading.Lock(), list[tuple[Future, Future]]()

    def step(self, episode: int, reply: Reply) -> Future[Observation]:
        held: Future[Observation] = Future()
        answered = super().step(episode, reply)
        answered.add_done_callback(lambda done: self._release(done, held))
        return held

    def _release(self, done: Future, held: Future) -> None:
        with self._lock:
            self._held.append((done, held))
            if len(self._held) < self._episodes:
                return
            ready, self._held = self._held, []
        for answered, waiting in ready:
            waiting.set_result(answered.result())


def engine_of(flags: argparse.Namespace) -> Engine:
    """An engine with random weights for the longest episode."""
    tokenizer = embedded_tokenizer()
    config = ModelConfig(
        family="qwen2",
        vocab_size=len(tokenizer),
        hidden_size=flags.width,
        intermediate_size=4 * flags.width,
        num_layers=flags.layers,
        num_heads=flags.width // 32,
        num_kv_heads=flags.width // 64,
        head_dim=32,
    )
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: np.float32(0.05 * rng.standard_normal(leaf.shape)), param_shapes(config, "lm"))
    engine = Engine(
        config,
        mesh,
        slots=flags.slots,
        max_prompt_tokens=32,
        max_response_tokens=flags.turns * (REPLY_TOKENS + ANSWER_TOKENS),
        stop_tokens=(),
        decode_tokens_per_dispatch=16,
        execution=choose_execution(config, np.dtype(np.float32), mesh, row_axes=(), head_axes=(), decodes=True),
    )
    engine.load(jax.device_put(weights, jax.devices()[0]), version=0)
    return engine


def measure(engine: Engine, flags: argparse.Namespace, way: str) -> dict[str, float]:
    """Go through the episodes once."""
    settings = Environment(
        factory=f"{Path(__file__).resolve()}:Talks",
        max_turns=flags.turns,
        turn_tokens=REPLY_TOKENS,
        cut_turns="close",
        observation_tokens=ANSWER_TOKENS,
        workers=flags.episodes,
    )
    problems = [
        Problem(number, "", (5,), record={"number": number, "turns": flags.turns, "pause_s": flags.pause})
        for number in range(flags.episodes)
    ]
    pool = EnvironmentPool((settings,))
    if way == "turn by turn":
        pool = TurnByTurn((settings,), episodes=flags.episodes)
    submit = EngineService.submit
    if way == "without session caches":
        EngineService.submit = lambda self, request, *a, **k: submit(self, replace(request, keep=False), *a, **k)  # type: ignore[method-assign]
    before = engine.prefill.prompt_tokens, engine.prefill.reused_tokens
    loop = AgentLoop(settings, ChatFormat(embedded_tokenizer()), pool, 32, engine.response_tokens)
    start = time.perf_counter()
    try:
        batch = loop.run(engine, problems, Sampling(), copies=1, seed=1, width=32 + engine.response_tokens)
    finally:
        EngineService.submit = submit  # type: ignore[method-assign]
        pool.close()
        engine.free()
    seconds = time.perf_counter() - start
    assert all(len(record.turns) == flags.turns for record in batch.record_E), batch.record_E[0]
    asked, reused = engine.prefill.prompt_tokens - before[0], engine.prefill.reused_tokens - before[1]
    return {
        "seconds": seconds,
        "prefilled_tokens": float(asked - reused),
        "reused_share": reused / max(asked, 1),
        "drawn_tokens": float(batch.rollout.sequences.mask_BT.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pause", type=float, default=2.0, help="longest answer of a tool, in seconds")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="write docs/agents.json")
    flags = parser.parse_args()
    engine = engine_of(flags)
    ways = ("as it is", "without session caches", "turn by turn")
    for way in ways:
        measure(engine, argparse.Namespace(**{**vars(flags), "pause": 0.0}), way)  # compiles
    found = {way: measure(engine, flags, way) for way in ways}
    for way, figures in found.items():
        print(f"{way:24}", *(f"{name} {value:.4g}" for name, value in figures.items()))
    if flags.write:
        about = {"machine": platform.processor() or platform.machine(), "jax": jax.__version__, **vars(flags)}
        PAGE.write_text(json.dumps({"about": about, "ways": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
