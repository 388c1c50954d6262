"""EleutherAI's lm-evaluation-harness, unmodified: in this process, against a server, and beside its own `hf` model.

Last run with lm_eval 0.4.13. The harness is no dependency of the tests: pip install 'jaxrlhf[evaluate]'.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import write_policy
from transformers import PreTrainedTokenizerFast

from jaxrlhf import evaluate
from jaxrlhf.config import Refusal
from jaxrlhf.engine import EngineService
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.server import Server
from jaxrlhf.trainer.served_policy.flags import EngineSizes
from jaxrlhf.trainer.served_policy.load import load_policy

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed: pip install 'jaxrlhf[evaluate]'"
)

from lm_eval.tasks import TaskManager  # noqa: E402 - after the package was found

from jaxrlhf.trainer.served_policy.harness import HarnessModel  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("programs"),
    pytest.mark.filterwarnings("default"),
]  # libraries warn of each other

CONTEXT, ANSWER, KEY = 768, 32, "a-key"
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "solutions": {
        "output_type": "loglikelihood",
        "doc_to_target": " {{answer}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{answer}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}",
        "generation_kwargs": {"until": ["Question:", "\n\n"], "max_gen_toks": ANSWER, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
LIKELIHOODS = ["choices", "solutions", "texts"]


class Checkpoint:
    """A checkpoint, the harness's arguments to load it by itself, and how many examples are asked."""

    def __init__(self, path, hf, records, limit):
        self.path, self.hf, self.records, self.limit = path, hf, records, limit


def gsm8k():
    path = Path(os.environ.get("JAXRLHF_GSM8K", Path(__file__).parents[3] / "shared/data/gsm8k")) / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"no GSM8K in {path.parent}; JAXRLHF_GSM8K names a directory with test.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(
    scope="module",
    params=[pytest.param("tiny", marks=pytest.mark.slow), pytest.param("smollm2", marks=pytest.mark.real)],
)
def checkpoint(request, tmp_path_factory):
    if request.param == "tiny":
        path = write_policy(tmp_path_factory.mktemp("policy") / "tiny")
        sums = [(first, second) for first in range(2, 5) for second in range(3)]
        records = [
            {"question": f"Tom has {a} apples and buys {b}.", "answer": f"{a}+{b}={a + b}\n#### {a + b}"}
            for a, b in sums
        ]
        # AutoTokenizer would ignore the tokenizer's own settings.
        own = {"pretrained": str(path), "tokenizer": PreTrainedTokenizerFast.from_pretrained(path)}
        return Checkpoint(path, own, records, 9)
    path = request.getfixturevalue("smollm2")
    return Checkpoint(path, {"pretrained": str(path.parent), "gguf_file": path.name}, gsm8k(), 3)


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """Folder of the tasks: a YAML file each, and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(0)
    with (folder / "data.jsonl").open("w") as file:
        for record in checkpoint.records:
            right = int(record["answer"].split("####")[1].replace(",", ""))
            choices = [right, right + 1, right * 10 + 3, right + 12]
            order = rng.permutation(len(choices)).tolist()
            own = {"choices": [str(choices[place]) for place in order], "gold": order.index(0)}
            file.write(json.dumps({**record, **own}) + "\n")
    for name, task in TASKS.items():
        data = {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(folder / "cache")}
        head = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
        head |= {"fewshot_split": "test", "doc_to_text": "Question: {{question}}\nAnswer:"}
        (folder / f"{name}.yaml").write_text(json.dumps({**head, **task}))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def ask(checkpoint, folder):
    """Function that has a model asked, and returns its scores and the numbers or texts that it answered with."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)

    def ask(tasks, asked, *, chat=False, **arguments):
        how = {"apply_chat_template": chat, "fewshot_as_multiturn": chat, "bootstrap_iters": 0}
        how |= {"task_manager": manager, "limit": checkpoint.limit}
        found = lm_eval.simple_evaluate(asked, arguments or None, tasks=tasks, **how)
        samples = {task: [sample["resps"] for sample in found["samples"][task]] for task in tasks}
        return found["results"], samples

    return ask


def loaded(checkpoint):
    sizes = EngineSizes(slots=4, context_tokens=CONTEXT, response_tokens=ANSWER, dtype="float32")
    return load_policy(str(checkpoint.path), sizes)


@pytest.fixture(scope="module")
def policy(checkpoint):
    return loaded(checkpoint)


@pytest.fixture(scope="module")
def theirs(checkpoint, ask):
    pytest.importorskip("accelerate", reason="the harness's own model needs accelerate: pip install accelerate")
    return ask([*TASKS], "hf", dtype="float32", device="cpu", max_length=CONTEXT - 1, **checkpoint.hf)


