"""Tables of docs/real_model.md from what `python -m scripts.real_model` measured."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Measured = dict[str, Any]
"""real_model.json: for each claim its figures, and when, where and how long they were measured."""


@dataclass(frozen=True)
class Row:
    """A figure of a claim, and what it should be.

    Attributes:
      words: What the figure is.
      name: Its name in the claim's figures; `a/b` is `b` within `a`.
      most, least: Bounds that it should keep.
      equal: Value that it should have; `=name` is that of another figure.
    """

    words: str
    name: str
    most: float | None = None
    least: float | None = None
    equal: Any = None

    def expected(self, figures: Mapping[str, Any]) -> str:
        """The expectation in words; empty where there is none."""
        if self.most is not None:
            return f"at most {shown(self.most)}"
        if self.least is not None:
            return f"at least {shown(self.least)}"
        return "" if self.equal is None else shown(self._wanted(figures))

    def holds(self, figures: Mapping[str, Any]) -> bool | None:
        """Compare the figure with the expectation; None without an expectation."""
        value = figure(figures, self.name)
        if self.most is not None:
            return value <= self.most
        if self.least is not None:
            return value >= self.least
        return None if self.equal is None else value == self._wanted(figures)

    def _wanted(self, figures: Mapping[str, Any]) -> Any:
        if isinstance(self.equal, str) and self.equal.startswith("="):
            return figure(figures, self.equal[1:])
        return self.equal


@dataclass(frozen=True)
class Claim:
    """A claim: its title in the summary and the rows of its table."""

    title: str
    rows: tuple[Row, ...]

    @property
    def anchor(self) -> str:
        """Anchor of the heading that has the title."""
        return re.sub(r"[^a-z0-9 -]", "", self.title.lower()).replace(" ", "-")


_APART = "largest difference of a logit"
CLAIMS = {
    "logits": Claim(
        "The logits are those of transformers",
        (
            Row("tokens of text", "tokens"),
            Row("mean size of a logit", "logit_size"),
            Row(f"float32, {_APART}", "float32/logit_largest", most=1e-3),
            Row("float32, mean difference of a logit", "float32/logit_mean", most=1e-4),
            Row("float32, largest difference of a log-probability", "float32/logp_largest", most=1e-4),
            Row("float32, mean difference of a log-probability", "float32/logp_mean", most=1e-5),
            Row("float32, positions with the same likeliest token", "float32/argmax_equal", equal=1.0),
            Row("bfloat16 from float32, mean of a log-probability, jaxrlhf", "bfloat16/ours/logp_mean"),
            Row("the same of transformers", "bfloat16/theirs/logp_mean"),
            Row("ratio of the two", "bfloat16/ratio", most=1.2),
            Row("bfloat16 from float32, largest of a log-probability, jaxrlhf", "bfloat16/ours/logp_largest"),
            Row("the same of transformers", "bfloat16/theirs/logp_largest"),
            Row("bfloat16, positions with float32's likeliest token, jaxrlhf", "bfloat16/ours/argmax_equal"),
            Row("the same of transformers", "bfloat16/theirs/argmax_equal"),
        ),
    ),
    "sampler": Claim(
        "The sampler's log-probabilities are the trainer's",
        (
            Row("single responses: sampled tokens", "responses/tokens"),
            Row("mean difference of a log-probability", "responses/mean", most=2e-5),
            Row("99.9th percentile", "responses/p999", most=1e-4),
            Row("largest", "responses/largest", most=1e-3),
            Row("conversations: turns of each", "turns/of_each", equal=10),
            Row("sampled tokens", "turns/tokens"),
            Row("mean difference of a log-probability", "turns/mean", most=2e-5),
            Row("99.9th percentile", "turns/p999", most=1e-4),
            Row("largest", "turns/largest", most=1e-3),
        ),
    ),
    "greedy": Claim(
        "Engine, server and transformers give the same greedy answers",
        (
            Row("prompts", "prompts"),
            Row("tokens of the answers", "tokens"),
            Row("prompts that the server made the same tokens of", "prompts_equal", equal="=prompts"),
            Row("answers of the server equal to the engine's", "server_equals_engine", equal="=prompts"),
            Row("answers of the engine equal to transformers'", "engine_equals_theirs"),
            Row("answers of the server equal to transformers'", "server_equals_theirs"),
            Row("largest margin of two logits where answers part", "largest_margin", most=1e-4),
        ),
    ),
    "export": Claim(
        "An exported policy is the trained one",
        (
            Row("change of a logit by training, largest", "changed", least=1e-3),
            Row("weights read again equal the run's, bit by bit", "weights_equal", equal=True),
            Row("logits equal the run's, bit by bit", "logits_equal", equal=True),
            Row(f"{_APART} to transformers with the export", "transformers/logit_largest", most=1e-3),
            Row("files of an export", "files"),
            Row("a second export has the same bytes", "files_equal", equal=True),
            Row("so have the weights of an export of the export", "weight_bytes_equal", equal=True),
            Row("the exported tokenizer makes the same tokens", "tokenizer_equal", equal=True),
        ),
    ),
    "lora": Claim(
        "Adapters go to PEFT and back",
        (
            Row("change of a logit by training, largest", "changed", least=1e-2),
            Row(f"{_APART} to `peft`", "peft/logit_largest", most=1e-3),
            Row("mean difference of a logit to `peft`", "peft/logit_mean", most=1e-4),
            Row("adapters read again equal the run's, bit by bit", "exported_equal", equal=True),
            Row("so do those that `peft` saved", "peft_saved_equal", equal=True),
            Row("loss of the step after a start from the files", "loss_after_start"),
            Row("is that of a run that went on, bit by bit", "start_equal", equal=True),
        ),
    ),
    "quantised": Claim(
        "Adapters learn beside weights of 8 and 4 bits",
        (
            Row("float32: loss of the first step", "float32/loss_first"),
            Row("loss of the sixth", "float32/loss_last"),
            Row("weights, MiB", "float32/weights_mib"),
            Row("of these layers, MiB", "float32/matrices_mib"),
            Row("int8: loss of the first step", "int8/loss_first"),
            Row("loss of the sixth", "int8/loss_last", most=2.0),
            Row("fall of the loss, as a share of float32's", "int8/share_of_fall", least=0.9),
            Row("weights, MiB", "int8/weights_mib"),
            Row("of these layers, MiB", "int8/matrices_mib"),
            Row("mean difference of a log-probability to float32", "int8/logp_mean", most=0.05),
            Row("positions with the same likeliest token", "int8/argmax_equal", least=0.95),
            Row("nf4: loss of the first step", "nf4/loss_first"),
            Row("loss of the sixth", "nf4/loss_last", most=2.0),
            Row("fall of the loss, as a share of float32's", "nf4/share_of_fall", least=0.9),
            Row("weights, MiB", "nf4/weights_mib"),
            Row("of these layers, MiB", "nf4/matrices_mib"),
            Row("mean difference of a log-probability to float32", "nf4/logp_mean"),
            Row("positions with the same likeliest token", "nf4/argmax_equal"),
        ),
    ),
    "dpo": Claim(
        "DPO learns from preference pairs",
        (
            Row("steps of 16 pairs", "steps"),
            Row("loss of the first step", "loss_first"),
            Row("loss of the last", "loss_last", most=0.5),
            Row("held-out pairs ranked rightly before", "accuracy_before"),
            Row("after", "accuracy_after", least=0.9),
        ),
    ),
    "reward_model": Claim(
        "A reward model learns, and PPO learns from it",
        (
            Row("reward model: steps of 16 pairs", "judge/steps"),
            Row("held-out pairs ranked rightly before", "judge/accuracy_before"),
            Row("after", "judge/accuracy_after", least=0.9),
            Row("PPO: steps of 32 responses", "ppo/steps"),
            Row("mean score of the first step", "ppo/score_first"),
            Row("of the last", "ppo/score_last"),
            Row("rise in deviations of the first step's scores", "ppo/rise_in_deviations", least=0.5),
            Row("lowercase letters, share in the first step", "ppo/lowercase_first"),
            Row("in the last", "ppo/lowercase_last"),
        ),
    ),
    "grpo_gsm8k": Claim(
        "GRPO runs on GSM8K",
        (
            Row("loss of the first supervised batch", "losses_first"),
            Row("the same in transformers", "their_first_loss"),
            Row("difference", "loss_gap", most=1e-4),
            Row("losses of the supervised updates", "losses"),
            Row("fall of the loss to the mean of the last three", "fall", least=0.05),
            Row("median seconds of a step", "seconds/step"),
            Row("of these, generating", "seconds/generate"),
            Row("reference and log-probabilities", "seconds/prepare"),
            Row("updates", "seconds/update"),
            Row("peak memory, GB", "peak_gb"),
            Row("mean score by step", "scores"),
            Row("mean length by step, tokens", "lengths"),
            Row("greedy accuracy on 32 held-out problems after the cold start, and at the end", "accuracy"),
            Row("mean difference of sampler and trainer, nats, worst step", "gap_mean", most=2e-5),
        ),
    ),
    "ppo_gsm8k": Claim(
        "PPO runs on GSM8K",
        (
            Row("losses of the supervised updates", "losses"),
            Row("median seconds of a step", "seconds/step"),
            Row("of these, generating", "seconds/generate"),
            Row("reference and log-probabilities", "seconds/prepare"),
            Row("updates", "seconds/update"),
            Row("peak memory, GB", "peak_gb"),
            Row("mean score by step", "scores"),
            Row("mean length by step, tokens", "lengths"),
            Row("greedy accuracy on 32 held-out problems after the cold start, and at the end", "accuracy"),
            Row("mean difference of sampler and trainer, nats, worst step", "gap_mean", most=2e-5),
        ),
    ),
    "killed": Claim(
        "A run that was killed and resumed is the same run",
        (
            Row("steps", "steps"),
            Row("steps written down at the kill", "steps_before_kill"),
            Row("metrics equal, bit by bit", "metrics_equal", equal=True),
            Row("samples equal", "samples_equal", equal=True),
            Row("arrays of the last checkpoint", "arrays"),
            Row("of these equal, bit by bit", "arrays_equal", equal="=arrays"),
        ),
    ),
    "stale": Claim(
        "So is one that learns from responses of the policy before",
        (
            Row("ages of a step's tokens", "ages", equal=[0, 1, 1, 1]),
            Row("KL between sampler and trainer, by step", "sampler_kl"),
            Row("largest importance weight", "largest_weight"),
            Row("steps written down at the kill", "steps_before_kill"),
            Row("metrics equal, bit by bit", "metrics_equal", equal=True),
            Row("samples equal", "samples_equal", equal=True),
            Row("arrays of the last checkpoint", "arrays"),
            Row("of these equal, bit by bit", "arrays_equal", equal="=arrays"),
        ),
    ),
    "devices": Claim(
        "Two and eight devices compute what one does",
        (
            Row("responses of two steps", "responses"),
            Row("equal on two devices", "on_2/responses_equal", equal="=responses"),
            Row("largest difference of a metric", "on_2/largest", most=1e-4),
            Row("which is", "on_2/worst"),
            Row("responses equal on eight devices", "on_8/responses_equal", equal="=responses"),
            Row("largest difference of a metric", "on_8/largest", most=1e-4),
            Row("which is", "on_8/worst"),
        ),
    ),
}


def figure(figures: Mapping[str, Any], name: str) -> Any:
    """A figure by its name, in the parts that the name names."""
    found: Any = figures
    for part in name.split("/"):
        found = found[part]
    return found


def shown(value: Any) -> str:
    """A value as the page has it: three digits of a number."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}"
        case list():
            return ", ".join(map(shown, value))
    return str(value)


