"""Pixels of images: upright, on white, 8 bits per color, from each place that a record may name."""

import base64
import contextlib
import io
import json
import random
import struct
import zlib

import numpy as np
import PIL.Image
import PIL.ImageOps
import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from jaxrlhf.config import Generated, PairFile, PromptFile, Refusal
from jaxrlhf.data.images import opened, with_pictures
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.environments.answers import tool_content
from jaxrlhf.episode import EnvironmentFailure
from jaxrlhf.pictures import opened_rgb
from tests.data.test_images import jsonl, load, png, seeing  # noqa: F401 - a fixture

RAMP = np.arange(64 * 64, dtype=np.int64).reshape(64, 64)
ORIENTATION = 0x0112


def corners(mode="RGB"):
    """42 x 28 pixels with another colour in each corner, so that each way to turn them is seen."""
    pixels = np.zeros((28, 42, 3), np.uint8)
    pixels[:14, :21], pixels[:14, 21:], pixels[14:, :21] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    return PIL.Image.fromarray(pixels).convert(mode)


def encoded(picture, kind="PNG", **settings):
    written = io.BytesIO()
    picture.save(written, kind, **settings)
    return written.getvalue()


def turned(orientation, kind="PNG"):
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(corners(), kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))


def pixels_of(seeing, path, image_key="images"):  # noqa: F811
    (problem,) = load(seeing, path, image_key=image_key, prompt_tokens=300).problems
    (picture,) = with_pictures(problem.record, problem.images)["images"]
    return np.asarray(picture)


def url_of(content):
    return "data:image/png;base64," + base64.b64encode(content).decode()


def as_transformers(content):
    """Pixels of `load_image`, but for transparency, which it drops and transformers' processors put over white."""
    with PIL.Image.open(io.BytesIO(content)) as picture:
        return np.asarray(convert_to_rgb(PIL.ImageOps.exif_transpose(picture), return_numpy=True))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_rotated_image_is_read_upright(seeing, tmp_path, orientation, kind):  # noqa: F811
    content = turned(orientation, kind)
    (tmp_path / "one.img").write_bytes(content)
    line = {"problem": "?", "images": "one.img"}
    from_file = pixels_of(seeing, jsonl(tmp_path / "a.jsonl", line))
    from_url = pixels_of(seeing, jsonl(tmp_path / "b.jsonl", line | {"images": url_of(content)}))
    rows = [{"images": [{"bytes": content, "path": None}], "problem": "?", "answer": "3"}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    for seen in (from_file, from_url, pixels_of(seeing, tmp_path / "train.parquet")):
        np.testing.assert_array_equal(seen, np.asarray(load_image(str(tmp_path / "one.img"))))
        assert seen.shape == ((42, 28, 3) if orientation > 4 else (28, 42, 3))
    # As a client of the server or an agent sends it; patches have 7 pixels.
    assert seeing[1].refer(url_of(content), place="x").grid == ((1, 6, 4) if orientation > 4 else (1, 4, 6))
    red = {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1), 8: (-1, 0)}[orientation]
    assert from_file[red][0] > 200 and from_file[red][1] < 60


def logo(mode):
    """A black square on a transparent ground, whose colour below is black too."""
    alpha = np.zeros((28, 28), np.uint8)
    alpha[8:20, 8:20] = 255
    if mode == "P":
        picture = PIL.Image.fromarray((alpha > 0).astype(np.uint8), "P")
        picture.putpalette([0, 0, 0, 0, 0, 0])
        return encoded(picture, transparency=bytes([0, 255]))
    grey = PIL.Image.new("L", (28, 28))
    bands = [grey] * (3 if mode == "RGBA" else 1) + [PIL.Image.fromarray(alpha)]
    return encoded(PIL.Image.merge(mode, bands))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(seeing, tmp_path, mode):  # noqa: F811
    content = logo(mode)
    (tmp_path / "one.png").write_bytes(content)
    seen = pixels_of(seeing, jsonl(tmp_path / "a.jsonl", {"problem": "?", "images": "one.png"}))
    assert (seen[0, 0].tolist(), seen[14, 14].tolist()) == ([255, 255, 255], [0, 0, 0])
    np.testing.assert_array_equal(seen, as_transformers(content))