def equal(ours, theirs, tasks):
    """Compare scores, log-likelihoods and texts; log-likelihoods and the logarithms of perplexities to 1e-4."""
    (scores, samples), (their_scores, their_samples) = ours, theirs
    for task in tasks:
        for name, value in their_scores[task].items():
            if isinstance(value, float):
                one, other = (np.log(x) if "perplexity" in name else x for x in (scores[task][name], value))
                assert one == pytest.approx(other, rel=1e-4), (task, name)
        if task == "answers":
            assert samples[task] == their_samples[task]
            continue
        for own, other in zip(samples[task], their_samples[task], strict=True):
            # A log-likelihood and whether it is the likeliest text, or the log-likelihood of a whole text.
            for [one], [another] in zip(own, other, strict=True):
                assert np.ravel(one)[0] == pytest.approx(float(np.ravel(another)[0]), rel=1e-4, abs=1e-4)
                assert np.ravel(one)[1:].tolist() == np.ravel(another)[1:].tolist()


def test_in_process_scores_equal_the_hf_model(policy, ask, theirs):
    equal(ask([*TASKS], HarnessModel(policy, "mine")), theirs, TASKS)


@pytest.fixture(scope="module")
def server(checkpoint):
    served = loaded(checkpoint)
    with EngineService(served.engine) as service:
        model = ServedModel("mine", service, served.tokenizer, served.stop_tokens)
        with Server(model, token=KEY) as server, pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENAI_API_KEY", KEY)
            yield server.address


@pytest.mark.parametrize("several", [False, True], ids=["one at a time", "several"])
def test_server_scores_equal_the_hf_model(server, ask, theirs, several):
    """`local-completions`: prompts as lists of ids, one or several in a request, one or several requests at once."""
    how = {"base_url": f"{server}/v1/completions", "max_length": CONTEXT - 1, "tokenizer_backend": "remote"}
    how |= {"num_concurrent": 3} if several else {"batch_size": 2}
    equal(ask([*TASKS], "local-completions", model="mine", auth_token=KEY, **how), theirs, TASKS)


def test_server_scores_texts(server, ask, theirs):
    how = {"base_url": f"{server}/v1/completions", "max_length": CONTEXT - 1, "tokenized_requests": False}
    scores = ask(["choices"], "local-completions", model="mine", auth_token=KEY, tokenizer_backend="remote", **how)
    equal(scores, theirs, ["choices"])


def test_server_chats_equal_in_process_chats(server, policy, ask):
    chats = ask(
        ["answers"], "local-chat-completions", chat=True, model="mine", base_url=f"{server}/v1/chat/completions"
    )
    own = ask(["answers"], HarnessModel(policy, "mine"), chat=True)
    for [[one]], [[other]] in zip(chats[1]["answers"], own[1]["answers"], strict=True):
        assert one.strip() == other.strip(), "a chat's content has no space around it"


def test_command_prints_and_writes_scores(checkpoint, folder, tmp_path, monkeypatch, capsys, policy):
    monkeypatch.setattr("jaxrlhf.trainer.served_policy.load.load_policy", lambda *_, **__: policy)
    out = tmp_path / "scores.json"
    words = [str(checkpoint.path), "--tasks", "choices,solutions", "--include-path", str(folder), "--limit", "2"]
    monkeypatch.setattr(sys, "argv", ["evaluate", *words, "--num-fewshot", "1", "--output-path", str(out)])
    evaluate.main()
    written = json.loads(out.read_text())
    assert set(written["results"]) == {"choices", "solutions"} and written["n-shot"]["choices"] == 1
    assert written["config"]["model"] == checkpoint.path.name
    assert "acc_norm" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["evaluate", *words, "--tasks", "choices,no_such_task"])
    with pytest.raises(Refusal, match="no_such_task"):
        evaluate.main()


def test_answers_longer_than_the_engine_allows_are_refused(policy):
    from lm_eval.api.instance import Instance

    model = HarnessModel(policy, "mine")
    for settings in ({"max_gen_toks": ANSWER + 1}, {"max_gen_toks": 4, "num_beams": 3}):
        with pytest.raises(Refusal):
            model.generate_until([Instance("generate_until", {}, ("Tom", {"until": ["x"], **settings}), 0)])


def test_sampled_answers_depend_on_temperature(policy):
    from lm_eval.api.instance import Instance

    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.5, "top_k": 40}
    sampled = [Instance("generate_until", {}, ("Tom has", settings), number) for number in range(4)]
    greedy = [Instance("generate_until", {}, ("Tom has", {"until": [], "max_gen_toks": 8}), 0)]
    model = HarnessModel(policy, "mine")
    texts = model.generate_until([*sampled, *greedy])
    assert len(set(texts[:4])) > 1
    assert texts == model.generate_until([*sampled, *greedy])
