"""Server metrics in Prometheus' text format."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from jaxrlhf.engine.service import EngineService, ServiceCounts

_HELP = {
    "requests": "Choices requested from the engine.",
    "completed": "Choices that were completed.",
    "cancelled": "Choices that were cancelled, by a closed connection or a time-out.",
    "failed": "Choices that failed in the engine.",
    "sampled_tokens": "Tokens sampled.",
    "prompt_tokens": "Tokens of prompts that were prefilled.",
    "cached_tokens": "Tokens of prompts that were found in the cache.",
    "queue_s": "Seconds that choices waited for a slot, summed.",
    "busy_slots": "Slots that sampled tokens, summed over dispatches.",
    "slots": "All slots, summed over dispatches.",
    "drafted_tokens": "Drafted tokens that were verified.",
    "accepted_tokens": "Drafted tokens that were sampled.",
}


@dataclass
class HttpCounts:
    """Counts of HTTP answers by path and status, and number of open requests."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    in_progress: int = 0


def prometheus(service: EngineService, http: HttpCounts) -> str:
    """Return all metrics of a server in Prometheus' text format."""
    lines: list[str] = []

    def add(metric: str, kind: str, meaning: str, values: Mapping[str, float]) -> None:
        lines.extend([f"# HELP jaxrlhf_{metric} {meaning}", f"# TYPE jaxrlhf_{metric} {kind}"])
        lines.extend(f"jaxrlhf_{metric}{labels} {value}" for labels, value in values.items())

    for name in (each.name for each in fields(ServiceCounts)):
        metric = f"{name.removesuffix('_s')}_seconds_total" if name.endswith("_s") else f"{name}_total"
        add(metric, "counter", _HELP[name], {"": getattr(service.counts, name)})
    add("waiting", "gauge", "Choices without a response yet.", {"": service.waiting})
    add("http_under_way", "gauge", "Requests under way.", {"": http.in_progress})
    answers = {f'{{path="{path}",status="{status}"}}': n for (path, status), n in sorted(http.answers.items())}
    add("http_answers_total", "counter", "Answers by path and status.", answers)
    return "\n".join(lines) + "\n"
