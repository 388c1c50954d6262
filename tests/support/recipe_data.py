"""Data sets of the recipes in small: files and columns as the hub has them, with made-up records."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

QUESTION = "What is 6 times 7?"
STDIN = [{"input": "4\n", "output": "5\n"}, {"input": "-1\n", "output": "0\n"}]
ASKED = [{"role": "user", "content": QUESTION}]


def said(text: str) -> list[dict[str, str]]:
    """An assistant's message."""
    return [{"role": "assistant", "content": text}]


def gsm8k(question: str, answer: str) -> dict[str, object]:
    """A record of openai/gsm8k."""
    return {"question": question, "answer": f"It is <<6*7=42>>{answer}.\n#### {answer}"}


def mathematics(answer: str) -> dict[str, object]:
    """A record of MATH: the answer is in the box of its solution."""
    problem = {"problem": QUESTION, "level": "Level 1", "type": "Prealgebra"}
    return problem | {"solution": f"We multiply, and $6 \\cdot 7 = \\boxed{{{answer}}}$."}


def dapo(answer: str) -> dict[str, object]:
    """A record of DAPO-Math-17k as open-r1 publishes it."""
    truth = {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}
    more = {"data_source": "math_dapo", "ability": "MATH", "reward_model": truth, "extra_info": {"index": "a-1"}}
    return {"prompt": QUESTION, "solution": answer, "source_prompt": ASKED, **more}


def code(tests: list[dict[str, object]]) -> dict[str, object]:
    """A record of LiveCodeBench's part of DeepCoder-Preview."""
    marked = [{**test, "testtype": "stdin", "metadata": {"func_name": None}} for test in tests]
    about = {"starter_code": "", "metadata": json.dumps({})}
    return {"problem": "Read a number, print the next one.", "tests": json.dumps(marked), **about}


def verified(tests: list[dict[str, object]]) -> dict[str, object]:
    """A record of PrimeIntellect's part of DeepCoder-Preview."""
    marked = [{**test, "type": "stdin_stdout"} for test in tests]
    return {"problem": "Read a number, print the next one.", "solutions": ["..."], "tests": json.dumps(marked)}


TLDR_PROMPT = "SUBREDDIT: r/tests\n\nTITLE: A test\n\nPOST: It was long.\n\nTL;DR:"
TLDR = {"prompt": TLDR_PROMPT, "completion": " It was long."}
COMPARED = {"prompt": TLDR_PROMPT, "chosen": " Long.", "rejected": " Short."}
HELPFUL = {"prompt": ASKED, "chosen": said("It is 42."), "rejected": said("No.")}
AIME = {"id": 60, "problem": QUESTION, "solution": "", "answer": "42", "url": "", "year": "2024"}
MATH_500 = {"problem": QUESTION, "solution": "", "answer": "42", "subject": "Algebra", "level": 1, "unique_id": "a"}
DEEPSCALER = {"problem": QUESTION, "answer": "42", "solution": "By hand."}
SHARD = "00000-of-00001.parquet"
FILES: dict[str, list[dict[str, object]]] = {
    f"openai/gsm8k/main/train-{SHARD}": [gsm8k(QUESTION, "42")],
    f"openai/gsm8k/main/test-{SHARD}": [gsm8k(QUESTION, "42")],
    f"DigitalLearningGmbH/MATH-lighteval/data/train-{SHARD}": [mathematics("42")],
    f"DigitalLearningGmbH/MATH-lighteval/data/test-{SHARD}": [mathematics("42")],
    "HuggingFaceH4/MATH-500/test.jsonl": [MATH_500],
    f"HuggingFaceH4/aime_2024/data/train-{SHARD}": [AIME],
    f"open-r1/DAPO-Math-17k-Processed/all/train-{SHARD}": [dapo("41")],
    f"open-r1/DAPO-Math-17k-Processed/en/train-{SHARD}": [dapo("42")],
    "agentica-org/DeepScaleR-Preview-Dataset/default/train/0000.parquet": [DEEPSCALER],
    "agentica-org/DeepCoder-Preview-Dataset/primeintellect/train-00000-of-00005.parquet": [verified(STDIN)],
    f"agentica-org/DeepCoder-Preview-Dataset/lcbv5/train-{SHARD}": [code(STDIN)],
    f"agentica-org/DeepCoder-Preview-Dataset/lcbv5/test-{SHARD}": [code(STDIN)],
    f"trl-lib/hh-rlhf-helpful-base/data/train-{SHARD}": [HELPFUL],
    f"trl-lib/hh-rlhf-helpful-base/data/test-{SHARD}": [HELPFUL],
    **{f"trl-lib/tldr/data/{split}-{SHARD}": [TLDR] for split in ("train", "validation", "test")},
    **{f"trl-lib/tldr-preference/data/{split}-{SHARD}": [COMPARED] for split in ("train", "validation")},
}
"""Records by file, in the folder of the data set's name."""


def write(folder: Path, copies: int = 1) -> None:
    """Write every data set into a folder, each record so many times."""
    for name, records in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records * copies), path)
            continue
        path.write_text("".join(json.dumps(record) + "\n" for record in records * copies))
