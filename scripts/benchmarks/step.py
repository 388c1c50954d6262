"""Benchmark of whole steps of a workload: generation, rewards, reference, update. Prints one JSON line.

    python -m scripts.benchmarks.step --workload fixed [--steps 5] [--prompts 16] [--new-tokens 256]
    JAX_NUM_CPU_DEVICES=2 python -m scripts.benchmarks.step --workload longtail --staleness 1 --apart

With `--apart` one device generates and another device trains. CPU devices of one process share its threads, so this
measures the cost of a schedule, not its gain on separate devices.
`workload.py` defines the workloads. Loop, files and metrics are those of `python -m jaxrlhf.train`; only the data
set is a list of random prompts.
"""

import argparse
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from jaxrlhf.batch import Problem
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.config import (
    GRPO,
    PPO,
    Checkpointing,
    Config,
    Evaluation,
    FunctionReward,
    KLInLoss,
    KLInReward,
    Optimizer,
    Pool,
    Pretrained,
    PromptFile,
    RayCluster,
    Remat,
    Rewards,
    Rollout,
    Sampling,
    Training,
)
from jaxrlhf.data import Loader
from jaxrlhf.data.tokenizer import decoder
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.trainer.asynchronous.off_policy import OffPolicy
from jaxrlhf.trainer.log import PhaseLog
from jaxrlhf.trainer.loop import Loop
from jaxrlhf.trainer.schedule import Synchronous
from jaxrlhf.workers.build import Phase
from scripts.benchmarks import workload as bench

APART = (Pool("policy", 1, ("actor", "reference")), Pool("generation", 1, ("rollout", "reward")))


def config_of(
    workload: bench.Workload,
    model: Path,
    *,
    steps: int,
    tokens_per_microbatch: int,
    remat: Remat,
    staleness: int = 0,
    over_provision: float = 1.0,
    apart: bool = False,
    hosts: bool = False,
    old_logp: Literal["auto", "bypass"] = "auto",
) -> Config:
    """Return the configuration of a workload, with one update a step."""
    training = Training(
        optimizer=Optimizer(learning_rate=1e-6, weight_decay=0.0),
        tokens_per_microbatch=tokens_per_microbatch,
        remat=remat,
    )
    one_update: dict[str, Any] = {"responses_per_update": workload.sequences}
    algorithm = (
        GRPO(kl=KLInLoss(coefficient=0.04), old_logp=old_logp, **one_update)
        if workload.algorithm == "grpo"
        else PPO(kl=KLInReward(coefficient=0.04), old_logp="sampler", lam=0.95, critic=training, **one_update)
    )
    return Config(
        name="bench",
        algorithm=algorithm,
        steps=steps,
        model=Pretrained(str(model)),
        data=PromptFile(train="random prompts", answer_key=None),
        rewards=Rewards(parts=(FunctionReward("scripts.benchmarks.workload:even_share"),)),
        rollout=Rollout(
            prompts_per_step=workload.prompts,
            responses_per_prompt=workload.responses,
            max_prompt_tokens=workload.prompt_tokens,
            max_response_tokens=workload.new_tokens,
            sampling=Sampling(ignore_eos=not bench.PRESETS[workload.preset].ends),
            staleness=staleness,
            over_provision=over_provision,
        ),
        pools=APART if apart else (),
        devices=2 if hosts and not apart else None,
        cluster=RayCluster(platform="cpu") if hosts else None,
        actor=training,
        evaluation=Evaluation(every_steps=0),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
    )


