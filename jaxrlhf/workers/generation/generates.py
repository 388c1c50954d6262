"""Methods of the workers that generate: the actor, and the rollout role on another pool."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from jaxrlhf.batch import EpisodeBatch, Problem, RolloutBatch
from jaxrlhf.batching.partial_rollouts import OpenGroups, PartialRollout, Round
from jaxrlhf.batching.transfer_protocol import ONE_TO_ALL, THREE_D_ALL_MICRO_DP, worker_method
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.workers.sampler import Sampler


class Generates(ABC):
    """A worker with a sampler, under the current policy.

    `versions` are those of the weights that every rank of the rollout role was sent; the actor has its own. `until` is
    the end of a round over all ranks, each of which has its share of it. `seed` determines a response with the
    problem's id and the number of the copy, and a reply of an episode with the turn, too.
    """

    waits_between_parts: ClassVar[bool] = False
    """True if the engine keeps its weights and what is under way from call to call, on devices of its own."""
    _being_drawn: Iterator[RolloutBatch] = iter(())

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
        """Sample responses, prompt-major."""
        with self.generating(versions) as sampler:
            return sampler.generate(problems, sampling, responses_per_prompt=responses_per_prompt, seed=seed)

    @worker_method(THREE_D_ALL_MICRO_DP, part="generate")
    def generate_part(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        *,
        responses_per_prompt: int,
        seed: int,
        part: int,
        parts: int,
        versions: Sequence[int] = (),
    ) -> RolloutBatch:
        """Sample the next part of what `generate_sequences` does: groups that are complete before those of later parts.

        Calls are for one part after another, from 0 on.

        Raises:
          Refusal: This worker's devices do other work between parts.
        """
        if not self.waits_between_parts:
            raise Refusal(
                "rollout.stream_parts has generation wait between parts, which a pool of its own can; give it one"
            )
        with self.generating(versions) as sampler:
            if part == 0:
                how = {"responses_per_prompt": responses_per_prompt, "seed": seed, "parts": parts}
                self._being_drawn = sampler.generate_parts(problems, sampling, **how)
            return next(self._being_drawn)

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
        """Go through episodes that begin with these problems, prompt-major."""
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

        Returns:
          Episodes of the groups that are complete now and were not before.
        """
        copies = responses_per_prompt
        with self.generating(versions) as sampler:
            return sampler.continue_episodes(problems, groups, sampling, until, responses_per_prompt=copies)
