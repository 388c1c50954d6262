"""Metrics and files of a run whose reward function misbehaves."""

import contextlib
import gzip
import io
import json
import logging
import math
import zlib
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_runs import get_config, records

import jaxrlhf
from jaxrlhf.config import GRPO, FunctionReward, KLInLoss, Rewards, TokenRecords, TruncatedImportance, to_json
from jaxrlhf.data.tokenizer import pieces_of
from jaxrlhf.dataflows import ppo

pytestmark = pytest.mark.slow  # whole runs, which all tests of the file read

STEPS = 4
RESPONSES = 16
REWARD = '''
import time
import zlib


def unreliable(prompt, response, answer, record):
    """Digits of the response, but for problems of three kinds."""
    kind = zlib.crc32(record["question"].encode()) % 16
    if kind == 0:
        time.sleep(1000)
    if kind in (1, 2):
        raise RuntimeError("no verdict")
    if kind in (3, 4):
        return float("nan")
    return sum(character.isdigit() for character in response) / 4
'''
FAILURES = {0: "timeout", 1: "exception", 2: "exception", 3: "not-finite", 4: "not-finite"}

EVERY_STEP = {
    "step",
    "score/mean",
    "response/length_mean",
    "response/truncated_fraction",
    "kl/ref",
    "policy/clip_fraction",
    "policy/entropy",
    "sampler/logp_gap_mean",
    "sampler/logp_gap_max",
    "reward/unscorable",
    "reward/overlapped_fraction",
    "time/step_s",
    "time/generate_s",
    "time/reward_s",
    "time/prepare_s",
    "time/update_s",
    "time/relayout_s",
    "throughput/generated_tokens_per_s",
    "throughput/trained_tokens_per_s",
    "compile/count",
    "compile/loaded",
    "compile/seconds",
    "memory/peak_bytes",
}


def failure(sample: dict) -> str | None:
    """The reward's failure on a sample's problem, by the rule above."""
    question = sample["prompt"].removeprefix("<|user|>").removesuffix("<|assistant|>")
    return FAILURES.get(zlib.crc32(question.encode()) % 16)


class OwnLogger:
    """A user's own place for metrics."""

    def __init__(self) -> None:
        self.records, self.closed = [], False

    def log(self, step, metrics) -> None:
        self.records.append((step, metrics["score/mean"]))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def run(programs, tmp_path_factory):
    """A run whose reward fails on some problems, and all that it left behind."""
    workdir = tmp_path_factory.mktemp("metrics")
    (workdir / "reward.py").write_text(REWARD)
    rewards = Rewards(parts=(FunctionReward(f"{workdir}/reward.py:unreliable"),), timeout_s=0.5)
    config = replace(
        get_config(), steps=STEPS, rewards=rewards, cold_start=None, workdir=str(workdir), profile_steps=(2,)
    )
    config = replace(config, token_records=TokenRecords(responses=RESPONSES - 1, entropy=True))
    seen, warnings, prepared = [], [], []
    listener = logging.Handler()
    listener.emit = lambda record: warnings.append(record.getMessage())
    with pytest.MonkeyPatch.context() as patch:
        original = ppo.prepare
        patch.setattr(
            ppo, "prepare", lambda *args, **more: prepared.append((args, original(*args, **more))) or prepared[-1][1]
        )
        patch.setattr(logging.getLogger("jaxrlhf"), "handlers", [listener])
        own, printed = OwnLogger(), io.StringIO()
        with contextlib.redirect_stdout(printed):
            result = jaxrlhf.run(config, on_step=lambda number, metrics: seen.append((number, metrics)), loggers=[own])
    samples = defaultdict(list)
    for sample in records(workdir / "samples.jsonl"):
        samples[sample["step"]].append(sample)
    return SimpleNamespace(
        config=config,
        result=result,
        printed=printed.getvalue(),
        workdir=workdir,
        metrics=records(workdir / "metrics.jsonl"),
        samples=samples,
        seen=seen,
        own=own,
        warnings=warnings,
        prepared=prepared,
    )


def test_every_step_has_the_metrics_of_the_contract(run):
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4]
    for record in run.metrics:
        assert EVERY_STEP - record.keys() == set()
        assert all(isinstance(record[name], int | float) for name in EVERY_STEP)
    assert ["eval/accuracy" in record for record in run.metrics] == [False, True, False, True]
    assert run.result.finished


def test_samples_have_their_tokens_one_by_one(run):
    for number, samples in run.samples.items():
        assert [sample["tokens"] is not None for sample in samples] == [True] * (RESPONSES - 1) + [False]
        entropies = []
        for sample in samples[:-1]:
            tokens = sample["tokens"]
            assert {len(values) for values in tokens.values()} == {sample["response_length"]}
            assert "".join(tokens["text"]) == sample["response"]
            assert np.abs(tokens["gap"]).mean() == pytest.approx(sample["logp_gap"], rel=1e-2, abs=1e-12)
            assert max(tokens["logp"]) <= 0
            entropies += tokens["entropy"]
        if number == 1:  # random weights, which updates of a step hardly move
            assert np.mean(entropies) == pytest.approx(run.metrics[0]["policy/entropy"], rel=2e-2)
            assert np.std(entropies) > 0


