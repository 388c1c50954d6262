"""Where models and problems come from."""

from dataclasses import dataclass

from jaxrlhf.config.check import positive, require, within


@dataclass(frozen=True)
class FromScratch:
    """A randomly initialised Qwen2-shaped decoder over the embedded tokenizer; needs no download."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32

    def __post_init__(self) -> None:
        positive(self, "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face checkpoint; its tokenizer and chat template come with it.

    Attributes:
      path: Local directory, or hub id such as `Qwen/Qwen2.5-0.5B-Instruct`.
    """

    path: str


Model = FromScratch | Pretrained


@dataclass(frozen=True)
class Arithmetic:
    """Generated multi-step word problems with worked solutions.

    Attributes:
      difficulty: 1 to 5: more steps and larger numbers.
      train_problems: Size of the training split.
      eval_problems: Size of the held-out split; no problem text is in both.
      unfinished_share: Share of the training solutions that stop one step early, with a wrong
        answer. Supervised training imitates careless demonstrations too; rewards do not.
    """

    difficulty: int = 2
    train_problems: int = 20_000
    eval_problems: int = 256
    unfinished_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        within(self, "difficulty", 1, 5)
        within(self, "unfinished_share", 0.0, 1.0)
        positive(self, "train_problems", "eval_problems")


@dataclass(frozen=True)
class Gsm8k:
    """Grade-school maths (Cobbe et al. 2021, arXiv:2110.14168), answers after `####`.

    Attributes:
      path: Hub id, or a directory with train/test as `.jsonl` or `.parquet`.
      instruction: Appended to each question.
    """

    path: str = "openai/gsm8k"
    instruction: str = 'Let\'s think step by step and output the final answer after "####".'


@dataclass(frozen=True)
class PromptFile:
    """Prompts from `.jsonl` or `.parquet`, one record a line.

    Attributes:
      train: File of training records.
      evaluation: File of held-out records; None trains without evaluation.
      prompt_key: Field with the prompt: a text, or a list of chat messages.
      answer_key: Field with the reference answer that rewards see; None if there is none.
      solution_key: Field with a worked solution for supervised training; None if there is none.
    """

    train: str
    evaluation: str | None = None
    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    solution_key: str | None = None


Data = Arithmetic | Gsm8k | PromptFile