def test_half_transparent_red_is_pink_and_a_colour_may_be_the_clear_one(seeing, tmp_path):  # noqa: F811
    pink = encoded(PIL.Image.new("RGBA", (28, 28), (255, 0, 0, 128)))
    clear = encoded(PIL.Image.new("RGB", (28, 28), (0, 255, 0)), transparency=(0, 255, 0))
    for content, colour in ((pink, [255, 127, 127]), (clear, [255, 255, 255])):
        (tmp_path / "one.png").write_bytes(content)
        seen = pixels_of(seeing, jsonl(tmp_path / "a.jsonl", {"problem": "?", "images": "one.png"}))
        assert seen[0, 0].tolist() == colour
        np.testing.assert_array_equal(seen, as_transformers(content))


WIDE = {
    "16 bits": (PIL.Image.fromarray((RAMP * 65535 // RAMP.max()).astype(np.uint16)), "PNG"),
    "floats to 1": (PIL.Image.fromarray((RAMP / RAMP.max()).astype(np.float32)), "TIFF"),
    "floats to 255": (PIL.Image.fromarray((RAMP % 256).astype(np.float32)), "TIFF"),
    "32 bits to 255": (PIL.Image.fromarray((RAMP % 256).astype(np.int32)), "TIFF"),
}


@pytest.mark.parametrize("name", WIDE)
def test_images_of_more_than_eight_bits_keep_their_levels(seeing, tmp_path, name):  # noqa: F811
    picture, kind = WIDE[name]
    (tmp_path / "one.img").write_bytes(encoded(picture, kind))
    seen = pixels_of(seeing, jsonl(tmp_path / "a.jsonl", {"problem": "?", "images": "one.img"}))
    right = RAMP % 256 if "255" in name else np.round(RAMP / RAMP.max() * 255)
    assert np.abs(seen - right[..., None].astype(int)).max() <= 1 and len(np.unique(seen)) == 256


@pytest.mark.parametrize("pixels", [(RAMP * 16).astype(np.int32), (RAMP / 10).astype(np.float32) - 3])
def test_numbers_of_an_unknown_range_are_refused_with_their_place(seeing, tmp_path, pixels):  # noqa: F811
    (tmp_path / "one.tiff").write_bytes(encoded(PIL.Image.fromarray(pixels), "TIFF"))
    path = jsonl(tmp_path / "a.jsonl", {"problem": "?", "images": "one.tiff"})
    with pytest.raises(Refusal, match=r"line 1: .*the value of white is unknown"):
        load(seeing, path)
    with pytest.raises(EnvironmentFailure, match="the value of white"):
        tool_content(PIL.Image.fromarray(pixels), 10**6)


def shown(value):
    """Pixels of the picture that a tool returns."""
    (part,) = tool_content(value, 10**7)
    return np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))))


@pytest.mark.parametrize(
    "mode", ["RGB", "L", "1", "P", "RGBA", "CMYK", "YCbCr", "RGBX", "HSV", "LAB", "I", "F", "RGBa"]
)
def test_a_tool_shows_a_picture_of_any_mode(mode):
    grey = mode in ("L", "1", "I", "F")
    start = corners("L") if mode in ("I", "F") else corners()
    seen, right = shown(start.convert(mode)).astype(int), np.asarray(corners("L" if grey else "RGB").convert("RGB"))
    if mode != "1":
        assert np.abs(seen - right).max() <= 32, mode
    assert seen.shape == (28, 42, 3)


def test_a_tool_shows_files_as_records_do():
    jpeg = encoded(corners("CMYK"), "JPEG")
    assert np.abs(shown(PIL.Image.open(io.BytesIO(jpeg))).astype(int) - np.asarray(corners())).mean() < 12
    assert shown(PIL.Image.open(io.BytesIO(turned(6, "JPEG")))).shape == (42, 28, 3)
    sixteen = shown(PIL.Image.open(io.BytesIO(encoded(*WIDE["16 bits"]))))
    assert 126 < sixteen.mean() < 129
    assert shown(PIL.Image.open(io.BytesIO(logo("RGBA"))))[0, 0].tolist() == [255, 255, 255]


