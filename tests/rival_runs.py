"""A program that runs an algorithm, or its rival on the same task: `rival_runs.py ALGORITHM SEED WORKDIR`."""

import sys
from dataclasses import replace

import jaxrlhf
from jaxrlhf.config import PPO, RLOO, Config


def config_of(name: str, seed: int) -> Config:
    """Safe RLHF and PRIME as they ship; PPO and RLOO with all that they have in common with those."""
    config = jaxrlhf.load("safe_rlhf_digits" if name in ("SafeRLHF", "PPO") else "prime_letters")
    given = config.algorithm
    match name:
        case "PPO":
            rival = PPO(lam=given.lam, responses_per_update=given.responses_per_update, critic=given.critic)
            config = replace(config, algorithm=rival)
        case "RLOO":
            config = replace(config, algorithm=RLOO(responses_per_update=given.responses_per_update, kl=None))
    assert type(config.algorithm).__name__ == name
    return replace(config, name=name, seed=seed, compute_dtype="float32", devices=1)


if __name__ == "__main__":
    name, seed, workdir = sys.argv[1:]
    jaxrlhf.run(replace(config_of(name, int(seed)), workdir=workdir))
