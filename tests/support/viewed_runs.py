"""Workdirs of two runs, written without training."""

import json
import math
from dataclasses import replace
from pathlib import Path

from tiny_runs import get_config

from jaxrlhf.config import to_json
from jaxrlhf.tracking import Call, JsonLines, Sample, SampleFile, TimelineFile

HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>\u202e & \"quoted\" </div>"
STEPS = 40


def write_runs(root: Path, *, steps: int = STEPS) -> Path:
    """Write runs `one` and `two` with different learning rates; the first has episodes with a tool."""
    for number, name in enumerate(("one", "two")):
        config = replace(get_config(), name=name, seed=number)
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(to_json(config)))
        append_steps(root / name, range(1, steps + 1), number)
        answers = SampleFile(root / name / "evaluation.jsonl")
        for step in (0, steps // 2, steps):
            answers.add(sample(step, problem, 0, float(step > 10 * problem)) for problem in range(4))
        answers.close()
    return root


def append_steps(workdir: Path, steps: range, number: int, *, resumed_step: int | None = None) -> None:
    """Append metrics, samples and calls of some steps."""
    metrics = JsonLines(workdir / "metrics.jsonl", resumed_step=resumed_step)
    samples = SampleFile(workdir / "samples.jsonl", resumed_step=resumed_step)
    timeline = TimelineFile(workdir / "timeline.json", resumed=resumed_step is not None)
    for step in steps:
        score = 1 - math.exp(-step / (12 + 8 * number)) + 0.05 * math.sin(7.3 * step)
        metrics.log(
            step, {"score/mean": score, "kl/ref": step / 1000, "time/step_s": 1.5, "mine": 1.0, "odd": math.nan}
        )
        samples.add(sample(step, row // 4, row % 4, float((row + step) % 3 == 0)) for row in range(8))
        calls = (("actor", "generate_sequences", 0.0, 0.7), ("reward", "compute_reward", 0.3, 0.8))
        calls += (("actor", "update_actor", 0.9, 1.5),)
        timeline.append(Call(role, verb, 1.5 * step + a, 1.5 * step + b, "pool") for role, verb, a, b in calls)
    for file in (metrics, samples, timeline):
        file.close()


def sample(step: int, problem: int, copy: int, score: float) -> Sample:
    """Return one response; the third to each problem is an episode, the fourth is unscorable."""
    response = HOSTILE if copy == 1 else f"{problem} apples and {step} pears make {problem + step}."
    call = {"function": {"name": "calculator", "arguments": {"expression": f"{problem}+{step}"}}}
    spoken = [{"role": "user", "content": f"Question {problem} {HOSTILE}"}, {"role": "assistant", "tool_calls": [call]}]
    spoken += [{"role": "tool", "content": str(problem + step)}, {"role": "assistant", "content": response}]
    texts = [piece for word in response.split(" ") for piece in (word, " ")]
    tokens = {
        "text": [*texts, ""],
        "logp": [-float(i % 3) for i in range(len(texts) + 1)],
        "gap": [1e-7 * 10 ** (i % 5) for i in range(len(texts) + 1)],
        **({} if problem else {"entropy": [0.5 * (i % 4) for i in range(len(texts))] + [None]}),
    }
    return Sample(
        step=step,
        prompt=f"Question {problem} {HOSTILE}",
        response=response,
        score=None if copy == 3 else score,
        prompt_length=9,
        response_length=len(response.split()),
        truncated=copy == 1,
        parts={"right": score, HOSTILE: 0.5},
        logp_gap=1e-7 * (copy + 1),
        answer=str(problem + step),
        episode={"messages": spoken, "turns": [], "stop": "done", "failure": None} if copy == 2 else None,
        tokens=tokens if copy < 3 else None,
    )