# Where pictures are named


def test_a_data_url_may_have_line_breaks_and_a_file_an_address(seeing, tmp_path):  # noqa: F811
    (tmp_path / "a b.png").write_bytes(png())
    lines = base64.encodebytes(png(seed=0)).decode()
    assert "\n" in lines.strip()
    named = [
        *("a b.png", f"data:image/png;base64,{lines}", f"file://{tmp_path}/a%20b.png"),
        *({"url": url_of(png())}, {"url": "a b.png"}, {"image_url": {"url": url_of(png())}}),
        {"bytes": None, "path": "a b.png"},
    ]
    path = jsonl(tmp_path / "a.jsonl", *({"problem": "?", "images": one} for one in named))
    digests = {problem.images[0].digest for problem in load(seeing, path).problems}
    assert len(digests) == 1
    with pytest.raises(Refusal, match="nothing is fetched"):
        load(seeing, jsonl(tmp_path / "b.jsonl", {"problem": "?", "images": {"url": "https://here/one.png"}}))


@pytest.mark.parametrize("key", ["a#b", "a#1/b", "50%", "#", "größe"])
def test_the_name_of_an_image_field_may_have_any_character(seeing, tmp_path, key):  # noqa: F811
    path = jsonl(tmp_path / "a#2.jsonl", {"problem": "?", key: [url_of(png())]})
    assert pixels_of(seeing, path, image_key=key).shape == (28, 42, 3)
    (problem,) = load(seeing, path, image_key=key).problems
    assert f"<image a#2.jsonl#1/{key}/0>" in problem.prompt


def prompts(seeing, path, image_key=None, **limits):  # noqa: F811
    tokenizer, reader, _ = seeing
    data = PromptFile(str(path), answer_key=None, image_key=image_key)
    return load_problems(data, tokenizer, split="train", max_prompt_tokens=300, reader=reader).problems


def asked(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def test_pictures_that_parts_of_a_prompt_name_are_shown(seeing, tmp_path):  # noqa: F811
    (tmp_path / "one.png").write_bytes(png())
    parts = [
        *({"type": "image", "image": "one.png"}, {"type": "image_url", "image_url": {"url": url_of(png())}}),
        *({"type": "image", "url": url_of(png())}, {"type": "image", "path": "one.png"}),
    ]
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": asked(part)} for part in parts), {"prompt": asked(*parts)})
    *single, four = prompts(seeing, path)
    assert [len(problem.images) for problem in single] == [1] * 4 and len(four.images) == 4
    assert len({image.digest for problem in [*single, four] for image in problem.images}) == 1
    assert len(with_pictures(four.record, four.images)["images"]) == 4
    assert "What?" in four.prompt and four.prompt.count("<image ") == 4


def test_a_part_without_a_picture_is_refused_unless_a_field_has_it(seeing, tmp_path):  # noqa: F811
    bare = {"prompt": asked({"type": "image"}), "images": [url_of(png())]}
    path = jsonl(tmp_path / "a.jsonl", bare)
    with pytest.raises(Refusal, match=r"line 1: a part of type 'image' has no image; .*image_key"):
        prompts(seeing, path)
    assert len(prompts(seeing, path, image_key="images")[0].images) == 1
    text = jsonl(tmp_path / "b.jsonl", {"prompt": "The tag <image> of HTML?"})
    assert "The tag <image> of HTML?" in prompts(seeing, text)[0].prompt


@pytest.mark.parametrize("record", [{"images": ["x.png"]}, {"image": "x.png"}, {"prompt": asked({"type": "image"})}])
def test_pairs_with_pictures_are_refused(seeing, tmp_path, record):  # noqa: F811
    pair = {"prompt": asked(), "chosen": "4", "rejected": "5"}
    tokenizer, reader, _ = seeing
    data = PairFile(str(jsonl(tmp_path / "a.jsonl", pair | record)))
    with pytest.raises(Refusal, match=r"contains images|contains an image"):
        load_problems(data, tokenizer, split="train", max_prompt_tokens=300, reader=reader)
    data = PairFile(str(jsonl(tmp_path / "b.jsonl", pair | {"images": [], "image": None})))
    assert len(load_problems(data, tokenizer, split="train", max_prompt_tokens=300, reader=reader).problems) == 1


def test_a_generated_prompt_with_a_picture_is_refused(tmp_path):
    parts = '[{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]'
    made = (
        "def made(split, count, seed):\n    return [{'prompt': [{'role': 'user', 'content': " + parts + "}]}] * count\n"
    )
    (tmp_path / "made.py").write_text(made)
    data = Generated(f"{tmp_path}/made.py:made", train_problems=2)
    with pytest.raises(Refusal, match="'prompt' contains an image, and only texts are read there"):
        load_problems(data, embedded_tokenizer(), split="train", max_prompt_tokens=300)
    (tmp_path / "text.py").write_text(made.replace('{"type": "image", "image": "a.png"}, ', ""))
    data = Generated(f"{tmp_path}/text.py:made", train_problems=2)
    (first, _) = load_problems(data, embedded_tokenizer(), split="train", max_prompt_tokens=300).problems
    assert first.question == "What?"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_rewritten_file_gives_its_new_images(seeing, tmp_path, suffix):  # noqa: F811
    path = tmp_path / f"a{suffix}"

    def write(colour, count):
        content = encoded(PIL.Image.new("RGB", (28, 28), colour))
        record = {"problem": "?", "answer": "1", "images": [content if suffix == ".parquet" else url_of(content)]}
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist([record] * count), path)
        else:
            path.write_text((json.dumps(record) + "\n") * count)
        return load(seeing, path).problems

    (first,) = write("red", 1)
    assert np.asarray(with_pictures({}, first.images)["images"][0])[0, 0].tolist() == [255, 0, 0]
    _, last = write("blue", 2)
    assert np.asarray(with_pictures({}, last.images)["images"][0])[0, 0].tolist() == [0, 0, 255]
    assert last.images[0].digest != first.images[0].digest
    write("green", 1)
    with pytest.raises(Refusal, match="has changed"):
        with_pictures({}, [*last.images, *last.images])