def test_text_of_tokens_joins_characters_that_several_of_them_make():
    letters = "naïve 你好 🙂!"

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    pieces = pieces_of(list(letters.encode()), decode)
    assert "".join(pieces) == letters
    assert [piece for piece in pieces if piece] == list(letters) and len(pieces) == len(letters.encode())
    assert "".join(pieces_of([0xE4] * 40, decode)).count("\ufffd") >= 10  # never a character


def test_the_callback_sees_what_is_logged(run):
    for record, (number, metrics) in zip(run.metrics, run.seen, strict=True):
        logged = {"step": number} | {name: value for name, value in metrics.items() if math.isfinite(value)}
        assert {name: value for name, value in record.items() if value is not None} == logged


def test_a_users_own_logger_sees_every_step_and_is_closed(run):
    assert run.own.records == [(record["step"], record["score/mean"]) for record in run.metrics]
    assert run.own.closed


def test_metrics_follow_from_the_samples(run):
    for record in run.metrics:
        samples = run.samples[record["step"]]
        scores = [sample["score"] for sample in samples if sample["score"] is not None]
        lengths = [sample["response_length"] for sample in samples]
        assert len(samples) == RESPONSES
        assert record["score/mean"] == pytest.approx(np.mean(scores), rel=1e-6)
        assert record["response/length_mean"] == np.mean(lengths)
        assert record["response/truncated_fraction"] == np.mean([sample["truncated"] for sample in samples])
        gaps = [sample["logp_gap"] for sample in samples]
        assert record["sampler/logp_gap_mean"] == pytest.approx(np.average(gaps, weights=lengths), rel=1e-4)
        assert max(gaps) <= record["sampler/logp_gap_max"]
        for sample in samples:
            assert 1 <= sample["response_length"] <= 16
            assert sample["prompt_length"] <= 64
            assert isinstance(sample["prompt"], str) and isinstance(sample["response"], str)


def test_entropy_and_kl_are_those_of_all_generated_tokens(run):
    for record, ((_, rollout, _, old_logp_BT, ref_logp_BT, _), _) in zip(run.metrics, run.prepared, strict=True):
        mask_BT = np.asarray(rollout.sequences.mask_BT)
        old = np.asarray(old_logp_BT, np.float64)[mask_BT]
        difference = np.asarray(ref_logp_BT, np.float64)[mask_BT] - old
        assert record["policy/entropy"] == pytest.approx(-old.mean(), rel=1e-5)
        assert record["kl/ref"] == pytest.approx(np.mean(np.expm1(difference) - difference), rel=1e-3, abs=1e-9)


def test_sampler_and_trainer_agree(run):
    assert all(0 <= record["sampler/logp_gap_max"] <= 1e-5 for record in run.metrics)


def test_the_policy_moves(run):
    first, *later = run.metrics
    assert first["kl/ref"] == 0
    assert all(record["kl/ref"] > 1e-6 for record in later)
    assert all(record["actor/grad_norm"] > 0 and record["critic/grad_norm"] > 0 for record in run.metrics)


def test_times_add_up(run):
    for record in run.metrics:
        parts = [record[f"time/{phase}_s"] for phase in ("generate", "prepare", "update", "relayout")]
        assert min(parts) >= 0
        assert sum(parts) <= record["time/step_s"]
        if record["step"] > 1:  # in which the controller's own array maths compile
            # Rewards run beside the models; the step may wait for the rest of them.
            assert record["time/step_s"] <= sum(parts) + record["time/reward_s"] + 1.0
        trained = record["actor/tokens"]
        assert record["throughput/trained_tokens_per_s"] == pytest.approx(trained / record["time/update_s"])
        generated = sum(sample["response_length"] for sample in run.samples[record["step"]])
        assert record["throughput/generated_tokens_per_s"] == pytest.approx(generated / record["time/generate_s"])


def test_nothing_compiles_after_the_first_step(run):
    assert len({record["compile/count"] for record in run.metrics}) == 1


