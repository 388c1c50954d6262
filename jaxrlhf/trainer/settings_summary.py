"""Table of derived settings that a run prints before it starts."""

from collections.abc import Sequence

from jaxrlhf.batch import Problem
from jaxrlhf.config import Config, CosineLengthReward, MathReward, PolicyGradient, RewardPart
from jaxrlhf.data.sources import Loaded
from jaxrlhf.models import AnyModel, CausalLM
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.rewards.mathematics.stated import read_as_text
from jaxrlhf.runtime import compilation_cache
from jaxrlhf.single_controller.pools import Pools
from jaxrlhf.trainer.phase import RunData
from jaxrlhf.workers.summary import SummaryRow

_SHOWN = 5
"""Maximum number of a split's malformed records that the table shows."""
_READ = 1000
"""Maximum number of reference answers of a split that are checked before the start."""


def settings_rows(
    config: Config,
    model: AnyModel,
    pools: Pools,
    data: RunData,
) -> list[SummaryRow]:
    """Return the rows of the table, for a configuration on its devices.

    Raises:
      Refusal: The devices cannot hold a layout or a token budget.
    """
    return [
        ("run", "algorithm", type(config.algorithm).__name__, f"{config.steps} steps"),
        ("run", "model", _count(weight_counts(model).total), _kind(model)),
        compilation_cache.settings_row(),
        *_split_rows("training", data.train, len(data.train.problems)),
        *_reference_rows(config, data),
        *_selection_rows(data),
        *_held_out_rows(config, data),
        *[("data", f"set {one.settings.name}", f"{len(one.problems)} problems", "evaluated") for one in data.sets],
        *([] if data.examples is None else _split_rows("examples", data.examples, len(data.examples.problems))),
        *_step_rows(config),
        *pools.rows(),
    ]


def _kind(model: AnyModel) -> str:
    return model.name if isinstance(model, CausalLM) else f"{model.family}, {model.num_layers} layers"


def _split_rows(name: str, split: Loaded, wanted: int) -> list[SummaryRow]:
    used, bad = min(wanted, len(split.problems)), len(split.malformed)
    dropped = f"{split.dropped_too_long} of {split.total} dropped as too long"
    if split.kept is not None:
        dropped = f"{dropped}; tokenized in {split.kept}"
    rows: list[SummaryRow] = [("data", name, f"{used} problems", dropped)]
    rows += [("data", f"{name}, malformed", f"{bad} left out", what) for what in split.malformed[:_SHOWN]]
    if split.spelled:
        what = f"{len(split.spelled)} records contain control tokens; handled by data.control_tokens"
        rows += [("data", f"{name}, control tokens", what, split.spelled[0])]
    return rows


def _held_out_rows(config: Config, data: RunData) -> list[SummaryRow]:
    """Build the rows of the held-out split, also if nothing is evaluated."""
    if data.evaluation.total or data.sets:
        return _split_rows("held out", data.evaluation, len(data.held_out))
    kind = type(config.data).__name__
    return [("data", "held out", "none", f"nothing is evaluated: {kind} has no held-out records; set some there")]


def _reference_rows(config: Config, data: RunData) -> list[SummaryRow]:
    """Build the rows of reference answers that `MathReward` can only compare as text."""
    parts = [part for parts in (config.rewards.parts, *config.source_rewards.values()) for part in parts]
    splits: list[tuple[str, Sequence[RewardPart], Sequence[Problem]]] = [
        ("references", parts, data.train.problems),
        ("held-out references", parts, data.held_out),
    ]
    for one in data.sets:
        of_set = config.rewards.parts if one.settings.rewards is None else one.settings.rewards
        splits.append((f"references of set {one.settings.name}", of_set, one.problems))
    rows: list[SummaryRow] = []
    for name, rewards, problems in splits:
        rewards = [*rewards, *(part.correct for part in rewards if isinstance(part, CosineLengthReward))]
        if not any(isinstance(part, MathReward) for part in rewards):
            continue
        answers = [problem.answer for problem in problems[:_READ] if problem.answer is not None]
        if texts := read_as_text(answers):
            what = f"such as {texts[0][:60]!r}: MathReward accepts only responses with the same text"
            rows.append(("data", f"{name} read as text", f"{len(texts)} of {len(answers)} checked", what))
    return rows


def _selection_rows(data: RunData) -> list[SummaryRow]:
    """Build one row per data source with the number of used problems, unless a single source is used whole."""
    rows: list[SummaryRow] = []
    for (name, index), chosen in zip(data.train.problems.sources, data.selected, strict=True):
        if name or len(chosen.kept) < len(index):
            left_out = f"left out: {chosen.repeated} duplicates and {chosen.outside} outside of the band"
            rows.append(("data", f"training {name}".strip() + ", used", f"{len(chosen.kept)} problems", left_out))
    return rows


def _step_rows(config: Config) -> list[SummaryRow]:
    algorithm, rollout = config.algorithm, config.rollout
    updates = algorithm.updates_per_step(config.rollout)
    rows: list[SummaryRow] = [
        ("step", "problems", f"{algorithm.problems_per_step(config.rollout)}", "per step"),
        ("step", "updates", f"{updates}", f"per step, {updates * config.steps} in the run"),
        ("step", "longest sequence", f"{rollout.max_prompt_tokens + rollout.max_response_tokens}", "tokens"),
    ]
    if isinstance(algorithm, PolicyGradient):
        product = f"{rollout.prompts_per_step} prompts x {rollout.responses_per_prompt}"
        rows.insert(1, ("step", "responses", f"{rollout.responses_per_step}", product))
        rows.insert(2, ("step", "minibatch", f"{algorithm.responses_per_update} responses", "per update"))
        rows += _staleness_rows(config, algorithm)
    saving = config.saving
    every = f"every {saving.every_steps} steps" if saving.every_steps else "at the end"
    rows.append(
        ("step", "checkpoints", every, f"keeping the newest {saving.keep_last} and the best {saving.keep_best}")
    )
    if config.cold_start is not None:
        rows.append(("step", "cold start", f"{config.cold_start.steps} updates", "supervised, before the first step"))
    return rows


def _staleness_rows(config: Config, algorithm: PolicyGradient) -> list[SummaryRow]:
    """Build the rows of a run that learns from responses of older policies; none without staleness."""
    if not (staleness := config.rollout.staleness):
        return []
    how = (
        "generated while models are updated"
        if config.generates_apart
        else "generation and updates alternate on one pool"
    )
    correction = algorithm.correction_for(config.rollout)
    chosen = "chosen because of the staleness" if algorithm.correction == "auto" else "as configured"
    if correction is None and algorithm.old_logp == "bypass":
        chosen = "in the ratio of the loss, by old_logp='bypass'"
    rollout, rows = config.rollout, []
    if rollout.over_provision > 1:
        in_progress = f"{rollout.groups_in_flight} for {rollout.prompts_per_step}"
        most = staleness - config.steps_ahead
        first = "in the order of arrival; " if rollout.order == "arrival" else ""
        put_off = f"{first}a group is postponed at most {most} time{'s' * (most > 1)}"
        rows = [("step", "groups in flight", in_progress, put_off)]
    return [
        ("step", "staleness", f"{staleness}", how),
        *rows,
        ("step", "correction", "none" if correction is None else repr(correction), chosen),
    ]


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f}{unit} parameters"
    return f"{number} parameters"
