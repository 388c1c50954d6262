"""Steps of GRPO on one, two and eight devices."""

from dataclasses import replace

from jaxrlhf.config import GRPO, Config, KLInLoss, Layout
from scripts.real_model.runs import (
    Figures,
    Given,
    config_of,
    numbers,
    records,
    requests,
    rollout,
    scored_by_vowels,
    train,
    training,
)

LAYOUTS = {1: Layout(), 2: Layout(fsdp=2), 8: Layout(data=2, fsdp=4)}


def _config(given: Given, devices: int) -> Config:
    config = config_of(
        given,
        f"on_{devices}",
        GRPO(responses_per_update=16, kl=KLInLoss(coefficient=0.01)),
        data=requests(given),
        rollout=rollout(8, 4, 16),
        rewards=scored_by_vowels(),
        actor=training(1e-5, layout=LAYOUTS[devices], tokens_per_microbatch=4096),
        steps=2,
    )
    return replace(config, devices=devices)


def measure(given: Given) -> Figures:
    """Compare metrics and responses of two steps with those on one device."""
    configs = {devices: _config(given, devices) for devices in LAYOUTS}
    for devices, config in configs.items():
        train(config, devices=devices)
    alone = numbers(configs[1])
    texts = [record["response"] for record in records(configs[1].folder / "samples.jsonl")]
    found: Figures = {"responses": len(texts), "loss": [record["actor/loss"] for record in alone]}
    for devices in list(LAYOUTS)[1:]:
        config = configs[devices]
        apart = {
            f"{name} of step {one['step']}": abs(value - one[name]) / max(1.0, abs(one[name]))
            for one, other in zip(alone, numbers(config), strict=True)
            for name, value in other.items()
            if name in one
        }
        worst = max(apart, key=lambda name: apart[name])
        own = [record["response"] for record in records(config.folder / "samples.jsonl")]
        found[f"on_{devices}"] = {
            "metrics": len(apart),
            "largest": apart[worst],
            "worst": worst,
            "responses_equal": sum(map(str.__eq__, own, texts)),
        }
    return found
