"""GSM8K from a Hugging Face checkpoint: the real problems by overrides of the command line alone, and the notebook."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from huggingface_hub import ModelCard
from nbclient import NotebookClient
from tiny_runs import records, write_policy

from jaxrlhf.trainer.policy import export_policy

ROOT = Path(__file__).parents[2]
GSM8K = Path(os.environ.get("JAXRLHF_GSM8K") or Path(__file__).parents[3] / "shared" / "data" / "gsm8k")
OVERRIDES = """
    --steps 3 --evaluation.problems 16 --compute-dtype float32 --devices 1
    --rollout.prompts-per-step 8 --algorithm.responses-per-update 4
    --rollout.max-prompt-tokens 384 --rollout.max-response-tokens 32
    --actor.tokens-per-microbatch 416 --algorithm.critic.tokens-per-microbatch 416
    --actor.optimizer.learning-rate 1e-3 --checkpoint.every-steps 2 --evaluation.every-steps 2
"""


@pytest.mark.seeds  # the notebook has made-up problems in the same files, and data/test_sources.py reads the real ones
@pytest.mark.skipif(
    not (GSM8K / "train.jsonl").is_file() and not list(GSM8K.glob("**/train*.parquet")),
    reason=f"no GSM8K in {GSM8K}; name its directory in JAXRLHF_GSM8K",
)
def test_three_steps(tmp_path):
    model, workdir = write_policy(tmp_path / "model"), tmp_path / "workdir"
    where = ["--model.path", str(model), "--data.path", str(GSM8K), "--workdir", str(workdir)]
    command = [sys.executable, "-m", "jaxrlhf.train", "--config", "ppo_gsm8k.py", *where, *OVERRIDES.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "of 7473 dropped as too long" in done.stdout

    metrics = records(workdir / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3]
    assert all(math.isfinite(value) for record in metrics for value in record.values())
    assert all(record["sampler/logp_gap_max"] <= 1e-5 for record in metrics)
    assert all(record["reward/unscorable"] == 0 for record in metrics)
    assert metrics[0]["kl/ref"] == 0 < metrics[1]["kl/ref"] < metrics[2]["kl/ref"]
    assert len({record["compile/count"] for record in metrics}) == 1
    assert "eval/accuracy" in metrics[-1]

    samples = records(workdir / "samples.jsonl")
    assert len(samples) == 3 * 8
    prompt = samples[0]["prompt"]
    assert prompt.startswith("<|user|>")
    assert prompt.endswith('output the final answer after "####".<|assistant|>')
    assert all(math.isfinite(float(sample["answer"])) for sample in samples)

    assert export_policy(workdir, tmp_path / "exported") == 3
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    card = ModelCard.load(tmp_path / "exported" / "README.md")
    assert f"| {metrics[-1]['eval/accuracy']:.4g}, before training" in card.text and "step 3 of 3" in card.text


def write_problems(folder: Path) -> Path:
    """Problems in GSM8K's files, which are sums."""
    folder.mkdir()
    for split, first, count in (("train", 1, 32), ("test", 50, 8)):
        rows = [
            {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"}
            for n in range(first, first + count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_the_notebook_for_accelerators_runs_with_a_small_checkpoint(tmp_path):
    small = {
        "model.path": str(write_policy(tmp_path / "model")),
        "data.path": str(write_problems(tmp_path / "gsm8k")),
        **{"compute_dtype": "float32", "devices": 1, "steps": 2, "algorithm.responses_per_update": 8},
        **{"rollout.prompts_per_step": 4, "rollout.responses_per_prompt": 2, "rollout.slots": 8},
        **{"rollout.max_response_tokens": 16, "actor.tokens_per_microbatch": 2048},
        **{"evaluation.every_steps": 1, "evaluation.problems": 8, "checkpoint.every_steps": 1},
    }
    notebook = nbformat.read(ROOT / "notebooks/grpo_gpu_tpu.ipynb", as_version=4)
    assert len(notebook.cells) <= 15
    [cell] = [cell for cell in notebook.cells if "jaxrlhf.override(" in cell.source]
    cell.source += f"\nconfig = jaxrlhf.override(config, {small!r})"
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("GiB" in output.get("data", {}).get("text/plain", "") for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [record["step"] for record in records(tmp_path / "runs/gsm8k/metrics.jsonl")] == [1, 2]
    assert (tmp_path / "runs/gsm8k/policy/model.safetensors").is_file()
