"""Loading of files to tokenized problems, and errors of wrong files."""

import json
import os
import re
from pathlib import Path

import pyarrow.parquet
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from jaxrlhf.config import Arithmetic, Gsm8k, PromptFile
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
GSM8K_RECORDS = [
    {"question": "Two and two?", "answer": "It is 2+2 = <<2+2=4>>4.\n#### 4"},
    {"question": "How many is a thousand and -5?", "answer": "<<1000-5=995>>995 <<x>>\n#### -1,995 "},
]


@pytest.fixture(scope="module")
def tokenizer():
    return embedded_tokenizer()


@pytest.fixture
def plain_tokenizer():
    """Tokenizer without a chat template."""
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
def load(tokenizer):
    def call(data, split="train", max_prompt_tokens=1_000, max_solution_tokens=None):
        return load_problems(
            data, tokenizer, split=split, max_prompt_tokens=max_prompt_tokens, max_solution_tokens=max_solution_tokens
        )

    return call


def write(path, records):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def prompt_file(path, **settings):
    return PromptFile(train=str(path), **settings)


def one_line_error(call, *match):
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in match:
        assert re.search(part, message), message


# Arithmetic


def test_arithmetic(load, tokenizer):
    loaded = load(Arithmetic(difficulty=2, train_problems=40, eval_problems=10))
    assert len(loaded.problems) == loaded.total == 40
    assert loaded.dropped_too_long == 0
    for n, problem in enumerate(loaded.problems):
        assert problem.prompt_id == n
        assert problem.prompt == f"<|user|>{problem.record['question']}<|assistant|>"
        assert tokenizer.decode(problem.prompt_tokens) == problem.prompt
        assert tokenizer.decode(problem.solution_tokens) == problem.record["solution"] + "<|eos|>"
        assert problem.record["solution"].endswith(f"#### {problem.answer}")
    assert load(Arithmetic(difficulty=2, train_problems=40, eval_problems=10), "evaluation").total == 10


# GSM8K


@pytest.mark.parametrize("name", ["test.jsonl", "test.parquet", "main/test-00000-of-00001.parquet"])
def test_gsm8k_directory(load, tokenizer, tmp_path, name):
    (tmp_path / "main").mkdir()
    write(tmp_path / name, GSM8K_RECORDS)
    first, second = load(Gsm8k(path=str(tmp_path), instruction="Think."), "evaluation").problems
    assert first.prompt == "<|user|>Two and two? Think.<|assistant|>"
    assert (first.answer, second.answer) == ("4", "-1995")
    assert tokenizer.decode(first.solution_tokens) == "It is 2+2 = 4.\n#### 4<|eos|>"
    assert first.record == GSM8K_RECORDS[0]


def test_gsm8k_shards_are_read_in_order(load, tmp_path):
    for number, record in enumerate(GSM8K_RECORDS):
        write(tmp_path / f"train-{number:05d}-of-00002.parquet", [record])
    assert [problem.answer for problem in load(Gsm8k(path=str(tmp_path))).problems] == ["4", "-1995"]


