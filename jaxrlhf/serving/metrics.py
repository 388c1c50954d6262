"""Server metrics in Prometheus' text format."""

from collections import Counter
from dataclasses import dataclass, field, fields

from jaxrlhf.engine.service import EngineService, ServiceCounts

_HELP = {
    "requests": "Choices asked of the engine.",
    "completed": "Choices that were completed.",
    "cancelled": "Choices that were cancelled, by a cut connection or a time-out.",
    "failed": "Choices that the engine failed at.",
    "sampled_tokens": "Tokens sampled.",
    "prompt_tokens": "Tokens of prompts that were prefilled.",
    "cached_tokens": "Tokens of prompts that were in the cache.",
    "queue_s": "Seconds that choices waited for a slot, summed.",
    "busy_slots": "Slots that drew tokens, summed over dispatches.",
    "slots": "Slots there were, summed over dispatches.",
}


@dataclass
class HttpCounts:
    """Counts of HTTP answers by path and status, and number of open requests."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    under_way: int = 0


def prometheus(service: EngineService, http: HttpCounts) -> str:
    """Return all metrics of a server in Prometheus' text format."""
    lines = []
    for name in (each.name for each in fields(ServiceCounts)):
        metric = f"jaxrlhf_{name.removesuffix('_s')}_{'seconds_' if name.endswith('_s') else ''}total"
        lines += [f"# HELP {metric} {_HELP[name]}", f"# TYPE {metric} counter"]
        lines.append(f"{metric} {getattr(service.counts, name)}")
    lines += ["# HELP jaxrlhf_waiting Choices without a response yet.", "# TYPE jaxrlhf_waiting gauge"]
    lines.append(f"jaxrlhf_waiting {service.waiting}")
    lines += ["# HELP jaxrlhf_http_under_way Requests under way.", "# TYPE jaxrlhf_http_under_way gauge"]
    lines.append(f"jaxrlhf_http_under_way {http.under_way}")
    lines += [
        "# HELP jaxrlhf_http_answers_total Answers by path and status.",
        "# TYPE jaxrlhf_http_answers_total counter",
    ]
    for (path, status), count in sorted(http.answers.items()):
        lines.append(f'jaxrlhf_http_answers_total{{path="{path}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"
