"""Exports for others: the card beside the weights, and what is uploaded to a hub, or refused before."""

import json
import threading

import pytest
import tiny_hub
import tiny_runs
from command_lines import run_module
from huggingface_hub import ModelCard

from jaxrlhf.checkpoint.pretrained import convert
from jaxrlhf.config import (
    DPO,
    GRPO,
    Config,
    FromScratch,
    Gsm8kReward,
    HubData,
    KLInLoss,
    Lora,
    Mixture,
    PairFile,
    Pretrained,
    PromptFile,
    Refusal,
    RewardModel,
    Rewards,
    Rollout,
    Source,
    Training,
    to_json,
)
from jaxrlhf.trainer.publishing.card import Exported, write_card
from jaxrlhf.trainer.publishing.push import check_push, push
from tests.models.test_hub import listen

GRPO_RUN = Config(
    name="sums",
    model=Pretrained("Qwen/Qwen2.5-0.5B-Instruct@v1"),
    data=HubData("openai/gsm8k", subset="main", prompt_key="question"),
    rewards=Rewards(parts=(Gsm8kReward(),)),
    algorithm=GRPO(responses_per_update=8, kl=KLInLoss(coefficient=0.002)),
    rollout=Rollout(prompts_per_step=4, responses_per_prompt=4),
    system_prompt="Be brief.",
    steps=3,
)
PAIRS_RUN = Config(
    name="judge",
    model=Pretrained("/home/me/secret/start"),
    data=PairFile("/home/me/secret/pairs.jsonl"),
    algorithm=RewardModel(),
    steps=3,
)
RECORDS = [
    {"step": 1, "score/mean": 0.25, "eval/accuracy_at_start": 0.125, "response/length_mean": 9.0},
    {"step": 2, "score/mean": 0.5, "eval/accuracy": 0.75, "eval/aime/pass@4": 0.25},
    {"step": 3, "score/mean": 0.9, "eval/accuracy": 1.0},
]


def a_run(folder, config, records=RECORDS):
    """A workdir of what a card is made of."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def card_of(folder, config, records=RECORDS, **exported):
    """The card that is written beside weights, as the hub's library reads it."""
    out = folder / "out"
    out.mkdir()
    write_card(a_run(folder / "run", config, records), out, Exported(**{"step": 2, "name": "me/sums"} | exported))
    return ModelCard.load(out / "README.md"), out


def test_a_card_says_what_how_and_how_well(tmp_path):
    card, out = card_of(tmp_path, GRPO_RUN)
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "base_model_relation": "finetune",
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["jaxrlhf", "reinforcement-learning", "grpo"],
    }
    assert card.text.startswith("\n# sums\n") and "step 2 of 3" in card.text
    for row in (
        "base | [Qwen/Qwen2.5-0.5B-Instruct](https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct)",
        "data | [openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k)",
        "rewards | Gsm8k",
        "a step | 4 prompts x 4 responses",
        "KL | 0.002, KLInLoss, estimator k3",
        "accuracy on held-out problems or pairs | 0.75, before training 0.125",
        "mean score of the step's responses | 0.5",
        "eval/aime/pass@4 | 0.25",
    ):
        assert f"| {row} |\n" in card.text
    assert 'AutoModelForCausalLM.from_pretrained("me/sums")' in card.text and "Be brief." in card.text
    assert "![Learning curve](curve.png)" in card.text and (out / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_a_card_names_no_folder_of_yours(tmp_path):
    card, _ = card_of(tmp_path, PAIRS_RUN, [{"step": 1, "preference/accuracy": 0.5}], scores=True)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["jaxrlhf", "reward-model", "rewardmodel"],
    }
    text = str(card)
    assert "secret" not in text and "`pairs.jsonl`" in text and "`start`" in text
    assert "AutoModelForSequenceClassification" in text and "curve.png" not in text


def test_a_card_of_adapters_of_a_mixture(tmp_path):
    sources = {"one": HubData("a/one"), "two": HubData("b/two", revision="v1"), "mine": PromptFile("mine.jsonl")}
    mixture = Mixture(tuple(Source(name=name, data=data) for name, data in sources.items()))
    config = Config(
        name="adapted",
        model=Pretrained("org/base"),
        data=mixture,
        rewards=Rewards(parts=(Gsm8kReward(),)),
        algorithm=GRPO(responses_per_update=8),
        rollout=Rollout(prompts_per_step=4, responses_per_prompt=4),
        actor=Training(lora=Lora(rank=3)),
        steps=3,
    )
    card, _ = card_of(tmp_path, config, [], adapters=True)
    assert (card.data.library_name, card.data.base_model_relation) == ("peft", "adapter")
    assert card.data.datasets == ["a/one", "b/two"]
    assert "AutoPeftModelForCausalLM" in card.text and "| adapters | LoRA of rank 3 |" in card.text
    assert "Figures" not in card.text


