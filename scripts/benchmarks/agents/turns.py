"""Benchmark of episodes with many turns and slow tools. Prints a table, and writes results/agents.json with `--write`.

    python -m scripts.benchmarks.agents.turns --episodes 256 --turns 6 --pause 2 [--trl-episodes 64] [--write]

Measures seconds and prefilled tokens in three modes: as it is, without the caches of sessions, and turn by turn. Also
reports the share of replies with the same tokens in every mode, and with one episode alone.

An environment talks for some turns and takes 0 to `--pause` seconds for each answer, except after the last reply. Turn
by turn means that the next turn is sampled when all answers of a turn have arrived, as in loops that call a batch
engine once a turn. `--trl-episodes N` measures N episodes in TRL's own tool loop and N episodes here, with equal
weights, lengths and pauses; TRL has a separate Python environment, which is created if missing. TRL calls the tools of
one episode after the other, so its time grows with the number of episodes.
"""

import argparse
import json
import os
import tempfile
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
from jaxrlhf.models.huggingface.save import save_params
from jaxrlhf.models.parameters import param_shapes
from scripts.benchmarks import workload as bench
from scripts.benchmarks.agents.talking import ANSWER_DIGITS
from scripts.benchmarks.compare_peers import PINS, environment
from scripts.pages import RESULTS

FILE = RESULTS / "agents.json"
PASSES = 4
REPLY_TOKENS, ANSWER_TOKENS = 24, ANSWER_DIGITS + 8


Figures = dict[str, float]
Replies = list[tuple[int, ...]]
"""Tokens of every reply, ordered by episode."""


class TurnByTurn(EnvironmentPool):
    """Environment pool that holds answers back until all episodes have an answer in the turn."""

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


def config_of(flags: argparse.Namespace) -> ModelConfig:
    """Return the model's configuration."""
    return ModelConfig(
        family="qwen2",
        vocab_size=len(embedded_tokenizer()),
        hidden_size=flags.width,
        intermediate_size=4 * flags.width,
        num_layers=flags.layers,
        num_heads=flags.width // 32,
        num_kv_heads=flags.width // 64,
        head_dim=32,
    )


