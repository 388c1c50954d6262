"""Completions of a file of prompts, with scores if requested."""

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
from jaxrlhf.trainer.policy import PolicyRoles, policy_roles
from jaxrlhf.workers.reward import response_texts

_SEED = 20_000_011
"""Seed of the first batch of prompts; the index of a batch's first prompt is added for later batches."""
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
    """Answer the training problems of a configuration, and write the answers with the problems' records.

    Args:
      policy: Policy as in `find_policy`.
      out: New `.jsonl` file, appended to batch by batch, or new `.parquet` file, written at the end.
      step: Step of a run's checkpoint; None is the newest.
      samples: Answers per prompt.
      scored: True scores the answers by the configuration's rewards.
      best: True writes only the answer with the highest score; a prompt without any score gets no row.

    Returns:
      Number of completions.
    """
    found = policy_roles(config, policy, step)
    loaded = load_split(found.config, found.tokenizer, "train")
    _check_fields(loaded, found.config, out)
    count, kept = 0, list[dict[str, Any]]()
    steps = -(-len(loaded.problems) // found.config.rollout.prompts_per_step)
    with RunConsole(steps=steps, columns=_PROGRESS) as console, _new_file(out) as file:
        answers = _answers(found, loaded, console, samples=samples, sampling=sampling, scored=scored, best=best)
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
    """Raise `Refusal` if the file's format cannot hold the records, before anything is generated."""
    key = _image_key(config)  # images are written in another form
    records = ({name: problem.record[name] for name in problem.record if name != key} for problem in loaded.problems)
    if out.suffix == ".parquet":
        _parquet([*records], out)
        return
    for record in records:
        _line(record, out)


def _line(row: Mapping[str, Any], out: Path) -> bytes:
    """Encode a row as a line of JSON."""
    try:
        line = json.dumps(jsonable(row), ensure_ascii=False)
    except TypeError as error:
        raise Refusal(
            f"{out}: a field of the records cannot be written as JSON ({error}); choose a .parquet file"
        ) from error
    # Half of a surrogate pair has no UTF-8 encoding; as a backslash escape it is still valid JSON.
    return line.encode("utf-8", "backslashreplace") + b"\n"


def _parquet(rows: Sequence[Mapping[str, Any]], out: Path) -> bytes:
    """Encode rows as a Parquet file, with a column for each field of any row."""
    import pyarrow
    import pyarrow.parquet

    names, made = dict.fromkeys(name for row in rows for name in row), io.BytesIO()
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        pyarrow.parquet.write_table(table, made)
    except (ValueError, TypeError, OverflowError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise Refusal(
            f"{out}: fields of the records cannot be written as columns ({reason}); choose a .jsonl file"
        ) from error
    return made.getvalue()


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file to write; delete it if the block fails while it is empty, so that the command can be repeated."""
    try:
        with path.open("xb") as file:
            yield file
    except BaseException:
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
        raise


def _answers(
    found: PolicyRoles,
    loaded: Loaded,
    console: RunConsole,
    *,
    samples: int,
    sampling: Sampling,
    scored: bool,
    best: bool,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of `prompts_per_step` prompts at a time, in the order of the prompt file."""
    per_step = found.config.rollout.prompts_per_step
    if loaded.dropped_too_long:
        most = f"rollout.max_prompt_tokens={found.config.rollout.max_prompt_tokens}"
        console.print(f"skipping {loaded.dropped_too_long} of {loaded.total} prompts that are longer than {most}")
    decode, problems = decoder(found.tokenizer), loaded.problems
    with found.launched(console) as roles:
        for start in range(0, len(problems), per_step):
            some = problems[start : start + per_step]
            future = roles.actor.generate_sequences(some, sampling, responses_per_prompt=samples, seed=_SEED + start)
            score_B = np.full(len(some) * samples, np.nan)
            if scored:
                scores = value_of(roles.reward.compute_reward(some, future))
                score_B = np.where(scores.scorable_B, scores.score_B, np.nan)
            texts = response_texts(value_of(future), decode)
            yield [
                {**_record(some[b // samples], found.config), "completion": texts[b], "sample": b % samples}
                | ({"score": float(score_B[b])} if scored else {})
                for b in (best_of_groups(score_B, samples) if best else range(len(texts)))
            ]


def _record(problem: Problem, config: Config) -> dict[str, Any]:
    """Return the record of a prompt, with its images in a portable form."""
    key = _image_key(config)
    images = {key: [portable(image.source) for image in problem.images]} if key is not None else {}
    return {**problem.record, **images}


def _image_key(config: Config) -> str | None:
    return config.data.image_key if isinstance(config.data, PromptFile) else None


def best_of_groups(score_B: np.ndarray, samples: int) -> list[int]:
    """Return the row with the highest score of every group, the first in case of a tie; skip groups without a score."""
    score_PG = score_B.reshape(-1, samples)
    return [
        group * samples + int(np.nanargmax(score_G))
        for group, score_G in enumerate(score_PG)
        if not np.isnan(score_G).all()
    ]