def measure(workload: bench.Workload, config: Config, workdir: Path) -> dict[str, Any]:
    """Run the steps; return medians without the first two steps (of two, the last), and the first step's seconds."""
    tokenizer = bench.tokenizer(bench.PRESETS[workload.preset], outside=False)
    steps_drawn = config.steps + config.rollout.staleness + 2  # some groups are started that no step learns from
    tokens = bench.prompts(workload, count=workload.prompts * steps_drawn)
    problems = [Problem(index, " ".join(f"t{token}" for token in row), row) for index, row in enumerate(tokens)]
    records: list[dict[str, float]] = []
    ends: list[float] = []

    def on_step(_: int, metrics: dict[str, float]) -> None:
        ends.append(time.perf_counter())
        records.append(metrics)

    lengths = [len(row) for row in tokens]
    if config.rollout.over_provision > 1:
        lengths += range(workload.prompt_tokens + 1, workload.prompt_tokens + workload.new_tokens)
    schedule = OffPolicy if config.rollout.staleness else Synchronous
    with closing(launch(config, tokenizer, progress=lambda *_: None, workdir=workdir)) as pools:
        stage = Phase(config, tuple(config.all_roles), config.steps)
        with closing(pools.roles(stage)) as roles, closing(Checkpoints(workdir / "checkpoints", keep_last=1)) as saved:
            loop = Loop(
                config=config,
                roles=roles,
                schedule=schedule(config, roles, Loader(problems, per_step=workload.prompts, seed=0)),
                held_out=[],
                checkpoints=saved,
                log=lambda done: PhaseLog(workdir, steps=config.steps, first_step=done, trackers=config.trackers),
                decode=decoder(tokenizer),
                prompt_lengths=lengths,
                on_step=on_step,
            )
            start = time.perf_counter()
            loop.run()
    warm = records[min(2, len(records) - 1) :]

    def middle(name: str) -> float:
        return round(median(record[name] for record in warm), 4)

    kept = ("staleness/", "time/policy_idle", "time/generation_idle", "sampler/kl")
    rest = {name: middle(name) for name in warm[-1] if name.startswith(kept) and "share_age" not in name}
    generated = median(record["tokens/generated"] for record in warm)
    generate_s = middle("time/generate_s")
    return {
        "step_s": middle("time/step_s"),
        "generate_s": generate_s,
        "prepare_s": middle("time/prepare_s"),
        "update_s": middle("time/update_s"),
        "reward_s": middle("time/reward_s"),
        "generated_tokens": generated,
        "generated_tokens_per_s": round(generated / generate_s, 1),
        "first_step_s": round(ends[0] - start, 2),
        "steps": [round(record["time/step_s"], 3) for record in records],
        **rest,
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bench.add_flags(parser)
    parser.add_argument("--steps", type=int, default=6, help="the first two are not counted, where there are more")
    parser.add_argument("--tokens-per-microbatch", type=int, default=2304)
    parser.add_argument("--remat", choices=get_args(Remat), default="auto", help="as Training.remat")
    parser.add_argument("--staleness", type=int, default=0, help="as Rollout.staleness")
    parser.add_argument("--over-provision", type=float, default=1.0, help="as Rollout.over_provision")
    parser.add_argument("--apart", action="store_true", help="generate on a device of its own")
    parser.add_argument("--hosts", action="store_true", help="two hosts of Ray with a device each; NPROC=1 is a core")
    parser.add_argument("--old-logp", choices=("auto", "bypass"), default="auto", help="as PolicyGradient.old_logp")
    flags = parser.parse_args()
    workload = bench.workload_of(flags)
    # Hosts load the tokenizer from its files, and refuse a tokenizer that cannot reproduce the text that it reads.
    model = (bench.checkpoint_of_bytes if flags.hosts else bench.checkpoint)(workload.preset, flags.models)
    config = config_of(
        workload,
        model.resolve(),
        steps=flags.steps,
        tokens_per_microbatch=flags.tokens_per_microbatch,
        remat=flags.remat,
        staleness=flags.staleness,
        over_provision=flags.over_provision,
        apart=flags.apart,
        hosts=flags.hosts,
        old_logp=flags.old_logp,
    )
    with tempfile.TemporaryDirectory() as workdir, bench.Memory() as memory:
        figures = measure(workload, config, Path(workdir))
    figures |= {"peak_rss_mb": round(memory.peak_mb), "versions": bench.versions("jax", "jaxlib", "numpy")}
    print(json.dumps({"bench": "step", "workload": flags.workload, **figures}))


if __name__ == "__main__":
    main()
