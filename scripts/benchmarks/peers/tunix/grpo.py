"""Steps of Tunix's GRPOLearner on a workload, on CPU with its own sampler. Prints one JSON line.

    python -m scripts.benchmarks.peers.tunix.grpo --workload fixed --models DIR

Run this in an environment with google-tunix 0.1.7.
"""

from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import RLCluster

from scripts.benchmarks.peers.phases import BETA, bench
from scripts.benchmarks.peers.tunix import learner as ours


def learner() -> GRPOLearner:
    """Return a learner with groups and the KL to the reference in the loss; it computes no old log-probabilities."""
    responses = ours.WORKLOAD.responses
    if ours.FLAGS.micro % responses:
        raise ValueError(f"--micro {ours.FLAGS.micro} has to be a multiple of the {responses} responses to a prompt")
    cluster = RLCluster(
        actor=ours.load(),
        reference=ours.load(),
        tokenizer=ours.TASK.tokenizer(),
        cluster_config=ours.cluster_config(micro_prompts=ours.FLAGS.micro // responses, critic=False),
    )
    settings = GRPOConfig(num_generations=responses, num_iterations=1, beta=BETA, epsilon=0.2)
    return GRPOLearner(rl_cluster=cluster, algo_config=settings, reward_fns=ours.reward)


if __name__ == "__main__":
    with bench.Memory() as memory:
        ours.train(learner())
    ours.CLOCK.report("tunix_grpo", ours.FLAGS.workload, memory, ours.PACKAGES)
