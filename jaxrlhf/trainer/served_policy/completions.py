"""Completions of a file of prompts, scored where something scores."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxrlhf.batch import Problem
from jaxrlhf.config import Config, PromptFile, Refusal, Sampling
from jaxrlhf.data.images import portable
from jaxrlhf.data.sources import Loaded
from jaxrlhf.data.tokenizer import decoder
from jaxrlhf.dataflows.step import value_of
from jaxrlhf.tracking import RunConsole
from jaxrlhf.tracking.records import jsonable
from jaxrlhf.trainer.phase import load_split
from jaxrlhf.trainer.policy import ChosenPolicy, choose_policy
from jaxrlhf.workers.reward import response_texts

_SEED = 20_000_011
"""Seed of the first prompts' completions; further ones count on from there."""
_PROGRESS = {"completions": "{:,} completions"}


def write_completions(
    config: Config,
    policy: str,
    out: Path,
    *,
    step: int | None,
    samples: int,
    sampling: Sampling,
    scored: bool,
    best: bool,
) -> int:
    """Answer the training problems of a configuration and write them, with their records.

    Args:
      policy: A run's workdir, a Hugging Face directory, a GGUF file, or a hub id.
      out: A new `.jsonl` file, to which a step's completions are added at a time, or `.parquet`.
      step: Step of a run's checkpoint; None is the newest.
      samples: Answers per prompt.
      scored: Score them by the configuration's rewards.
      best: Write the answer of the highest score alone; a prompt without any score has none.

    Returns:
      Number of completions.
    """
    chosen = choose_policy(config, policy, step)
    loaded = load_split(chosen.config, chosen.tokenizer, "train")
    _check_fields(loaded, chosen.config, out)
    count, kept = 0, list[dict[str, Any]]()
    steps = -(-len(loaded.problems) // chosen.config.rollout.prompts_per_step)
    with RunConsole(steps=steps, columns=_PROGRESS) as console, _new_file(out) as file:
        answers = _answers(chosen, loaded, console, samples=samples, sampling=sampling, scored=scored, best=best)
        for number, rows in enumerate(answers, start=1):
            count += len(rows)
            console.log(number, {"completions": count})
            if out.suffix == ".parquet":
                kept += rows
                continue
            file.writelines(_line(row, out) for row in rows)
            file.flush()
        if out.suffix == ".parquet":
            file.write(_parquet(kept, out))
    return count


def _check_fields(loaded: Loaded, config: Config, out: Path) -> None:
    """Raise `Refusal` if the file cannot hold the records, before they are answered."""
    key = _image_key(config)  # which is written in another form
    records = ({name: problem.record[name] for name in problem.record if name != key} for problem in loaded.problems)
    if out.suffix == ".parquet":
        _parquet([*records], out)
        return
    for record in records:
        _line(record, out)


def _line(row: Mapping[str, Any], out: Path) -> bytes:
    """A row as a line of JSON."""
    try:
        line = json.dumps(jsonable(row), ensure_ascii=False)
    except TypeError as error:
        raise Refusal(f"{out}: a field of the records is not JSON ({error}); name a .parquet file") from error
    # Half of a surrogate pair has no UTF-8; written as a backslash escape it is still JSON.
    return line.encode("utf-8", "backslashreplace") + b"\n"


def _parquet(rows: Sequence[Mapping[str, Any]], out: Path) -> bytes:
    """Rows as a file of Parquet, with a column for each field that any of them has."""
    import pyarrow
    import pyarrow.parquet

    names, made = dict.fromkeys(name for row in rows for name in row), io.BytesIO()
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        pyarrow.parquet.write_table(table, made)
    except (ValueError, TypeError, OverflowError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise Refusal(f"{out}: fields of the records make no columns ({reason}); name a .jsonl file") from error
    return made.getvalue()


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write; if the block fails before anything is in it, it is not there, so that the next try may begin."""
    try:
        with path.open("xb") as file:
            yield file
    except BaseException:
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
        raise


def _answers(
    chosen: ChosenPolicy,
    loaded: Loaded,
    console: RunConsole,
    *,
    samples: int,
    sampling: Sampling,
    scored: bool,
    best: bool,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of some prompts at a time, in the order of the file."""
    per_step = chosen.config.rollout.prompts_per_step
    if loaded.dropped_too_long:
        most = f"rollout.max_prompt_tokens={chosen.config.rollout.max_prompt_tokens}"
        console.print(f"{loaded.dropped_too_long} of {loaded.total} prompts are longer than {most} and left out")
    decode, problems = decoder(chosen.tokenizer), loaded.problems
    with chosen.roles(console) as roles:
        for start in range(0, len(problems), per_step):
            some = problems[start : start + per_step]
            future = roles.actor.generate_sequences(some, sampling, responses_per_prompt=samples, seed=_SEED + start)
            score_B = np.full(len(some) * samples, np.nan)
            if scored:
                scores = value_of(roles.reward.compute_reward(some, future))
                score_B = np.where(scores.scorable_B, scores.score_B, np.nan)
            texts = response_texts(value_of(future), decode)
            yield [
                {**_asked(some[b // samples], chosen.config), "completion": texts[b], "sample": b % samples}
                | ({"score": float(score_B[b])} if scored else {})
                for b in (best_of_groups(score_B, samples) if best else range(len(texts)))
            ]


def _asked(problem: Problem, config: Config) -> dict[str, Any]:
    """The record of a prompt, with its images where it had them."""
    key = _image_key(config)
    images = {key: [portable(image.source) for image in problem.images]} if key is not None else {}
    return {**problem.record, **images}


def _image_key(config: Config) -> str | None:
    return config.data.image_key if isinstance(config.data, PromptFile) else None


def best_of_groups(score_B: np.ndarray, samples: int) -> list[int]:
    """The row with the highest score of every group, the first of several; none of a group without a score."""
    score_PG = score_B.reshape(-1, samples)
    return [
        group * samples + int(np.nanargmax(score_G))
        for group, score_G in enumerate(score_PG)
        if not np.isnan(score_G).all()
    ]