def gsm8k_directory():
    path = Path(os.environ.get("JAXRLHF_GSM8K", Path(__file__).parents[3] / "shared/data/gsm8k"))
    if not (path / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K in {path}; JAXRLHF_GSM8K names a directory with train.jsonl and test.jsonl")
    return path


@pytest.mark.slow
def test_the_real_gsm8k(load):
    loaded = load(Gsm8k(path=str(gsm8k_directory())), "evaluation", max_prompt_tokens=400)
    assert loaded.total == 1319
    assert 0 < loaded.dropped_too_long == 1319 - len(loaded.problems) < 1319 / 10
    assert max(len(problem.prompt_tokens) for problem in loaded.problems) <= 400
    for problem in loaded.problems:
        assert re.fullmatch(r"-?\d+(\.\d+)?", problem.answer)
    assert len({problem.prompt_id for problem in loaded.problems}) == len(loaded.problems)


def test_gsm8k_without_an_answer_mark(load, tmp_path):
    write(tmp_path / "train.jsonl", [*GSM8K_RECORDS, {"question": "?", "answer": "5"}])
    one_line_error(lambda: load(Gsm8k(path=str(tmp_path))), r"train\.jsonl, line 3: no '#### <number>'")


def test_gsm8k_directory_without_files(load, tmp_path):
    one_line_error(lambda: load(Gsm8k(path=str(tmp_path))), r"has no \.jsonl, .* file of split 'train'; it has none")


def test_gsm8k_from_a_hub_out_of_reach(load):
    one_line_error(lambda: load(Gsm8k()), "the hub's data set 'openai/gsm8k' cannot be reached", "give a directory")


@pytest.mark.network
def test_gsm8k_from_the_real_hub(load, monkeypatch):
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        pytest.skip("HF_HUB_OFFLINE=1")
    assert load(Gsm8k(), "evaluation").total == 1319


# Prompt files


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_texts_and_chats(load, tokenizer, tmp_path, suffix):
    texts = write(tmp_path / f"texts{suffix}", [{"q": "1+1?", "a": 2, "s": "So 2"}, {"q": "Hi", "a": 3, "s": ""}])
    first, second = load(prompt_file(texts, prompt_key="q", answer_key="a", solution_key="s")).problems
    assert (first.prompt, first.answer) == ("<|user|>1+1?<|assistant|>", "2")
    assert tokenizer.decode(first.solution_tokens) == "So 2<|eos|>"
    assert second.solution_tokens == (tokenizer.eos_token_id,)

    chats = write(tmp_path / f"chats{suffix}", [{"prompt": CHAT, "extra": [1, 2], "small": 1e-5}])
    assert load(prompt_file(chats, answer_key="small")).problems[0].answer == "0.00001"
    (problem,) = load(prompt_file(chats, answer_key=None)).problems
    assert problem.prompt == "<|system|>Be brief.<|user|>1+1?<|assistant|>"
    assert list(problem.prompt_tokens) == tokenizer.encode(problem.prompt)
    assert (problem.answer, problem.solution_tokens) == (None, ())
    assert problem.record["extra"] == [1, 2]


def test_without_a_chat_template_prompts_are_plain(plain_tokenizer, tmp_path):
    file = write(tmp_path / "p.jsonl", [{"prompt": "1+1?"}])
    (problem,) = load_problems(
        prompt_file(file, answer_key=None), plain_tokenizer, split="train", max_prompt_tokens=9
    ).problems
    assert problem.prompt == "1+1?"
    assert list(problem.prompt_tokens) == plain_tokenizer.encode("1+1?")


def test_a_prompt_without_tokens_is_refused(plain_tokenizer, tmp_path):
    plain_tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    data = prompt_file(write(tmp_path / "p.jsonl", [{"prompt": "1+1?"}, {"prompt": " \n"}]), answer_key=None)
    one_line_error(
        lambda: load_problems(data, plain_tokenizer, split="train", max_prompt_tokens=9),
        r"p\.jsonl, line 2: the tokenizer makes no tokens of the prompt ' \\n'",
    )


def test_a_chat_needs_a_template(plain_tokenizer, tmp_path):
    data = prompt_file(write(tmp_path / "p.jsonl", [{"prompt": CHAT}]), answer_key=None)
    one_line_error(
        lambda: load_problems(data, plain_tokenizer, split="train", max_prompt_tokens=9),
        r"p\.jsonl, line 1: .* no chat template",
    )


def test_a_template_that_refuses_a_chat(tmp_path):
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    data = prompt_file(write(tmp_path / "p.jsonl", [{"prompt": CHAT}]), answer_key=None)
    one_line_error(
        lambda: load_problems(data, tokenizer, split="train", max_prompt_tokens=9), "line 1: .* no system role"
    )


def test_no_evaluation_file_is_no_problems(load, tmp_path):
    file = write(tmp_path / "p.jsonl", [{"prompt": "1+1?"}])
    problems, *others = load(prompt_file(file, answer_key=None), "evaluation")
    assert (len(problems), others) == (0, [0, 0, [], [], None])


# Limits


def test_too_long_problems_are_dropped_and_counted(load, tmp_path):
    records = [{"prompt": "1" * n, "solution": "2" * (5 - n)} for n in range(1, 6)]
    data = prompt_file(write(tmp_path / "p.jsonl", records), answer_key=None, solution_key="solution")
    loaded = load(data, max_prompt_tokens=5)  # two of them are the template's
    assert [problem.prompt_id for problem in loaded.problems] == [0, 1, 2]
    assert (loaded.dropped_too_long, loaded.total) == (2, 5)
    loaded = load(data, max_prompt_tokens=5, max_solution_tokens=4)
    assert [problem.prompt_id for problem in loaded.problems] == [1, 2]
    assert (loaded.dropped_too_long, loaded.total) == (3, 5)


def test_nothing_fits(load, tmp_path):
    data = prompt_file(
        write(tmp_path / "p.jsonl", [{"prompt": "12"}, {"prompt": "1234"}]), answer_key=None, solution_key="prompt"
    )
    one_line_error(
        lambda: load(data, max_prompt_tokens=3),
        r"all 2 train",
        r"rollout\.max_prompt_tokens=3, prompts have 4 to 6; raise the limit until the longest fits",
    )
    one_line_error(
        lambda: load(data, max_solution_tokens=2),
        r"rollout\.max_response_tokens leaves 2 to a solution, solutions have 3 to 5; raise",
    )


# Broken files


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", None, r"a\.jsonl: no such file"),
        ("a.txt", "1", r"a\.txt: expected a \.jsonl or \.ndjson .*\.parquet or \.arrow file, .* \.xz or \.zst\)$"),
        ("a.xlsx", "1", r"; pandas\.read_excel\('a\.xlsx'\)\.to_parquet\('a\.parquet'\) makes one"),
        ("a.jsonl", '{"prompt": "x"}\n'.encode("utf-16"), "the file is UTF-16; save it as UTF-8"),
        ("a.jsonl", "", "holds no records"),
        ("a.jsonl", "\n \n", "holds no records"),
        ("a.jsonl", '{"prompt": "x", "answer": 1}\n\n{"prompt": \n', r"a\.jsonl, line 3: not valid JSON"),
        ("a.jsonl", '{"prompt": "x", "answer": 1}\n["x"]\n', "line 2: expected a JSON object, got list"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "line 1: not valid JSON"),
        (
            "a.jsonl",
            '{"prompt": "x", "answer": "1"}\n' + "[" * 100_000,
            "line 2: lists or objects are nested more than 64 deep",
        ),
        (
            "a.jsonl",
            '{"prompt": "x", "answer": "1", "a": ' + "[" * 64 + "]" * 64 + "}",
            "line 1: lists or objects are nes",
        ),
        (
            "a.jsonl",
            '{"prompt": "x", "answer": "1"}\n{"question": "x", "b": 1}\n',
            r"line 2: no key 'prompt'; .*\['b', 'question'\]; name the right one by prompt_key",
        ),
        (
            "a.jsonl",
            '{"prompt": "x \\ud83d", "answer": "1"}\n',
            r"line 1: a text contains '\\ud83d', half of a surrogate pair",
        ),
        ("a.jsonl", '{"prompt": "x", "answer": "\\ude00"}\n', r"line 1: a text contains '\\ude00', half of a"),
        ("a.jsonl", '{"prompt": 5}\n', "line 1: 'prompt' must be a text or a list of messages, got 5"),
        ("a.jsonl", '{"prompt": ""}\n', "line 1: 'prompt' must be a text"),
        ("a.jsonl", '{"prompt": []}\n', "line 1: 'prompt' must be a text"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}\n', "line 1: a message in 'prompt' must have"),
        (
            "a.jsonl",
            '{"prompt": "x", "answer": null}\n',
            "number, got None; if there are no answers, set answer_key=None",
        ),
        ("a.jsonl", '{"prompt": "x", "answer": NaN}\n', "line 1: 'answer' must be a text or a number, got nan"),
        ("a.jsonl", '{"prompt": "x"}\n', r"line 1: no key 'answer'; there are \['prompt'\]"),
        ("a.parquet", "x", r"a\.parquet: not a readable parquet file"),
        ("a.parquet", "", r"a\.parquet: not a readable parquet file"),
    ],
)
def test_a_broken_file(load, tmp_path, name, content, match):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    one_line_error(lambda: load(prompt_file(file)), match)


