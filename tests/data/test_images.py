"""Images of records: bytes in parquet, files and data URLs; damage is refused with the place of the record."""

import base64
import io
import json
import pickle

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxrlhf.config import PromptFile, Refusal
from jaxrlhf.config import load as load_configuration
from jaxrlhf.data.images import portable, with_pictures
from jaxrlhf.data.sources import load_problems
from jaxrlhf.models import model_config, tokenizer_of
from jaxrlhf.models.vision.reader import image_reader


@pytest.fixture(scope="module")
def seeing():
    config = load_configuration("grpo_shapes")
    tokenizer = tokenizer_of(config)
    model = model_config(config.model, tokenizer)
    return tokenizer, image_reader(config, model, tokenizer), model.vision


def png(wide=42, high=28, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (high, wide, 3), np.uint8)
    written = io.BytesIO()
    PIL.Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def load(seeing, path, prompt_tokens=64, image_key="images", **settings):
    tokenizer, reader, _ = seeing
    data = PromptFile(train=str(path), prompt_key="problem", image_key=image_key, **settings)
    return load_problems(data, tokenizer, split="train", max_prompt_tokens=prompt_tokens, reader=reader)


def jsonl(path, *records):
    path.write_text("".join(json.dumps({"answer": "1", **record}) + "\n" for record in records))
    return path


def test_an_image_has_the_same_pixels_from_every_place(seeing, tmp_path):
    """In parquet as in geometry3k, in a file, and in a data URL."""
    (tmp_path / "one.png").write_bytes(png())
    rows = [{"images": [{"bytes": png(), "path": None}], "problem": "<image>Find x.", "answer": "3"}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    lines = [{"problem": "<image>Find x.", "images": "one.png"}, {"problem": "Find x.", "images": [url]}]
    told = load(seeing, jsonl(tmp_path / "train.jsonl", *lines)).problems
    problems = [load(seeing, tmp_path / "train.parquet").problems[0], *told[:]]
    _, reader, vision = seeing
    for problem in problems:
        (image,) = problem.images
        assert image.grid == (1, 4, 6) and image.tokens == 6 and image.digest == problems[0].images[0].digest
        placeholders = np.array(problem.prompt_tokens) == vision.image_token
        assert np.flatnonzero(placeholders).tolist() == list(range(image.start, image.start + 6))
        np.testing.assert_array_equal(reader.patches(image), reader.patches(problems[0].images[0]))
        assert len(pickle.dumps(problem)) < 2000, "pixels travel with the prompt"
        assert problem.prompt.count("<image ") == 1 and "image_pad" not in problem.prompt
        (picture,) = with_pictures(problem.record, problem.images)["images"]
        assert picture.size == (42, 28)


@pytest.mark.parametrize("size", [(42, 28), (50, 33), (9, 70), (300, 200)])
def test_a_data_url_has_the_pixels_of_the_patches(seeing, size):
    """So that another program with the same image processor, whatever it resizes with, sees the same."""
    _, reader, _ = seeing
    image = reader.refer("data:image/png;base64," + base64.b64encode(png(*size)).decode(), place="here")
    url = reader.png_url(image)
    again = reader.refer(url, place="here")
    picture = PIL.Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert picture.size == (image.grid[2] * reader.patch_size, image.grid[1] * reader.patch_size)
    assert again.grid == image.grid
    np.testing.assert_array_equal(reader.patches(again), reader.patches(image))


def test_the_most_recently_used_patches_are_cached(seeing, tmp_path, monkeypatch):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(seed=number))
    lines = [{"problem": "Find x.", "images": f"{number}.png"} for number in range(3)]
    first, second, third = (problem.images[0] for problem in load(seeing, jsonl(tmp_path / "t.jsonl", *lines)).problems)
    _, reader, _ = seeing
    kept = reader.patches(first)
    monkeypatch.setattr("jaxrlhf.data.images._KEPT_BYTES", 2 * kept.nbytes)
    left = reader.patches(second)
    assert reader.patches(first) is kept
    reader.patches(third)
    assert reader.patches(first) is kept and reader.patches(second) is not left


@pytest.mark.parametrize("key", ["extra.images", "page/images"])
def test_images_may_be_in_a_nested_field_of_any_name(seeing, tmp_path, key):
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    fields = {"extra": {"images": [url], "split": "a"}} if key.startswith("extra") else {key: [url]}
    (problem,) = load(seeing, jsonl(tmp_path / "a.jsonl", {"problem": "Find x.", **fields}), image_key=key).problems
    (picture,) = with_pictures(problem.record, problem.images)["images"]
    assert picture.size == (42, 28) and "base64" not in str(problem.record)


def test_prompts_for_people_name_the_images(seeing, tmp_path):
    (tmp_path / "one.png").write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    shown = {"problem": "<image> or <image>?", "images": [{"bytes": None, "path": "one.png"}, url]}
    (problem,) = load(seeing, jsonl(tmp_path / "train.jsonl", shown)).problems
    start, end = "<|vision_start|>", "<|vision_end|>"
    one, other = f"{start}<image one.png>{end}", f"{start}<image train.jsonl#1/images/1>{end}"
    assert problem.prompt == f"<|user|>{one} or {other}?<|assistant|>"
    assert [portable(image.source) for image in problem.images] == [str(tmp_path / "one.png"), url]


def test_long_prompts_with_images_are_dropped(seeing, tmp_path):
    (tmp_path / "one.png").write_bytes(png())
    path = jsonl(
        tmp_path / "train.jsonl",
        {"problem": "<image>?" + "1" * 60, "images": "one.png"},
        {"problem": "2", "images": []},
    )
    loaded = load(seeing, path)
    assert loaded.dropped_too_long == 1 and [problem.images for problem in loaded.problems] == [()]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"problem": "<image>?", "images": "none.png"}, "no image"),
        ({"problem": "<image>?", "images": "broken.png"}, "damaged"),
        ({"problem": "<image>?", "images": "/dev/null"}, "no regular file"),  # neither is /dev/zero, which has no end
        ({"problem": "<image>?", "images": "data:image/png;base64,????"}, "base64"),
        ({"problem": "<image>?", "images": 3}, "must be bytes"),
        ({"problem": "<image>?", "images": "http://here/one.png"}, "nothing is fetched"),
        ({"problem": "<image>?", "images": "train.jsonl"}, "of none of the formats"),
        ({"problem": "<image>?", "images": "long.png"}, "refused"),
        ({"problem": "<image> and <image>?", "images": "one.png"}, "2 times"),
        ({"problem": "<image><|image_pad|>?", "images": "one.png"}, "must not spell"),
        ({"problem": "<|image_pad|>?", "images": []}, "placeholders"),
    ],
)
def test_damage_is_refused_with_its_place(seeing, tmp_path, record, words):
    (tmp_path / "one.png").write_bytes(png())
    (tmp_path / "broken.png").write_bytes(png()[:60])
    (tmp_path / "long.png").write_bytes(png(wide=1400, high=2))
    path = jsonl(tmp_path / "train.jsonl", {"problem": "2", "images": []}, record)
    with pytest.raises(Refusal, match=words) as refused:
        load(seeing, path)
    assert "line 2" in str(refused.value) and "\n" not in str(refused.value)


def test_text_models_refuse_images(seeing, tmp_path):
    (tmp_path / "one.png").write_bytes(png())
    path = jsonl(tmp_path / "train.jsonl", {"problem": "?", "images": "one.png"})
    with pytest.raises(Refusal, match="line 1"):
        load((seeing[0], None, None), path)
