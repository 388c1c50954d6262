"""Model card of an export, in the hub's format: base model, data, settings and results."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import read_object, reading
from jaxrlhf.tracking.files import CURVE, METRICS, SETTINGS
from jaxrlhf.tracking.plots import save_learning_curve
from jaxrlhf.tracking.records import read_records
from jaxrlhf.trainer.resume import PUT_BACK
from jaxrlhf.version import __version__

CARD = "README.md"
Settings = Mapping[str, Any]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FIGURES = {
    "eval/accuracy": "accuracy on held-out problems or pairs",
    "score/mean": "mean score of the step's responses",
    "preference/accuracy": "share of the step's pairs ranked as labelled",
    "response/length_mean": "mean length of its responses, tokens",
    "response/truncated_fraction": "share of its responses that were cut",
    "kl/ref": "KL to the reference, nats per token",
    "policy/entropy": "entropy, nats per token",
    "supervised/loss": "loss",
}


@dataclass(frozen=True)
class Exported:
    """Description of an export.

    Attributes:
      step: Step of the checkpoint; the card has the metrics up to this step.
      scores: True for a reward model, False for a policy.
      adapters: True for adapters alone, without the base weights.
      average: True for the average of the weights that the run kept.
      name: Name on the hub; None is the directory's name.
    """

    step: int
    scores: bool = False
    adapters: bool = False
    average: bool = False
    name: str | None = None


def write_card(run: Path, directory: Path, exported: Exported) -> None:
    """Write `README.md`, and the learning curve if there is one, next to the exported weights of a run."""
    from huggingface_hub import ModelCard

    settings = read_object(run / SETTINGS, PUT_BACK)
    logged = read_records(run / METRICS) if (run / METRICS).is_file() else ()
    records = [record for record in logged if record["step"] <= exported.step]
    exported = replace(exported, name=exported.name or directory.name)
    with reading(run / SETTINGS, PUT_BACK):
        text = _text(settings, records, exported, curve=_save_curve(run, directory))
        metadata = _metadata(settings, exported)
    ModelCard(f"---\n{metadata}\n---\n\n{text}").save(directory / CARD)


def _save_curve(run: Path, directory: Path) -> bool:
    """Draw the learning curve into the directory; return False if the run has nothing to draw."""
    if not (run / METRICS).is_file():
        return False
    try:
        save_learning_curve(run / METRICS, directory / CURVE)
    except Refusal:
        return False
    return True


def _metadata(settings: Settings, exported: Exported) -> str:
    """Return the card's YAML metadata; models and data sets that are not on the hub are left out."""
    from huggingface_hub import ModelCardData

    base = _hub_id(settings["model"].get("path"))
    tags = ["jaxrlhf", "reward-model" if exported.scores else "reinforcement-learning"]
    fields: dict[str, Any] = {"base_model_relation": "adapter" if exported.adapters else "finetune"} if base else {}
    return ModelCardData(
        base_model=base,
        datasets=sorted({one for data in _data_sets(settings["data"]) if (one := _hub_id(data.get("path")))}) or None,
        library_name="peft" if exported.adapters else "transformers",
        pipeline_tag="text-classification" if exported.scores else "text-generation",
        tags=[*tags, str(settings["algorithm"]["class"]).lower()],
        **fields,
    ).to_yaml()


def _hub_id(path: object) -> str | None:
    """Return the hub id in a path, without its revision; None if the path is a directory."""
    named = str(path or "").partition("@")[0]
    return named if _HUB_ID.fullmatch(named) and not Path(named).exists() else None


def _data_sets(data: Settings) -> list[Settings]:
    return [source["data"] for source in data["sources"]] if data["class"] == "Mixture" else [data]


def _text(settings: Settings, records: Sequence[Settings], exported: Exported, *, curve: bool) -> str:
    what = "reward model" if exported.scores else "language model"
    what = f"Adapters of a {what}" if exported.adapters else f"A {what}"
    average = ", the average of its weights until then" if exported.average else ""
    parts = [
        f"# {str(exported.name).rpartition('/')[2]}",
        f"{what}, trained with {settings['algorithm']['class']} by jaxrlhf {__version__}: step {exported.step} of "
        f"{settings['steps']}{average}.",
        "## Settings",
        _table(_chosen(settings)),
    ]
    if figures := _figures(records):
        parts += ["## Figures", f"As they were at step {exported.step}, on the run's own data.", _table(figures)]
    parts += [f"![Learning curve]({CURVE})"] if curve else []
    parts += ["## Use", f"```python\n{_loading(exported)}```"]
    if not exported.scores and settings.get("system_prompt"):
        parts.append(f"It was trained with this system message:\n\n```text\n{settings['system_prompt']}\n```")
    if exported.scores:
        parts.append("The score is the only label's logit, for a prompt and a response with its end-of-turn token.")
    return "\n\n".join(parts) + "\n"