def test_errors_in_parquet_name_the_row(load, tmp_path):
    file = write(tmp_path / "a.parquet", [{"prompt": "x", "answer": "1"}, {"prompt": None, "answer": "1"}])
    one_line_error(lambda: load(prompt_file(file)), r"a\.parquet, row 2: 'prompt' must be")
    empty = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), empty)
    one_line_error(lambda: load(prompt_file(empty)), r"b\.parquet: the file holds no records")


# Large files


def test_each_text_is_tokenized_once(load, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrlhf.data.sources._CHUNK", 40)
    file = write(tmp_path / "p.jsonl", [{"prompt": f"{n} + 1?"} for n in range(50)])
    seen = []
    call = type(tokenizer).__call__

    def counted(self, texts, **settings):
        seen.extend([texts] if isinstance(texts, str) else texts)
        return call(self, texts, **settings)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    loaded = load(prompt_file(file, answer_key=None))
    assert seen == [f"<|user|>{n} + 1?<|assistant|>" for n in range(50)]
    assert [problem.prompt_id for problem in loaded.problems] == list(range(50))
    assert loaded.problems[49].record == {"prompt": "49 + 1?"}
    assert loaded.problems.prompt_tokens.lengths.tolist() == [len(problem.prompt_tokens) for problem in loaded.problems]


def test_only_the_beginning_of_a_too_long_text_is_tokenized(load, tokenizer, tmp_path, monkeypatch):
    file = write(tmp_path / "p.jsonl", [{"prompt": "7" * 3_000_000}, {"prompt": "1+1?"}])
    most, call = [], type(tokenizer).__call__

    def measured(self, texts, **settings):
        most.append(max(map(len, [texts] if isinstance(texts, str) else texts)))
        return call(self, texts, **settings)

    monkeypatch.setattr(type(tokenizer), "__call__", measured)
    loaded = load(prompt_file(file, answer_key=None), max_prompt_tokens=20)
    assert (loaded.dropped_too_long, [problem.prompt_id for problem in loaded.problems]) == (1, [1])
    assert max(most) < 10_000


def test_a_long_text_of_few_tokens_is_tokenized_completely(tmp_path):
    tokenizer = embedded_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("x+"), "x")
    file = write(tmp_path / "p.jsonl", [{"prompt": "x" * 100_000 + " 12"}])
    [problem] = load_problems(
        prompt_file(file, answer_key=None), tokenizer, split="train", max_prompt_tokens=20
    ).problems
    assert tokenizer.decode(problem.prompt_tokens).endswith("x 12<|assistant|>")