def test_files(run):
    assert json.loads((run.workdir / "config.json").read_text()) == to_json(run.config)
    assert (run.workdir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert {folder.name for folder in (run.workdir / "checkpoints").iterdir()} == {"step_2", "step_4"}
    assert list((run.workdir / "tensorboard").glob("events*"))
    trace = json.loads((run.workdir / "timeline.json").read_text())
    assert sum(event["name"] == "update_critic" for event in trace) == STEPS
    assert sum(event["name"] == "generate_sequences" for event in trace) == STEPS + 3  # the last evaluation too
    answers = records(run.workdir / "evaluation.jsonl")
    assert [answer["step"] for answer in answers] == [0] * 16 + [2] * 16 + [4] * 16


def test_the_traced_step_has_its_calls_and_device_work_by_name(run):
    [written] = (run.workdir / "profile").rglob("*.trace.json.gz")
    assert written.is_relative_to(run.workdir / "profile" / "step_2")
    assert list(written.parent.glob("*.xplane.pb"))
    names = [event.get("name") for event in json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]]
    for call in ("actor.generate_sequences", "reward.compute_reward", "critic.update_critic", "actor.update_actor"):
        assert names.count(call) == 1, call
    assert any(name and name.startswith("dot") for name in names)  # a program's operation


def test_the_time_of_the_run_is_printed_and_drawn(run):
    lines = [line.split() for line in run.printed.splitlines()]
    [update] = [line for line in lines if "actor.update_actor" in line]
    assert update[1:3] == [str(STEPS), f"{sum(record['time/update_s'] for record in run.metrics) - critic_s(run):.2f}"]
    [step] = [line for line in lines if line[:2] == ["step", "all"]]
    assert step[2:6] == [str(STEPS), f"{sum(record['time/step_s'] for record in run.metrics):.2f}", "s", "100.0%"]
    last = run.metrics[-1]
    count, loaded = (f"{last[f'compile/{name}']:.0f}" for name in ("count", "loaded"))
    programs = f"{count} programs in {last['compile/seconds']:.1f} s, {loaded} of them loaded"
    assert programs in run.printed
    assert (run.workdir / "timeline.png").read_bytes().startswith(b"\x89PNG")


def critic_s(run) -> float:
    trace = json.loads((run.workdir / "timeline.json").read_text())
    return sum(event["dur"] / 1e6 for event in trace if event["name"] == "update_critic")


# A reward function that hangs, one that raises, one that returns NaN.


def test_failures_are_unscorable_and_counted(run):
    kinds = {failure(sample) for samples in run.samples.values() for sample in samples}
    assert kinds == {None, "timeout", "exception", "not-finite"}, "the data no longer has a problem of every kind"
    for record in run.metrics:
        samples = run.samples[record["step"]]
        assert [sample["score"] is None for sample in samples] == [failure(sample) is not None for sample in samples]
        assert record["reward/unscorable"] == sum(failure(sample) is not None for sample in samples)


def test_failures_are_logged_with_their_cause(run):
    text = "\n".join(run.warnings)
    for cause in ("timeout", "exception", "not-finite"):
        assert cause in text
    assert "reward 'unreliable' failed on" in text


def test_unscorable_rows_train_nothing(run):
    for (_, rollout, scores, *_), prepared in run.prepared:
        scorable_B = np.asarray(scores.scorable_B)
        length_B = np.asarray(rollout.sequences.mask_BT).sum(axis=1)
        for batches, part in ((prepared.policy, "advantage"), (prepared.value, "returns")):
            assert sum(np.asarray(batch.sequences.mask_BT).sum() for batch in batches) == length_B[scorable_B].sum()
            for batch in batches:
                untrained_BT = ~np.asarray(batch.sequences.mask_BT)
                assert not np.any(np.asarray(batch.weight_BT)[untrained_BT])
                assert np.isfinite(batch.fields[part]).all()
        for batch in prepared.policy:
            assert not np.any(batch.fields["advantage"][~np.asarray(batch.sequences.mask_BT)])
    for record in run.metrics:
        scored = [sample for sample in run.samples[record["step"]] if failure(sample) is None]
        assert record["actor/tokens"] == sum(sample["response_length"] for sample in scored)


@pytest.mark.usefixtures("programs")
def test_a_run_survives_that_nothing_is_scorable(tmp_path):
    (tmp_path / "reward.py").write_text("def broken(prompt, response, answer, record):\n    return float('nan')\n")
    config = get_config()
    algorithm = GRPO(
        responses_per_update=8, epochs_per_step=2, kl=KLInLoss(coefficient=0.1), correction=TruncatedImportance()
    )
    rewards = Rewards(parts=(FunctionReward(f"{tmp_path}/reward.py:broken"),))
    changes = {"algorithm": algorithm, "rewards": rewards, "steps": 2, "cold_start": None}
    assert jaxrlhf.run(replace(config, workdir=str(tmp_path / "run"), **changes)).finished
    for record in records(tmp_path / "run" / "metrics.jsonl"):
        unknown = {name for name, value in record.items() if value is None}
        assert unknown <= {"score/mean", "score/std", "eval/accuracy", "eval/accuracy_at_start"}
        assert record["reward/unscorable"] == RESPONSES
        assert (record["actor/loss"], record["actor/grad_norm"], record["actor/tokens"]) == (0, 0, 0)