def _loading(exported: Exported) -> str:
    """Return the Python code that loads the model."""
    kind = "SequenceClassification" if exported.scores else "CausalLM"
    loader = f"Auto{'PeftModel' if exported.adapters else 'Model'}For{kind}"
    imports = (
        f"from peft import {loader}\nfrom transformers import AutoTokenizer"
        if exported.adapters
        else f"from transformers import {loader}, AutoTokenizer"
    )
    labels = ", num_labels=1" if exported.adapters and exported.scores else ""
    return (
        f'{imports}\n\nmodel = {loader}.from_pretrained("{exported.name}"{labels})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{exported.name}")\n'
    )


def _chosen(settings: Settings) -> dict[str, str]:
    """Return the main settings of a run, for the card's table."""
    algorithm, rollout = settings["algorithm"], settings["rollout"]
    generates = "responses_per_update" in algorithm
    trained = algorithm["critic"] if "critic" in algorithm and not generates else settings["actor"]
    optimizer, lora = trained["optimizer"], trained["lora"]
    kl = algorithm.get("kl")
    rows = {
        "base": _called(settings["model"]),
        "data": "; ".join(_called(one) for one in _data_sets(settings["data"])),
        "algorithm": algorithm["class"],
        "rewards": ", ".join(_called(part) for part in settings["rewards"]["parts"]) if generates else None,
        "environment": settings["environment"]["class"] if settings["environment"] else None,
        "a step": f"{rollout['prompts_per_step']} prompts x {rollout['responses_per_prompt']} responses"
        if generates
        else None,
        "an update": _per_update(algorithm),
        "longest prompt and response": f"{rollout['max_prompt_tokens']} and {rollout['max_response_tokens']} tokens",
        "temperature": f"{rollout['sampling']['temperature']:g}" if generates else None,
        "learning rate": f"{optimizer['learning_rate']:g}, {optimizer['decay']}",
        "optimizer": optimizer["factory"] or "AdamW",
        "KL": f"{kl['coefficient']:g}, {kl['class']}, estimator {kl['estimator']}" if kl else None,
        "adapters": f"LoRA of rank {lora['rank']}" if lora else None,
        "staleness": f"{rollout['staleness']} steps" if rollout["staleness"] else None,
        "seed": str(settings["seed"]),
    }
    return {name: value for name, value in rows.items() if value}


def _per_update(algorithm: Settings) -> str | None:
    named = (f"{what}_per_update" for what in ("responses", "pairs", "examples", "solutions"))
    return next((f"{algorithm[name]} {name.partition('_')[0]}" for name in named if name in algorithm), None)


def _called(settings: Settings) -> str:
    """Return the class of some settings with their hub id or file name, without the file's folder, which is private."""
    path = settings.get("path") or settings.get("train") or settings.get("function")
    kind = re.sub(r"Reward$", "", str(settings["class"]))
    if not isinstance(path, str):
        return kind
    hub_id = _hub_id(path)
    if hub_id is not None:
        where = "datasets/" if settings["class"] in ("HubData", "HubPairs", "HubSteps", "Gsm8k") else ""
        return f"[{hub_id}](https://huggingface.co/{where}{hub_id})"
    return f"{kind} `{Path(path).name}`"


def _figures(records: Sequence[Settings]) -> dict[str, str]:
    """Return the newest value of each metric of the card, and for the accuracy also the value before training."""
    newest: dict[str, float] = {}
    for record in records:
        newest |= {name: value for name, value in record.items() if isinstance(value, int | float)}
    names = [*_FIGURES, *sorted(name for name in newest if re.fullmatch(r"eval/[^/]+/[^/]+", name))]
    figures = {_FIGURES.get(name, name): f"{newest[name]:.4g}" for name in names if name in newest}
    before = next((record["eval/accuracy_at_start"] for record in records if "eval/accuracy_at_start" in record), None)
    if before is not None:
        figures[_FIGURES["eval/accuracy"]] += f", before training {before:.4g}"
    return figures


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())))