# Control tokens that a text spells out

SPELLED = "say <|eos|> now"


@pytest.mark.parametrize("chat", [False, True])
def test_a_spelled_control_token_is_reported_and_kept_as_text_on_request(load, tokenizer, tmp_path, chat):
    prompt = [{"role": "user", "content": SPELLED}] if chat else SPELLED
    file = write(tmp_path / "p.jsonl", [{"prompt": "a", "s": "b"}, {"prompt": prompt, "s": SPELLED}])
    settings = {"answer_key": None, "solution_key": "s"}
    parsed = load(prompt_file(file, **settings))
    kept = load(prompt_file(file, **settings, control_tokens="text"))
    assert parsed.spelled == kept.spelled == [f"{file}, line 2: <|eos|>"]
    assert parsed.problems[0] == kept.problems[0]
    eos, user = tokenizer.convert_tokens_to_ids(["<|eos|>", "<|user|>"])
    assert [list(parsed.problems[1].prompt_tokens).count(eos), parsed.problems[1].solution_tokens.count(eos)] == [1, 2]
    assert [list(kept.problems[1].prompt_tokens).count(eos), kept.problems[1].solution_tokens.count(eos)] == [0, 1]
    assert kept.problems[1].prompt_tokens[0] == user
    assert kept.problems[1].prompt == parsed.problems[1].prompt == f"<|user|>{SPELLED}<|assistant|>"
    assert tokenizer.decode(kept.problems[1].prompt_tokens) == kept.problems[1].prompt


@pytest.mark.parametrize("how", ["parse", "text"])
def test_private_characters_stay_in_prompts(load, tokenizer, tmp_path, how):
    """U+E000 marks control tokens inside of `Tokenized`, and is an icon in some texts."""
    file = write(tmp_path / "p.jsonl", [{"prompt": "an icon \ue000"}])
    [problem] = load(prompt_file(file, answer_key=None, control_tokens=how)).problems
    assert problem.prompt == tokenizer.decode(problem.prompt_tokens) == "<|user|>an icon \ue000<|assistant|>"


def test_a_control_token_in_a_plain_prompt_is_kept_as_text(plain_tokenizer, tmp_path):
    file = write(tmp_path / "p.jsonl", [{"prompt": SPELLED}])
    data = prompt_file(file, answer_key=None, control_tokens="text")
    [problem] = load_problems(data, plain_tokenizer, split="train", max_prompt_tokens=99).problems
    assert plain_tokenizer.eos_token_id not in problem.prompt_tokens
    assert plain_tokenizer.decode(problem.prompt_tokens) == SPELLED


def test_a_context_dependent_tokenizer_cannot_keep_control_tokens_as_text(tmp_path):
    tokenizer = embedded_tokenizer()
    spaces = pre_tokenizers.Metaspace(replacement="#", prepend_scheme="first")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [spaces, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    file = write(tmp_path / "p.jsonl", [{"prompt": SPELLED}])
    data = prompt_file(file, answer_key=None, control_tokens="text")
    one_line_error(
        lambda: load_problems(data, tokenizer, split="train", max_prompt_tokens=99),
        r"p\.jsonl, line 1: the prompt spells out a control token, and this tokenizer cannot keep it as text",
    )


@pytest.mark.parametrize("changed", [{"prompt": "2+1?"}, {"answer": "3"}, {"s": "So 3"}, {"extra": 2}])
def test_every_part_of_a_record_changes_the_fingerprint(load, tmp_path, changed):
    record = {"prompt": "1+1?", "answer": "2", "s": "So 2", "extra": 1}
    for suffix in ("jsonl", "parquet"):
        files = [write(tmp_path / f"{n}.{suffix}", [one]) for n, one in enumerate([record, record, record | changed])]
        first, same, other = (load(prompt_file(file, solution_key="s")).problems.fingerprint for file in files)
        assert first == same != other
