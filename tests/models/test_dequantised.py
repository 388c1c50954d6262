"""Checkpoints in MXFP4 and float8: read as the numbers that transformers dequantises them to."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tiny_checkpoints import build, write
from tiny_models import close
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jaxrlhf import models


def load(directory, shardings=None):
    return models.load_params(directory, models.read_config(directory), "lm", shardings)


def quantised(directory, tensors, **settings):
    """Write the tensors in place of the directory's, and say how they are quantised."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    model = build("gpt-oss", hidden_size=64, intermediate_size=32)
    plain, packed, draw = write(tmp_path / "plain", model), write(tmp_path / "packed", model), torch.Generator()
    given = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    tensors, exact = {}, {}
    for name, tensor in given.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = exact[name] = tensor
            continue
        count, inputs, outputs = tensor.shape
        size = count, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=draw.manual_seed(len(tensors)))
        scales = torch.randint(115, 130, size, dtype=torch.uint8, generator=draw)
        exact[name] = convert_moe_packed_tensors(blocks, scales)
        assert exact[name].shape == tensor.shape
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in exact.items()}, plain / "model.safetensors")
    quantised(packed, tensors, quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    config, ours = models.read_config(packed), load(packed)
    jax.tree.map(np.testing.assert_array_equal, ours, load(plain))
    models.save_params(ours, config, tmp_path / "out", source=packed)
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == given.keys() and all(tensor.dtype == ml_dtypes.bfloat16 for tensor in exported.values())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("size", [128, 16, None])
def test_float8_is_multiplied_by_the_factors_of_its_blocks(size, tmp_path):
    """Blocks of 128, as published files have them, and smaller ones, the last of a row cut short; or one factor."""
    model = build("llama", hidden_size=160 if size == 128 else 32, intermediate_size=200 if size == 128 else 56)
    plain, packed = write(tmp_path / "plain", model), write(tmp_path / "packed", model)
    tensors, exact = {}, {}
    for name, tensor in model.state_dict().items():
        if not name.endswith("proj.weight"):
            tensors[name] = exact[name] = tensor.bfloat16()
            continue
        rows, columns = tensor.shape
        tensors[name] = tensor.to(torch.float8_e4m3fn)
        factor = torch.rand(()) + 0.5
        if size is not None:
            factor = torch.rand(-(-rows // size), -(-columns // size)) + 0.5
        tensors[f"{name}_scale_inv"] = factor
        tensors[name.replace(".weight", ".activation_scale")] = torch.ones(())
        each = factor
        if size is not None:
            each = factor.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
        exact[name] = (tensors[name].float() * each).bfloat16()
    save_file(exact, plain / "model.safetensors")
    quantised(packed, tensors, quant_method="fp8", weight_block_size=size and [size, size], activation_scheme="static")
    close(load(packed), load(plain), tolerance=1e-7)


def test_other_quantisations_are_refused(tmp_path):
    directory = write(tmp_path, build("llama"))
    quantised(directory, build("llama").state_dict(), quant_method="fp8", weight_block_size=[96, 96])
    with pytest.raises(ValueError, match=r"weight_block_size=\[96, 96\]; block sizes must be powers of two"):
        models.read_config(directory)
    bits = {"load_in_4bit": True}
    for other in ({"quant_method": "awq"}, {"quant_method": "bitsandbytes"} | bits, bits):
        quantised(directory, build("llama").state_dict(), **other)
        words = rf"quantization_config=.*{re.escape(str(next(iter(other.values()))))}.*; supported are mxfp4 and fp8"
        with pytest.raises(ValueError, match=words):
            models.read_config(directory)
