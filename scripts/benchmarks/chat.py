"""Benchmark of whole training steps of a real chat model, from the command on. Prints one JSON line.

    python -m scripts.benchmarks.chat --workload smollm2_grpo [--steps 4]
    python -m scripts.benchmarks.chat --workload smollm2_sft --logp 4   # log-probabilities of four solutions, untrained

`chat_workload.py` defines the workloads. The run is `jaxrlhf.run`: prompts use the model's chat template, and metrics,
samples and files are written as in any run.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, get_args

import jaxrlhf
from jaxrlhf.config import (
    DPO,
    GRPO,
    PPO,
    SFT,
    Algorithm,
    Checkpointing,
    Config,
    Evaluation,
    FunctionReward,
    KLInLoss,
    KLInReward,
    Optimizer,
    PairFile,
    Pretrained,
    PromptFile,
    Remat,
    Rewards,
    Rollout,
    Sampling,
    Selection,
    Training,
)
from scripts.benchmarks import chat_workload as chat
from scripts.benchmarks import workload as bench

FIRST_LOSS = {"sft": "actor/loss", "dpo": "preference/loss"}
PHASES = ("step", "generate", "prepare", "update", "reward")


def config_of(
    workload: bench.Workload,
    model: Path,
    records: Path,
    *,
    steps: int,
    tokens_per_microbatch: int,
    remat: Remat,
    workdir: Path,
) -> Config:
    """Return the configuration of a workload: one update a step, records in the order of their file."""
    training = Training(
        optimizer=Optimizer(learning_rate=1e-6, weight_decay=0.0),
        tokens_per_microbatch=tokens_per_microbatch,
        remat=remat,
    )
    one_update: dict[str, Any] = {"responses_per_update": workload.sequences}
    algorithms: dict[str, Algorithm] = {
        "grpo": GRPO(kl=KLInLoss(coefficient=0.04), **one_update),
        "ppo": PPO(kl=KLInReward(coefficient=0.04), old_logp="sampler", lam=0.95, critic=training, **one_update),
        "sft": SFT(examples_per_update=workload.prompts),
        "dpo": DPO(pairs_per_update=workload.prompts),
    }
    pairs, sampled = workload.algorithm == "dpo", workload.algorithm in ("grpo", "ppo")
    prompts = PromptFile(train=str(records), prompt_key="messages", solution_key="solution")
    answers = PairFile(train=str(records), prompt_key="messages", chosen_key="solution", rejected_key="rejected")
    scored = Rewards(parts=(FunctionReward("scripts.benchmarks.chat_workload:lowercase_share"),)) if sampled else None
    return Config(
        name="bench",
        algorithm=algorithms[workload.algorithm],
        steps=steps,
        model=Pretrained(str(model)),
        data=answers if pairs else prompts,
        selection=Selection(order="given"),
        rewards=scored or (Rewards() if pairs else Rewards(parts=())),
        rollout=Rollout(
            prompts_per_step=workload.prompts,
            responses_per_prompt=workload.responses,
            max_prompt_tokens=workload.prompt_tokens,
            max_response_tokens=workload.new_tokens,
            sampling=Sampling(ignore_eos=True),
        ),
        actor=training,
        evaluation=Evaluation(every_steps=0),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        workdir=str(workdir),
    )


def measure(workload: bench.Workload, config: Config) -> dict[str, Any]:
    """Run the steps; return medians without the first two steps (of two, the last), and the end times of steps."""
    records: list[dict[str, float]] = []
    ends: list[float] = []

    def on_step(_: int, metrics: dict[str, float]) -> None:
        ends.append(time.time())
        records.append(metrics)

    jaxrlhf.run(config, on_step=on_step)
    warm = records[min(2, len(records) - 1) :]

    def middle(name: str) -> float:
        return round(median(record[name] for record in warm), 4)

    seconds = {f"{phase}_s": middle(f"time/{phase}_s") for phase in PHASES}
    figures: dict[str, Any] = {phase: amount for phase, amount in seconds.items() if amount > 0}
    if "tokens/generated" in warm[-1]:
        generated = median(record["tokens/generated"] for record in warm)
        if generated != workload.sequences * workload.new_tokens:
            raise ValueError(f"{generated} tokens were generated, not {workload.new_tokens} a response")
        figures |= {"generated_tokens": generated}
        figures |= {"generated_tokens_per_s": round(generated / figures["generate_s"], 1)}
    if (loss := FIRST_LOSS.get(workload.algorithm)) is not None:
        figures["losses"] = [round(record[loss], 5) for record in records]
    steps = [round(record["time/step_s"], 3) for record in records]
    return figures | {"trained_tokens": middle("actor/tokens"), "steps": steps, "step_ends": ends}


def log_probabilities(config: Config, count: int) -> list[float]:
    """Return the mean log-probability per token of each of the first solutions, by the untrained model."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrlhf import models
    from jaxrlhf.models import tokenizer_of
    from jaxrlhf.trainer.phase import load_data

    assert isinstance(config.model, Pretrained)
    model = models.read_config(config.model.path)
    params = models.load_params(config.model.path, model, "lm")
    problems, found = load_data(config, tokenizer_of(config)).train.problems, []
    for problem in problems[:count]:
        token_RW = np.array([[*problem.prompt_tokens, *problem.solution_tokens]], np.int32)
        position_RW = np.arange(token_RW.shape[1], dtype=np.int32)[None]
        hidden = models.hidden_states(params, model, token_RW, position_RW, np.ones_like(token_RW))
        logits_RWV = jnp.asarray(models.logits(params, model, hidden.hidden_RWD))
        logp_WV = np.asarray(jax.nn.log_softmax(logits_RWV, axis=-1))[0]
        start = len(problem.prompt_tokens)
        index_W = np.arange(start - 1, token_RW.shape[1] - 1)
        found.append(float(logp_WV[index_W, token_RW[0, start:]].mean()))
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    chat.add_flags(parser)
    parser.add_argument("--steps", type=int, default=4, help="the first two are not counted, where there are more")
    parser.add_argument("--tokens-per-microbatch", type=int, default=2304)
    parser.add_argument("--remat", choices=get_args(Remat), default="auto", help="as Training.remat")
    parser.add_argument("--logp", type=int, help="only print log-probabilities of this number of solutions")
    flags = parser.parse_args()
    workload = bench.workload_of(flags, chat.WORKLOADS)
    model = (flags.model or chat.checkpoint(flags.models)).resolve()
    records = chat.records_file(workload, flags.models, model).resolve()
    with tempfile.TemporaryDirectory() as workdir, bench.Memory() as memory:
        config = config_of(
            workload,
            model,
            records,
            steps=flags.steps,
            tokens_per_microbatch=flags.tokens_per_microbatch,
            remat=flags.remat,
            workdir=Path(workdir),
        )
        if flags.logp:
            print(json.dumps({"logp": log_probabilities(config, flags.logp)}))
            return
        figures = measure(workload, config)
    figures |= {"peak_rss_mb": round(memory.peak_mb), "versions": bench.versions("jax", "jaxlib", "numpy")}
    print(json.dumps({"bench": "chat", "workload": flags.workload, **figures}))


if __name__ == "__main__":
    main()