def table(name: str, entry: Mapping[str, Any]) -> str:
    """Figures of a claim, what was expected, and when and where they were measured."""
    lines = ["| figure | measured | expected | |", "|---|---|---|---|"]
    for row in CLAIMS[name].rows:
        holds, figures = row.holds(entry["figures"]), entry["figures"]
        mark = "" if holds is None else "holds" if holds else "**does not hold**"
        lines.append(f"| {row.words} | {shown(figure(figures, row.name))} | {row.expected(figures)} | {mark} |")
    about = f"{entry['machine']}; {entry['date']}, commit `{entry['commit']}`, {entry['seconds']:.0f} s."
    return "\n".join([*lines, "", about])


def summary(measured: Measured) -> str:
    """A line for each claim: how many of its expectations are met."""
    lines = ["| claim | expectations met |", "|---|---|"]
    for name, claim in CLAIMS.items():
        if name not in measured:
            lines.append(f"| {claim.title} | not measured |")
            continue
        found = [holds for row in claim.rows if (holds := row.holds(measured[name]["figures"])) is not None]
        lines.append(f"| [{claim.title}](#{claim.anchor}) | {sum(found)} of {len(found)} |")
    return "\n".join(lines)


def memory(peers: Mapping[str, Any]) -> str:
    """Peak memory and seconds of a GRPO step beside TRL's, from the first machine's file that has the workload."""
    entry = peers.get("smollm2_grpo", {})
    names = {"jaxrlhf": "jaxrlhf", "trl": "TRL"}
    if not all("peak_rss_mb" in entry.get(name, {}) for name in names):
        return "Not measured yet: `python -m scripts.benchmarks.compare_peers --workloads smollm2_grpo`."
    lines = ["| | peak MB | step s |", "|---|---|---|"]
    for name, words in names.items():
        own = entry[name]
        lines.append(f"| {words} | {own['peak_rss_mb']:.0f} | {own['step_s']:.3g} |")
    ratio = entry["jaxrlhf"]["peak_rss_mb"] / entry["trl"]["peak_rss_mb"]
    machine = peers["machine"]["processor"]
    return "\n".join([*lines, "", f"That is {ratio:.2f} of TRL's memory. {machine}."])


def parts(measured: Measured, peers: Mapping[str, Any]) -> dict[str, str]:
    """The parts of the page that are measured, by the names of their marks."""
    missing = "Not measured yet."
    tables = {name: table(name, measured[name]) if name in measured else missing for name in CLAIMS}
    return {"summary": summary(measured), **tables, "memory": memory(peers)}