def weights_of(config: ModelConfig) -> Any:
    """Return random weights."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: np.float32(0.05 * rng.standard_normal(leaf.shape)), param_shapes(config, "lm"))


def engine_of(flags: argparse.Namespace) -> Engine:
    """Return an engine with room for the longest episode."""
    config = config_of(flags)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
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
    engine.load(jax.device_put(weights_of(config), jax.devices()[0]), version=0)
    return engine


def measure(engine: Engine, flags: argparse.Namespace, way: str, only: int | None = None) -> tuple[Figures, Replies]:
    """Run all episodes once, or only episode `only`; return figures and replies."""
    settings = Environment(
        factory="scripts.benchmarks.agents.talking:Talks",
        max_turns=flags.turns,
        turn_tokens=REPLY_TOKENS,
        cut_turns="close",
        observation_tokens=ANSWER_TOKENS,
        workers=flags.episodes,
    )
    problems = [
        Problem(number, "", (5,), record={"number": number, "turns": flags.turns, "pause_s": flags.pause})
        for number in (range(flags.episodes) if only is None else [only])
    ]
    pool = EnvironmentPool((settings,))
    if way == "turn by turn":
        pool = TurnByTurn((settings,), episodes=flags.episodes)
    submit = EngineService.submit
    if way == "without session caches":
        EngineService.submit = lambda self, request, *a, **k: submit(self, replace(request, keep=False), *a, **k)  # type: ignore[method-assign]
    before = engine.prefill.prompt_tokens, engine.prefill.reused_tokens
    loop = AgentLoop(settings, ChatFormat(embedded_tokenizer()), pool, 32, engine.response_tokens)
    load, start = os.getloadavg()[0], time.perf_counter()
    try:
        batch = loop.run(
            engine, problems, Sampling(min_tokens=REPLY_TOKENS), copies=1, seed=1, width=32 + engine.response_tokens
        )
    finally:
        EngineService.submit = submit  # type: ignore[method-assign]
        pool.close()
        engine.free()
    seconds = time.perf_counter() - start
    assert batch.episodes is not None
    records = batch.episodes.records
    assert all(len(record.turns) == flags.turns for record in records), records[0]
    asked, reused = engine.prefill.prompt_tokens - before[0], engine.prefill.reused_tokens - before[1]
    figures = {
        "seconds": seconds,
        "prefilled_tokens": float(asked - reused),
        "reused_share": reused / max(asked, 1),
        "drawn_tokens": float(batch.sequences.mask_BT.sum()),
        "load_before": load,
    }
    return figures, [turn.reply.tokens for record in records for turn in record.turns]


def measure_compiled(engine: Engine, flags: argparse.Namespace, way: str) -> tuple[Figures, Replies]:
    """Run the episodes until a pass compiles nothing, at most `PASSES` times; return the last pass.

    The compiled sizes depend on timing, so several passes may compile. `compiled` counts the programs that the last
    pass compiled.
    """
    for _ in range(PASSES):
        before = len(engine.compiled)
        figures, replies = measure(engine, flags, way)
        figures["compiled"] = float(len(engine.compiled) - before)
        if not figures["compiled"]:
            break
    return figures, replies


def measure_trl(flags: argparse.Namespace) -> Figures:
    """Run as many episodes in TRL's tool loop."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(flags)
        save_params(weights_of(config), config, folder, tokenizer=embedded_tokenizer())
        sizes = {"episodes": flags.episodes, "turns": flags.turns, "pause": flags.pause}
        sizes |= {"reply-tokens": REPLY_TOKENS, "answer-tokens": ANSWER_DIGITS}
        python = environment("trl", flags.environments.absolute())
        command = [python, "-m", "scripts.benchmarks.peers.trl.tools"]
        command += ["--model", folder, *(text for name, size in sizes.items() for text in (f"--{name}", str(size)))]
        load = os.getloadavg()[0]
        return bench.printed(command) | {"load_before": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pause", type=float, default=2.0, help="longest answer of a tool, in seconds")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--trl-episodes", type=int, default=0, help="episodes to compare with TRL's loop; 0 skips it")
    parser.add_argument("--environments", type=Path, default=Path("bench_environments"), help="where TRL lives")
    parser.add_argument("--write", action="store_true", help="write results/agents.json")
    flags = parser.parse_args()
    engine = engine_of(flags)
    ways = ("as it is", "without session caches", "turn by turn")
    found, drawn = dict[str, Figures](), dict[str, Replies]()
    for way in ways:
        found[way], drawn[way] = measure_compiled(engine, flags, way)
        shown(way, found[way])
    last = flags.episodes - 1
    same = {way: alike(drawn[way], drawn[ways[0]]) for way in ways[1:]}
    same["alone"] = alike(measure(engine, flags, ways[0], only=last)[1], drawn[ways[0]][-flags.turns :])
    shown("the same replies, share", same)
    beside: dict[str, Figures] = {}
    if flags.trl_episodes:
        fewer = argparse.Namespace(**{**vars(flags), "episodes": flags.trl_episodes})
        beside = {"as it is": shown("as it is, beside TRL", measure_compiled(engine, fewer, "as it is")[0])}
        beside["TRL's tool loop"] = shown("TRL's tool loop", measure_trl(fewer))
        print("seconds of TRL's:", beside["as it is"]["seconds"] / beside["TRL's tool loop"]["seconds"])
    if flags.write:
        write(flags, found, same, beside)


def alike(ours: Replies, theirs: Replies) -> float:
    """Return the share of replies with the same tokens."""
    return sum(one == other for one, other in zip(ours, theirs, strict=True)) / len(theirs)


def shown(way: str, figures: Figures) -> Figures:
    """Print the figures and return them."""
    print(f"{way:24}", *(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)
    return figures


def write(flags: argparse.Namespace, found: dict[str, Figures], same: Figures, beside: dict[str, Figures]) -> None:
    """Write results/agents.json."""
    names = ("episodes", "trl_episodes", "turns", "pause", "slots", "width", "layers")
    about = bench.about("jax")
    about["versions"] |= PINS["trl"] if beside else {}
    about |= {name: getattr(flags, name) for name in names}
    FILE.write_text(
        json.dumps({"about": about, "ways": found, "same_replies": same, "beside_trl": beside}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
