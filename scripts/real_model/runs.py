"""Settings that the claims share, runs in processes of their own, and what those leave behind."""

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrlhf.config import (
    Algorithm,
    Checkpointing,
    Config,
    Evaluation,
    FunctionReward,
    Gsm8k,
    Optimizer,
    Pretrained,
    PromptFile,
    Rewards,
    Rollout,
    TokenRecords,
    Training,
)
from scripts.real_model import tasks

Figures = dict[str, Any]
"""Numbers of a claim by name."""

MACHINE = ("time/", "throughput/", "memory/", "compile/", "relayout/", "transfer/", "offload/", "reward/overlapped")
"""Metrics that the clock, the machine and the placement decide."""


@dataclass(frozen=True)
class Given:
    """Inputs of a claim's measurement.

    Attributes:
      model: GGUF file of the model.
      gsm8k: GSM8K as a hub id or a folder.
      folder: Folder for what the claim writes.
    """

    model: Path
    gsm8k: str
    folder: Path


def training(learning_rate: float, **settings: Any) -> Training:
    """Training settings of a model of 135 M weights on few tokens."""
    optimizer = Optimizer(learning_rate=learning_rate, weight_decay=0.0)
    return Training(optimizer, **{"tokens_per_microbatch": 2048, **settings})


def config_of(given: Given, name: str, algorithm: Algorithm, **settings: Any) -> Config:
    """Configuration of a run in float32 on one device, which saves once, at its end."""
    chosen: dict[str, Any] = {
        "steps": 1,
        "actor": training(1e-5),
        "evaluation": Evaluation(every_steps=0),
        "checkpoint": Checkpointing(every_steps=0, keep_best=0),
        "token_records": TokenRecords(responses=0),
        "compute_dtype": "float32",
        "devices": 1,
        "trackers": (),
        "model": Pretrained(str(given.model)),
        "workdir": str(given.folder / name),
    }
    return Config(name=name, algorithm=algorithm, **{**chosen, **settings})


def rollout(prompts: int, responses: int, tokens: int, *, prompt_tokens: int = 64, **settings: Any) -> Rollout:
    """Rollout of a step, with a slot for each response."""
    sizes: dict[str, Any] = {"prompts_per_step": prompts, "responses_per_prompt": responses}
    sizes |= {"max_prompt_tokens": prompt_tokens, "max_response_tokens": tokens}
    return Rollout(slots=prompts * responses, **sizes, **settings)


def scored_by_vowels() -> Rewards:
    """Rewards by which no two responses score alike."""
    return Rewards(parts=(FunctionReward("scripts.real_model.tasks:vowels"),), workers=1)


def written(given: Given, name: str, records: Iterable[Mapping[str, Any]]) -> str:
    """Path of a file with these records, one a line."""
    file = given.folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def prompt_file(given: Given, name: str, records: Iterable[Mapping[str, Any]], **keys: Any) -> PromptFile:
    """Records as training prompts, without a held-out split."""
    return PromptFile(train=written(given, name, records), **{"answer_key": None, **keys})


def requests(given: Given) -> PromptFile:
    """Prompts that ask for short sentences."""
    return prompt_file(given, "requests", ({"prompt": pair["prompt"]} for pair in tasks.pairs(tasks.NOUNS, each=1)))


def sentences(given: Given, count: int) -> PromptFile:
    """Prompts with short sentences to imitate."""
    found = [{"prompt": pair["prompt"], "solution": pair["chosen"]} for pair in tasks.pairs(tasks.NOUNS, each=1)]
    return prompt_file(given, "sentences", found[:count], solution_key="solution")


def questions(given: Given, count: int) -> list[dict[str, Any]]:
    """The first records of GSM8K's test split."""
    from jaxrlhf.data.sources import load_problems
    from jaxrlhf.data.tokenizer import load_tokenizer
    from jaxrlhf.models import resolve

    tokenizer = load_tokenizer(str(resolve(given.model)))
    loaded = load_problems(Gsm8k(path=given.gsm8k), tokenizer, split="evaluation", max_prompt_tokens=4096)
    return [dict(problem.record) for problem in loaded.problems[:count]]


def train(config: Config, *, devices: int = 1, killed_at: int | None = None) -> int:
    """Run a configuration in a process of its own, and return the steps that it wrote down.

    Args:
      devices: CPU devices of the process.
      killed_at: Step after whose checkpoint the process gets SIGKILL, whatever it is doing; None lets it end.

    Raises:
      RuntimeError: The run failed, or ended before it was killed.
    """
    context, before = multiprocessing.get_context("spawn"), dict(os.environ)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    if devices > 1:
        os.environ["NPROC"] = "32"
    try:
        process = context.Process(target=_run, args=(config,))
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    if killed_at is not None:
        while not (config.folder / "checkpoints" / f"step_{killed_at}").exists() and process.is_alive():
            time.sleep(0.05)
        process.kill()
    process.join()
    if (process.exitcode == 0) == (killed_at is not None):
        raise RuntimeError(f"the run in {config.folder} ended with exit code {process.exitcode}")
    return len(records(config.folder / "metrics.jsonl"))


def _run(config: Config) -> None:
    from jaxrlhf.trainer.run import run

    run(config)


def records(path: Path) -> list[dict[str, Any]]:
    """The objects of a `.jsonl`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(config: Config) -> list[dict[str, float]]:
    """Metrics of a run by step, without those of the clock and the machine."""
    found = records(config.folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if not name.startswith(MACHINE)} for record in found]


def curve(config: Config, name: str) -> list[float]:
    """One metric of a run by step."""
    return [record[name] for record in records(config.folder / "metrics.jsonl")]


def digests(config: Config) -> dict[str, str]:
    """Digests of the bytes of every array of a run's last checkpoint, by role and path."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from etils import epath

    found = {}
    [folder] = config.folder.glob(f"checkpoints/step_{config.steps}")
    for item in sorted(folder.glob("*/_METADATA")):
        handler = ocp.PyTreeCheckpointHandler()
        saved = handler.metadata(epath.Path(item.parent)).tree
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        tree = handler.restore(epath.Path(item.parent), args=ocp.args.PyTreeRestore(restore_args=how))
        for path, array in jax.tree.leaves_with_path(tree):
            name = f"{item.parent.name}/{jax.tree_util.keystr(path)}"
            found[name] = hashlib.sha256(np.asarray(array).tobytes()).hexdigest()
    return found


def trained(config: Config, item: str, shapes: Any, *, step: int | None = None) -> Any:
    """A tree of arrays of a run's checkpoint.

    Args:
      item: Name of the checkpoint item, such as `actor`.
      shapes: Shapes and dtypes of its arrays.
      step: Step of the checkpoint; None is the last.
    """
    from jaxrlhf.checkpoint import Checkpoints
    from jaxrlhf.trainer.saved_policy import placed

    with closing(Checkpoints(config.folder / "checkpoints", read_only=True)) as checkpoints:
        return checkpoints.read(step or config.steps, {item: placed(shapes)})[item]
