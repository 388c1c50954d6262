"""Generation methods of workers: the actor, and the rollout role on another pool."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from jaxrlhf.batch import Problem, RolloutBatch
from jaxrlhf.batching.partial_rollouts import OpenGroups, Round
from jaxrlhf.batching.transfer_protocol import ONE_TO_ALL, THREE_D_ALL_MICRO_DP, worker_method
from jaxrlhf.config import Sampling
from jaxrlhf.workers.sampler import Sampler


class GenerationWorker(ABC):
    """Worker with a sampler of the current policy.

    Arguments that several methods have:
      versions: Version of the weights that each rank of the rollout role received; empty for the actor.
      until: End of a round over all ranks; each rank completes its share.
      seed: Sampling seed. Seed, problem id and copy number determine a response; a reply of an episode depends on its
        turn too.
    """

    @abstractmethod
    def generating(self, versions: Sequence[int] = ()) -> AbstractContextManager[Sampler]:
        """Yield the sampler, with the weights loaded in its engine within the block."""

    @worker_method(ONE_TO_ALL, part="generate")
    def compile_generation(self, prompt_lengths: Sequence[int], *, versions: Sequence[int] = ()) -> None:
        """Compile the programs that generate from prompts of these lengths, so that no later step has to."""
        with self.generating(versions) as sampler:
            sampler.compile_ahead(prompt_lengths)

    @worker_method(THREE_D_ALL_MICRO_DP, part="generate")
    def generate_sequences(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        *,
        responses_per_prompt: int,
        seed: int,
        versions: Sequence[int] = (),
    ) -> RolloutBatch:
        """Sample responses or, with an environment, run episodes that start from the problems; prompt-major."""
        with self.generating(versions) as sampler:
            return sampler.generate(problems, sampling, responses_per_prompt=responses_per_prompt, seed=seed)

    @worker_method(THREE_D_ALL_MICRO_DP, part="generate")
    def continue_groups(
        self,
        problems: Sequence[Problem],
        groups: OpenGroups,
        *,
        sampling: Sampling,
        until: Round,
        versions: Sequence[int] = (),
    ) -> OpenGroups:
        """Continue groups of responses or episodes until enough of them are complete.

        The keys and values of tokens sampled by earlier policies are recomputed with this policy. Each reply of an
        episode is sampled by one policy. Groups of episodes that are new to this rank start; the other episodes and
        their environments continue from their current state.

        Returns:
          The groups with their responses as far as they are sampled, or with the episodes of newly completed groups.
        """
        with self.generating(versions) as sampler:
            return sampler.continue_groups(problems, groups, sampling, until)