@pytest.mark.parametrize("kind", [DPO, RewardModel])
def test_a_card_of_pairs_has_no_responses(tmp_path, kind):
    config = Config(name="p", model=FromScratch(), data=PairFile("p.jsonl"), algorithm=kind(), steps=1)
    card, _ = card_of(tmp_path, config, [], average=True)
    assert "| an update | 32 pairs |" in card.text and "a step" not in card.text and "temperature" not in card.text
    assert "| base | FromScratch |" in card.text
    assert "the average of its weights" in card.text


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on which `me` may write."""
    theirs = {"theirs.txt": b"1"}
    contents = tiny_hub.Contents({"me/full": {"main": dict(theirs)}, "me/new": {"main": {".gitattributes": b""}}})
    contents.users["right"] = "me"
    server = tiny_hub.serve(contents)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    listen(monkeypatch, server.server_port)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setenv("HF_TOKEN", "right")
    yield contents
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("me/a b", "right", "must use alphanumeric"),
        ("mine", "right", "'mine' is not OWNER/NAME; pass a repository such as me/my-model"),
        ("me/mine", None, "requires a hub token with write access"),
        ("me/mine", "wrong", "rejected the token"),
        ("you/mine", "right", "the token belongs to me, who may write to me, org, not to you"),
        ("me/full", "right", r"already holds 1 files \(theirs.txt\); pass --overwrite to replace them"),
    ],
)
def test_an_upload_that_could_not_be_is_refused_before(hub, monkeypatch, name, token, said):
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(Refusal, match=said):
        check_push(name, overwrite=False)
    assert all(method == "GET" for method, _ in hub.asked)


def test_without_a_hub_an_upload_is_refused(hub, monkeypatch):
    listen(monkeypatch, port=9)
    with pytest.raises(Refusal, match="the request to the hub failed"):
        check_push("me/mine", overwrite=False)


def test_a_repository_holds_what_the_directory_holds(hub, tmp_path):
    card, out = card_of(tmp_path, GRPO_RUN)
    (out / "model.safetensors").write_bytes(b"weights")
    for name, overwrite in (("me/sums", False), ("me/new", False), ("me/full", True)):
        check_push(name, overwrite=overwrite)
        address = push(out, name, message="step 2", private=name == "me/sums")
        assert address.endswith(name)
        files = {path: content for path, content in hub.repositories[name]["main"].items() if path[0] != "."}
        assert files == {file.name: file.read_bytes() for file in out.iterdir()}
    assert hub.private == {"me/sums"}
    assert ModelCard.load("me/sums").data.to_dict() == card.data.to_dict()


def test_an_upload_that_fails_leaves_the_directory(hub, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"weights")
    hub.users["right"] = "other"
    with pytest.raises(Refusal, match=r"the upload to the hub failed .*`hf upload me/new .*out`"):
        push(tmp_path / "out", "me/new", message="step 2", private=False)
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "run", "{out}", "--private"), "--private and --overwrite require an upload"),
        (("export", "run", "{out}", "--push", "me/full"), "the repository already holds 1 files"),
        (("train", "--push", "me/new", "--merge"), "--merge, --push require an export; add --export DIRECTORY"),
        (("train", "--export", "{out}", "--overwrite"), "--private and --overwrite require an upload"),
        (("train", "--export", "{out}", "--push", "me/full"), "the repository already holds 1 files"),
        (("train", "--export", "{out}", "--merge"), "trains whole weights, so there are no adapters"),
        (("train", "--export", "{out}", "--average"), "the run keeps no average of the weights"),
    ],
)
def test_commands_refuse_first(hub, tmp_path, capsys, words, said):
    config = ["--config", tiny_runs.__file__, "--workdir", str(tmp_path / "run")] if words[0] == "train" else []
    words = [word.format(out=tmp_path / "exported") for word in words]
    with pytest.raises(SystemExit):
        run_module(*words, *config)
    assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_the_command_exports_and_uploads(hub, tmp_path, capsys):
    """Shown with a converted checkpoint, which takes less time to make than a run."""
    convert(tiny_runs.write_policy(tmp_path / "model"), tmp_path / "converted")
    out = tmp_path / "exported"
    words = [str(tmp_path / "converted"), str(out), "--push", "me/back", "--private"]
    run_module("export", *words)
    files = {path: content for path, content in hub.repositories["me/back"]["main"].items() if path[0] != "."}
    assert files == {file.name: file.read_bytes() for file in out.iterdir()}
    assert files["model.safetensors"] == (tmp_path / "model" / "model.safetensors").read_bytes()
    assert hub.private == {"me/back"} and "uploaded to http://127.0.0.1" in capsys.readouterr().out
