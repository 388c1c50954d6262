"""An environment of verifiers and its adapter, as a user names them."""

import verifiers as vf
from datasets import Dataset

from jaxrlhf.environments.verifiers import Verifiers


def length(completion, **_) -> float:
    """Characters of the answer."""
    return float(len(completion[-1]["content"]))


rows = Dataset.from_list([{"question": f"Tom has {number}", "answer": str(number)} for number in range(3)])
lengths = Verifiers(vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[length])))
