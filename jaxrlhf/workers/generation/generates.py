"""Methods of the workers that generate: the actor, and the rollout role on another pool."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from jaxrlhf.batch import EpisodeBatch, Problem, RolloutBatch
from jaxrlhf.batching.partial_rollouts import OpenGroups, PartialRollout, Round
from jaxrlhf.batching.transfer_protocol import ONE_TO_ALL, THREE_D_ALL_MICRO_DP, worker_method
from jaxrlhf.config import Sampling
from jaxrlhf.workers.sampler import Sampler


class Generates(ABC):
    """A worker with a sampler, under the current policy.

    `versions` are those of the weights that every rank of the rollout role was sent; the actor has its own.
    """

    @abstractmethod
    def generating(self, versions: Sequence[int] = ()) -> AbstractContextManager[Sampler]:
        """The sampler, with the weights in its engine within the block."""

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
        """Sample responses, prompt-major.

        Args:
          seed: With a problem's id and the number of the copy it determines a response.
        """
        with self.generating(versions) as sampler:
            return sampler.generate(problems, sampling, responses_per_prompt=responses_per_prompt, seed=seed)

    @worker_method(THREE_D_ALL_MICRO_DP, part="generate")
    def continue_sequences(
        self,
        problems: Sequence[Problem],
        under_way: PartialRollout,
        *,
        sampling: Sampling,
        until: Round,
        versions: Sequence[int] = (),
    ) -> PartialRollout:
        """Draw further tokens of groups under way until enough of them are complete.

        Keys and values of tokens that earlier policies drew are computed again by this one, or kept as they were.

        Args:
          until: End of the round over all ranks, each of which has its share of it.
        """
        with self.generating(versions) as sampler:
            return sampler.go_on(problems, under_way, sampling, until)

    @worker_method(THREE_D_ALL_MICRO_DP, part="generate")
    def run_episodes(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        *,
        responses_per_prompt: int,
        seed: int,
        versions: Sequence[int] = (),
    ) -> EpisodeBatch:
        """Go through episodes that begin with these problems, prompt-major.

        Args:
          seed: With a problem's id, the number of the copy, and the turn it determines a reply.
        """
        with self.generating(versions) as sampler:
            return sampler.run_episodes(problems, sampling, responses_per_prompt=responses_per_prompt, seed=seed)

    @worker_method(THREE_D_ALL_MICRO_DP, part="generate")
    def continue_episodes(
        self,
        problems: Sequence[Problem],
        groups: OpenGroups,
        *,
        sampling: Sampling,
        responses_per_prompt: int,
        until: Round,
        versions: Sequence[int] = (),
    ) -> EpisodeBatch:
        """Go on with groups of episodes until enough of them are complete.

        A reply is drawn by one policy. Episodes of groups that are new to this rank begin; the others go on where they
        are, and their environments with them.

        Args:
          until: End of the round over all ranks, each of which has its share of it.

        Returns:
          Episodes of the groups that are complete now and were not before.
        """
        copies = responses_per_prompt
        with self.generating(versions) as sampler:
            return sampler.continue_episodes(problems, groups, sampling, until, responses_per_prompt=copies)
