"""Steps of Tunix's PPOLearner on a workload, on CPU: actor, critic, reference. Prints one JSON line.

    python -m scripts.benchmarks.peers.tunix.ppo --workload ppo --models DIR

Run this in an environment with google-tunix 0.1.7.
"""

from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.utils import create_critic_model

from scripts.benchmarks.peers.phases import BETA, bench
from scripts.benchmarks.peers.tunix import learner as ours


def learner() -> PPOLearner:
    """Return a learner with one response to a prompt and the KL to the reference in the reward."""
    if ours.WORKLOAD.responses != 1:
        raise ValueError(f"it has no groups: one response to a prompt, not {ours.WORKLOAD.responses}")
    actor = ours.load()
    cluster = RLCluster(
        actor=actor,
        critic=create_critic_model(actor),
        reference=ours.load(),
        tokenizer=ours.TASK.tokenizer(),
        cluster_config=ours.cluster_config(micro_prompts=ours.FLAGS.micro, critic=True),
    )
    settings = PPOConfig(num_iterations=1, beta=BETA, gamma=1.0, gae_lambda=0.95)
    return PPOLearner(rl_cluster=cluster, ppo_config=settings, reward_fns=ours.reward)


if __name__ == "__main__":
    with bench.Memory() as memory:
        ours.train(learner())
    ours.CLOCK.report("tunix_ppo", ours.FLAGS.workload, memory, ours.PACKAGES)
