"""A checkpoint with a vision tower from training to an answer about a picture: trained, evaluated, exported, served.

A tiny Gemma 3, with pictures of records and of chats; what is served is what transformers generates.
"""

import base64
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import openai
import PIL.Image
import pytest
import seeing
import tiny_checkpoints
import torch
import transformers
from nbclient import NotebookClient
from tiny_runs import get_config, records

import jaxrlhf
from jaxrlhf import serve
from jaxrlhf.__main__ import main
from jaxrlhf.config import GRPO, Pretrained, PromptFile
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.serving.server import Server
from jaxrlhf.trainer.policy import evaluate_policy, export_policy

pytestmark = pytest.mark.usefixtures("programs", "undrawn")

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 12
PLACEHOLDERS = {"boi_token_index": "<|vision_start|>", "eoi_token_index": "<|vision_end|>"}
PLACEHOLDERS |= {"image_token_index": "<|image_pad|>"}


def picture(seed):
    """A drawn picture as a data URL, which the image processor has to resize."""
    pixels = np.random.default_rng(seed).integers(0, 255, (20, 30, 3), np.uint8)
    written = io.BytesIO()
    PIL.Image.fromarray(pixels).save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Weights, tokenizer and image processor, as a checkpoint of the hub has them."""
    directory = tmp_path_factory.mktemp("checkpoint") / "seeing"
    tokenizer = embedded_tokenizer(vision=True)
    tokenizer.save_pretrained(directory)
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in PLACEHOLDERS.items()}
    _, text, tower = seeing.KINDS["gemma3"]
    text = text | {"vocab_size": -(-len(tokenizer) // 64) * 64, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=9, **ids)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    tiny_checkpoints.write(directory, model)
    size = {"height": 24, "width": 24}
    transformers.Gemma3ImageProcessorPil(size=size, image_seq_length=9).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """The configuration of a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    for split, first in (("train", 0), ("held_out", 100)):
        rows = [
            {"prompt": f"<image>{number}?", "answer": str(number % 10), "images": [picture(first + number)]}
            for number in range(16)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": str(folder / "train.jsonl"), "evaluation": str(folder / "held_out.jsonl")}
    config = replace(
        get_config(),
        model=Pretrained(str(checkpoint), vision=True),
        data=PromptFile(**files, image_key="images"),
        cold_start=None,
        algorithm=GRPO(responses_per_update=8),
        steps=2,
        workdir=str(folder / "run"),
    )
    assert jaxrlhf.run(config).finished
    return config


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("exported") / "policy"
    assert export_policy(trained.folder, directory) == 2
    return directory


def answered(policy, monkeypatch):
    """Tokens of the answer of `serve --vision` to a chat with a picture."""
    answers = []

    def ask(server):
        said = [
            {"type": "image_url", "image_url": {"url": picture(7)}},
            {"type": "text", "text": "7?"},
        ]
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="a-key") as client:
            answers.append(
                client.chat.completions.create(
                    model="seen",
                    messages=[{"role": "user", "content": said}],
                    temperature=0,
                    max_tokens=NEW_TOKENS,
                    extra_body={"return_token_ids": True},
                )
            )

    monkeypatch.setattr(Server, "wait", ask)
    sizes = "--context 64 --max-tokens 16 --slots 8 --dtype float32 --port 0"
    monkeypatch.setattr(
        sys, "argv", ["serve", str(policy), "--vision", "--name", "seen", "--api-key", "a-key", *sizes.split()]
    )
    serve.main()
    (answer,) = answers
    return answer.choices[0].token_ids


@pytest.mark.slow
def test_training_and_evaluation_see_the_pictures(trained, exported):
    metrics = records(trained.folder / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2]
    assert all(record["sampler/logp_gap_max"] < 1e-4 for record in metrics)
    ours, theirs = (evaluate_policy(trained, policy=one, samples=1, show=0) for one in (None, str(exported)))
    assert ours["eval/accuracy"] == metrics[-1]["eval/accuracy"] == theirs["eval/accuracy"]


@pytest.mark.slow
def test_a_run_and_its_export_are_served_with_pictures(trained, exported, monkeypatch):
    """And answer as transformers does with its own image processor."""
    answer = answered(trained.folder, monkeypatch)
    assert answered(exported, monkeypatch) == answer
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(exported)
    image = f"\n\n<|vision_start|>{'<|image_pad|>' * 9}<|vision_end|>\n\n"
    prompt = tokenizer.encode(f"<|user|>{image}7?<|assistant|>", add_special_tokens=False)
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(exported, attn_implementation="eager").eval()
    processor = transformers.Gemma3ImageProcessorPil.from_pretrained(exported)
    shown = PIL.Image.open(io.BytesIO(base64.b64decode(picture(7).split(",")[1])))
    pixels = torch.tensor(np.asarray(processor(images=[shown], return_tensors="np")["pixel_values"]))
    ids = torch.tensor([prompt])
    kinds = (ids == model.config.image_token_id).int()

    def generated(pixels):
        with torch.no_grad():
            given = {"pixel_values": pixels, "token_type_ids": kinds}
            whole = model.generate(ids, **given, max_new_tokens=NEW_TOKENS, do_sample=False)
        return whole[0, len(prompt) :].tolist()

    assert generated(pixels) == answer
    assert generated(-pixels) != answer, "another picture makes another answer"


@pytest.mark.slow
def test_a_file_of_prompts_is_answered_with_its_pictures(trained, monkeypatch, tmp_path):
    """By `generate`, whose records keep them."""
    short = "--rollout.max-response-tokens 4 --rollout.slots 8 --rollout.max-prompt-tokens 64"
    held_out, out = trained.folder.parent / "held_out.jsonl", tmp_path / "answers.jsonl"
    given = f"generate {trained.folder} {held_out} {out} --data.image-key images {short}"
    monkeypatch.setattr(sys, "argv", ["jaxrlhf", *given.split()])
    main()
    rows, asked = records(out), records(held_out)
    assert [(row["prompt"], row["images"]) for row in rows] == [(row["prompt"], row["images"]) for row in asked]
    assert all(row["completion"] for row in rows)


@pytest.mark.seeds
def test_the_notebook_runs_with_few_steps(tmp_path):
    """Its last cell is read alone, since its checkpoint is on the hub."""
    few = {"steps": 1, "cold_start.steps": 1, "evaluation.every_steps": 1, "evaluation.problems": 8}
    few |= {"data.train_problems": 64, "data.eval_problems": 8, "devices": 1}
    notebook = nbformat.read(ROOT / "notebooks/vision.ipynb", as_version=4)
    assert len(notebook.cells) <= 15
    [cell] = [cell for cell in notebook.cells if "jaxrlhf.override(jaxrlhf.load" in cell.source]
    cell.source += f"\nconfig = jaxrlhf.override(config, {few!r})"
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert shown.count("image/png") == 4 + 1 + 4, "pictures, the curve, and pictures that are asked about"
    _, code, _ = notebook.cells[-1].source.replace("```python", "```").split("```")
    read = {"jaxrlhf": jaxrlhf}
    exec(code, read)
    assert read["config"].model.vision and read["config"].data.image_key == "images"
