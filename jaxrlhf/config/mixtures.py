"""Data sets side by side: mixtures to train on, sets to evaluate on, and which of their records are used."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxrlhf.config.refusal import require
from jaxrlhf.config.rewards import ModelReward, RewardPart
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Settings
from jaxrlhf.config.sources import DataSet
from jaxrlhf.config.training import Sampling


@dataclass(frozen=True)
class Selection(Settings):
    """Records of a training split that are used, and their order.

    Attributes:
      unique: Leave out records whose prompt came before, letter by letter but for spaces and case.
      samples: File `samples.jsonl` of a run; problems whose mean score in it is outside of `band` are left out, and
        those that it does not know are kept. None judges nothing before the run.
      online: Leave out, from the next epoch on, problems whose mean score in this run was outside of `band` the last
        time that they were drawn; as long as any are left for a step.
      band: Lowest and highest mean score of a problem that is neither too hard nor too easy.
      order: `shuffled` anew in every epoch; `given`, as in the file; `by_length`, of the worked solution or, without
        any, the prompt, short ones first; `by_difficulty`, of the mean score in `samples`, easy ones first.
    """

    unique: bool = False
    samples: str | None = None
    online: bool = False
    band: tuple[float, ...] = (0.05, 0.95)
    order: Literal["shuffled", "given", "by_length", "by_difficulty"] = "shuffled"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.band) == 2 and self.band[0] <= self.band[1],
            f"Selection.band takes the lowest and the highest mean score, got {self.band}",
        )
        require(
            self.online or self.samples is not None or self.band == Selection.band,
            f"Selection.band={self.band} is of mean scores, and neither samples nor online gives any; give one of them",
        )
        require(
            self.order != "by_difficulty" or self.samples is not None,
            "Selection.order='by_difficulty' goes by the scores in samples; name a run's samples.jsonl",
        )

    @property
    def of_given_answers(self) -> "Selection":
        """These settings where no responses are scored."""
        return replace(self, online=False, band=self.band if self.samples is not None else Selection.band)


@dataclass(frozen=True, kw_only=True)
class Source(Settings):
    """A data set of a mixture.

    Attributes:
      name: Name in metrics.
      weight: Prompts drawn of it, in proportion to the others' weights.
      rewards: Parts that score its responses, of which the first is its accuracy; None is the run's.
      system_prompt: System message of its prompts; None is the run's.
      environment: Name of the environment, of several, that its records are for; None leaves that to the records.
    """

    name: str
    data: DataSet
    weight: Finite[Positive[float]] = 1.0
    rewards: tuple[RewardPart, ...] | None = None
    system_prompt: str | None = None
    environment: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rewards(self.rewards, "Source")


@dataclass(frozen=True)
class Mixture(Settings):
    """Several data sets, of which every step draws in proportion to their weights."""

    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names([source.name for source in self.sources], "Mixture.sources")


@dataclass(frozen=True, kw_only=True)
class EvaluationSet(Settings):
    """A held-out data set with settings of its own.

    Attributes:
      name: Name in metrics.
      data: Data set, whose held-out split is answered.
      rewards: Parts that score its answers, of which the first is its accuracy; None is the run's.
      problems: Problems of that split, at most.
      samples: Answers per problem: one is greedy; of several, pass@k, maj@k and avg@k are reported.
      sampling: Sampling of several answers.
      system_prompt: System message of its prompts; None is the run's.
    """

    name: str
    data: DataSet
    rewards: tuple[RewardPart, ...] | None = None
    problems: Positive[int] = 256
    samples: Positive[int] = 1
    sampling: Sampling = field(default_factory=Sampling)
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        several = self.samples > 1
        require(
            (several and not self.sampling.greedy) or self.sampling == Sampling(),
            f"EvaluationSet.samples={self.samples} and sampling={self.sampling}: "
            + ("several greedy answers are one; sample them" if several else "one answer is greedy; drop sampling"),
        )
        _check_rewards(self.rewards, "EvaluationSet")


@dataclass(frozen=True)
class Evaluation(Settings):
    """Accuracy on held-out problems: the mean score of the first reward part on greedy answers.

    Attributes:
      every_steps: Steps between evaluations; 0 evaluates only before the first and after the last step.
      problems: Problems of the held-out split of `data`, at most; of a mixture, of each source.
      sets: Further data sets, each with rewards, sampling and metrics of its own.
    """

    every_steps: NotNegative[int] = 10
    problems: Positive[int] = 256
    sets: tuple[EvaluationSet, ...] = ()


Data = DataSet | Mixture


def check_names(names: Sequence[str], what: str) -> None:
    """Refuse names that are missing, given twice, or no part of a metric's name."""
    require(len(names) > 0, f"{what} is empty; give at least one")
    twice = [name for name, count in Counter(names).items() if count > 1]
    wrong = [name for name in names if not name or set(name) & set("/@ ")]
    require(
        not twice and not wrong,
        f"{what} need a name each, all different and without '/', '@' and spaces, got {list(names)}",
    )


def _check_rewards(parts: tuple[RewardPart, ...] | None, owner: str) -> None:
    if parts is None:
        return
    require(len(parts) > 0, f"{owner}.rewards is empty; name at least one, or None for those of the run")
    require(
        not any(isinstance(part, ModelReward) for part in parts),
        f"{owner}.rewards names a ModelReward, which scores the responses of the whole run; put it in Config.rewards",
    )
