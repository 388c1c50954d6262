"""Selection of training records, mixtures of data sets, and evaluation settings."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrlhf.config.refusal import require
from jaxrlhf.config.rewards import ModelReward, RewardPart
from jaxrlhf.config.settings import Bound, Finite, NotEmpty, NotNegative, Positive, Settings
from jaxrlhf.config.sources import DataSet
from jaxrlhf.config.training import Sampling

_ASCENDING = Bound(lambda band: sorted(band) == [*band], "the lowest and the highest mean score", tuple)


@dataclass(frozen=True)
class Selection(Settings):
    """Selection and order of the training records.

    Attributes:
      unique: True leaves out records whose prompt repeats an earlier prompt; spaces and letter case are ignored.
      samples: Path of the `samples.jsonl` of a run. Problems whose mean score in this file is outside of `band` are
        left out; problems without a score in this file are kept. None applies no filter before the run.
      online: True filters by the scores of this run: a problem whose mean score was outside of `band` when it was last
        sampled is left out from the next epoch on, unless too few problems for a step would remain.
      band: Lowest and highest mean score of a problem that is neither too hard nor too easy.
      order: `shuffled` reshuffles in every epoch; `given` keeps the order of the file; `by_length` sorts by the length
        of the worked solution (of the prompt if there is no solution), shortest first; `by_difficulty` sorts by the
        mean score in `samples`, easiest first.
    """

    unique: bool = False
    samples: str | None = None
    online: bool = False
    band: Annotated[tuple[float, float], _ASCENDING] = (0.05, 0.95)
    order: Literal["shuffled", "given", "by_length", "by_difficulty"] = "shuffled"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.online or self.samples is not None or self.band == Selection.band,
            f"Selection.band={self.band} filters by mean scores, but samples and online are not set; set one of them",
        )
        require(
            self.order != "by_difficulty" or self.samples is not None,
            "Selection.order='by_difficulty' requires Selection.samples; set samples to the samples.jsonl of a run",
        )


@dataclass(frozen=True, kw_only=True)
class NamedData(Settings):
    """Base class of data sets with a name in metrics, and with their own rewards and system prompt.

    Attributes:
      name: Name of the data set in metrics.
      rewards: Reward parts that score responses to the prompts of this data set; the first part is its accuracy. None
        uses the rewards of the run.
      system_prompt: System message of these prompts; None uses the system prompt of the run.
    """

    name: str
    data: DataSet
    rewards: NotEmpty[tuple[RewardPart, ...]] | None = None
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not any(isinstance(part, ModelReward) for part in self.rewards or ()),
            f"{type(self).__name__}.rewards has a ModelReward, which must score all responses of the run; move it to "
            "Config.rewards",
        )


@dataclass(frozen=True, kw_only=True)
class Source(NamedData):
    """A data set of a mixture.

    Attributes:
      weight: Share of the sampled prompts, relative to the weights of the other sources.
      environment: Name of the environment for this source's records, if the run has several environments; None lets
        each record name its environment.
    """

    weight: Finite[Positive[float]] = 1.0
    environment: str | None = None


@dataclass(frozen=True)
class Mixture(Settings):
    """Mixture of data sets; every step samples from each data set in proportion to its weight."""

    sources: NotEmpty[tuple[Source, ...]]


@dataclass(frozen=True, kw_only=True)
class EvaluationSet(NamedData):
    """Additional data set whose held-out split is answered, with its own rewards, sampling and metrics.

    Attributes:
      problems: Largest number of problems of the held-out split.
      samples: Answers per problem. One answer is greedy; with several answers pass@k, maj@k and avg@k are reported.
      sampling: Sampling settings for several answers per problem.
    """

    problems: Positive[int] = 256
    samples: Positive[int] = 1
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        super().__post_init__()
        several = self.samples > 1
        require(
            (several and not self.sampling.greedy) or self.sampling == Sampling(),
            f"EvaluationSet.samples={self.samples} and sampling={self.sampling}: "
            + ("greedy answers are equal; sample them" if several else "one answer is greedy; remove sampling"),
        )


@dataclass(frozen=True)
class Evaluation(Settings):
    """Accuracy on held-out problems: the mean score of the first reward part on greedy answers.

    Attributes:
      every_steps: Steps between evaluations; 0 evaluates only before the first step and after the last step.
      problems: Largest number of problems of the held-out split of `data`; for a mixture, of each source.
      sets: Additional held-out data sets, each with its own rewards, sampling and metrics.
    """

    every_steps: NotNegative[int] = 10
    problems: Positive[int] = 256
    sets: tuple[EvaluationSet, ...] = ()


Data = DataSet | Mixture