def test_pictures_are_read_in_the_named_formats_alone():
    assert opened_rgb(encoded(corners(), "WEBP", lossless=True)).size == (42, 28)
    for kind in ("EPS", "PDF", "ICO", "TGA"):
        content = encoded(corners(), kind)
        with pytest.raises(Refusal, match=r"the picture.*of none of the formats PNG, JPEG, "):
            opened(url_of(content), place="the picture")


@pytest.mark.parametrize("error", [struct.error("a"), RuntimeError("a"), TypeError("a"), KeyError("a")])
def test_every_error_of_a_damaged_image_is_a_refusal_with_its_place(error, monkeypatch):
    def fails(_):
        raise error

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", fails)
    with pytest.raises(Refusal, match="the picture: the image is damaged or no image"):
        opened(url_of(encoded(corners())), place="the picture")


def test_changed_bytes_are_read_or_refused():
    dice = random.Random(0)
    kinds = [encoded(corners(), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    for _ in range(1000):
        content = bytearray(dice.choice(kinds))
        for _ in range(dice.choice([1, 3, 9])):
            content[dice.randrange(len(content))] = dice.randrange(256)
        with contextlib.suppress(Refusal):
            assert opened(url_of(bytes(content)), place="the picture").mode == "RGB"


def test_a_small_file_with_too_many_pixels_is_refused_before_decoding():
    header = encoded(PIL.Image.new("1", (16, 16)))
    wide = struct.pack(">II", 60_000, 60_000)
    start = header.index(b"IHDR")
    chunk = b"IHDR" + wide + header[start + 12 : start + 17]
    content = header[:start] + chunk + struct.pack(">I", zlib.crc32(chunk)) + header[start + 21 :]
    with pytest.raises(Refusal, match=r"60000 x 60000 pixels, more than|exceeds limit"):
        opened(url_of(content), place="the picture")
    wide = PIL.Image.new("1", (8193, 8192))
    with pytest.raises(Refusal, match="8193 x 8192 pixels, more than 67108864"):
        opened(url_of(encoded(wide)), place="the picture")
