"""Tiny random checkpoints that see, written by transformers, and prompts with images for them."""

import json
from dataclasses import replace

import numpy as np
import seeing_environments
import tiny_runs
import torch
import transformers

from jaxrlhf.batch import Image
from jaxrlhf.config import GRPO, Pretrained, PromptFile

IMAGE, VIDEO, START, END = 90, 91, 92, 93

_TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_TOWER = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40, "patch_size": 4}
_TOWER |= {"out_hidden_size": 32}


def _rope(*pairs, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(pairs), **more}}


_LINEAR = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
KINDS = {
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        _TEXT | _rope(2, 1, 1),
        _TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        _TEXT | {"head_dim": 16} | _rope(4, 2, 2, mrope_interleaved=True),
        _TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3.5": (
        "Qwen3_5",
        _TEXT | _LINEAR | _rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5),
        _TOWER | {"num_position_embeddings": 16},
    ),
}
_SIGLIP = {"image_size": 24, "patch_size": 4, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2}
KINDS["gemma3"] = (
    "Gemma3",
    _TEXT
    | {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 7}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    _SIGLIP | {"num_hidden_layers": 2, "vision_use_head": False},
)
GRIDS = ((1, 10, 6), (1, 4, 12))
"""Frames, rows and columns of patches of two images: neither square nor whole windows."""


def build(kind):
    """A transformers model with weights large enough that every part shows in the logits."""
    name, text, tower = KINDS[kind]
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    ids |= {"vision_start_token_id": START, "vision_end_token_id": END}
    if name == "Gemma3":
        ids = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 9}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=tower, tie_word_embeddings=False, **ids
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def grids(vision):
    """Grids of two images: of one size where all are."""
    return ((1, 6, 6),) * 2 if vision.both_ways else GRIDS


def pixels_of(vision):
    """Random patches of the images of `grids`, by their number."""
    rng = np.random.default_rng(1)
    return [rng.normal(size=(int(np.prod(grid)), vision.patch_values)).astype(np.float32) for grid in grids(vision)]


def pictures(vision, patches):
    """`[N, 3, Y, X]` of the patches of images of one size, a square that becomes one feature after another."""
    side, merge = vision.patch_size, vision.merge
    high = 6 // merge
    cut = np.stack(patches).reshape(-1, high, high, merge, merge, 3, side, side)
    return torch.tensor(cut.transpose(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, 6 * side, 6 * side))


def image(vision, number, start):
    """Reference to an image of `grids`, whose features begin at a token."""
    grid = grids(vision)[number]
    return Image("drawn", str(number), grid, start, int(np.prod(grid)) // vision.merge**2)


def prompt(vision, *parts, seed=0):
    """Token ids and images of a prompt: a number of random tokens, or an image as `(number,)`, one after another."""
    rng = np.random.default_rng(seed)
    tokens, images = [], []
    for part in parts:
        if isinstance(part, tuple):
            images.append(image(vision, part[0], len(tokens)))
            tokens += [IMAGE] * images[-1].tokens
        else:
            tokens += rng.integers(1, 80, part).tolist()
    return tuple(tokens), tuple(images)


def expected_logits(model, vision, tokens, images, pixels):
    """Logits by transformers of one sequence."""
    token_1T, seen = torch.tensor([tokens]), {}
    kinds = "token_type_ids" if vision.both_ways else "mm_token_type_ids"
    if images and vision.both_ways:
        seen["pixel_values"] = pictures(vision, [pixels[int(one.digest)] for one in images])
    elif images:
        seen["pixel_values"] = torch.tensor(np.concatenate([pixels[int(one.digest)] for one in images]))
        seen["image_grid_thw"] = torch.tensor([one.grid for one in images])
    with torch.no_grad():
        return model(input_ids=token_1T, **{kinds: (token_1T == IMAGE).int()}, **seen).logits[0].numpy()


def write_policy(directory, tower=None, **text):
    """A Qwen2.5-VL with the tokenizer of `embedded_tokenizer` and an image processor, as a checkpoint of the hub."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from jaxrlhf.data.tokenizer import embedded_tokenizer

    tokenizer = embedded_tokenizer(vision=True)
    tokenizer.save_pretrained(directory)
    marks = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"}
    marks |= {"vision_end_token_id": "<|vision_end|>", "video_token_id": "<|video_pad|>"}
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    _, sizes, own = KINDS["qwen2.5-vl"]
    tower = own | (tower or {})
    vocab = -(-len(tokenizer) // 64) * 64
    text = sizes | {"vocab_size": vocab, "eos_token_id": tokenizer.eos_token_id} | text
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(directory)
    sides = {"min_pixels": 8 * 8, "max_pixels": 32 * 32}
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, **sides).save_pretrained(directory)
    return directory


def run_config(policy, folder):
    """Two steps of GRPO on prompts with a picture each."""
    rows = [{"prompt": f"<image>{number}?", "answer": "1", "images": [f"{number}.png"]} for number in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in range(16):
        seeing_environments.picture(number).save(folder / f"{number}.png")
    tiny, files = tiny_runs.get_config(), dict.fromkeys(("train", "evaluation"), str(folder / "data.jsonl"))
    return replace(
        tiny,
        model=Pretrained(str(policy), vision=True),
        data=PromptFile(**files, image_key="images"),
        cold_start=None,
        algorithm=GRPO(responses_per_update=8),
        rollout=replace(tiny.rollout, prompts_per_step=4),
        steps=2,
        evaluation=replace(tiny.evaluation, every_steps=0, problems=2),
        workdir=str(folder / "run"),
    )
