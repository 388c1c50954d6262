"""Shapes of well-known checkpoints, compared with published sizes and files that transformers writes."""

import json

import pytest
import transformers

from jaxrlhf.models.counts import weight_counts
from jaxrlhf.planner.shapes import SHAPES, shape_of

# Numbers of weights in checkpoint files, by the hub.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-VL-3B": 3_754_622_976 - 668_684_288,  # without the tower
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596e6,
    "Qwen/Qwen3-1.7B": 1.7206e9,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B": 70_553_706_496,
}

# Fields of published config.json files.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
WRITTEN = {
    "Qwen/Qwen3-4B": (
        "Qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    "meta-llama/Llama-3.2-1B": (
        "Llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_entry_has_as_many_weights_as_published(name):
    assert weight_counts(SHAPES[name]).total == pytest.approx(PUBLISHED[name.removesuffix("-Instruct")], rel=1e-4)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_directory_that_transformers_writes_reads_as_the_entry(name, tmp_path, monkeypatch):
    family, fields = WRITTEN[name]
    config = getattr(transformers, f"{family}Config")(**fields, architectures=[f"{family}ForCausalLM"])
    config.save_pretrained(tmp_path)
    assert shape_of(str(tmp_path)) == (SHAPES[name], f"config.json of {tmp_path}")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("the hub was asked"))
    assert shape_of(name) == (SHAPES[name], "built-in table")


def test_other_ids_are_read_from_the_hub(monkeypatch, tmp_path):
    family, fields = WRITTEN["Qwen/Qwen3-4B"]
    config = getattr(transformers, f"{family}Config")(**fields, architectures=[f"{family}ForCausalLM"])
    config.save_pretrained(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert shape_of("someone/qwen3-4b-tuned") == (SHAPES["Qwen/Qwen3-4B"], "config.json of someone/qwen3-4b-tuned")


def test_an_unknown_id_names_the_closest_known_ones():
    with pytest.raises(ValueError, match="no reachable hub repository") as error:
        shape_of("Qwen/Qwen2.5-8B-Instruct")
    message = str(error.value)
    assert "without a network, the known ids are Qwen/Qwen2.5-" in message
    assert sum(name in message.replace(",", " ").split() for name in SHAPES) == 3
    assert f"{len(SHAPES) - 3} more" in message
    assert "\n" not in message


def test_an_id_in_another_case_gets_a_hint(refused):
    with refused():
        shape_of("meta-llama/llama-2-7B-hf")


def test_a_directory_that_cannot_be_read_gets_no_hint_of_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FalconForCausalLM"]}))
    with pytest.raises(ValueError, match="FalconForCausalLM") as error:
        shape_of(str(tmp_path))
    assert "without a network" not in str(error.value)
