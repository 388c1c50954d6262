"""Models to start from, and data sets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import (
    Bound,
    Finite,
    NotEmpty,
    NotNegative,
    Positive,
    Reference,
    Settings,
    Share,
    literals,
    within,
)


@dataclass(frozen=True)
class Tower(Settings):
    """Randomly initialized vision tower shaped like Qwen2.5-VL, with full attention over the image in every layer.

    Attributes:
      hidden_size: Size of the hidden state of a patch.
      patch_size: Side length of a patch, in pixels.
      merge: Side length, in patches, of the square that is merged to one image feature among the prompt's tokens.
      most_features: Largest number of features of an image; larger images are scaled down.
    """

    hidden_size: Positive[int] = 64
    intermediate_size: Positive[int] = 128
    num_layers: Positive[int] = 2
    num_heads: Positive[int] = 4
    patch_size: Positive[int] = 7
    merge: Positive[int] = 2
    most_features: Positive[int] = 64


@dataclass(frozen=True)
class FromScratch(Settings):
    """Randomly initialized decoder for the embedded tokenizer, shaped like Qwen2 or, with experts, like Qwen3-MoE.

    Attributes:
      intermediate_size: Hidden size of the MLP, or of each expert.
      experts: Number of experts that replace each MLP; 0 keeps the MLP.
      experts_per_token: Number of experts that process a token.
      rope_theta: Base of the rotary frequencies; use a larger base for longer sequences.
      vision: Vision tower for images in prompts; None is a text-only model.
    """

    hidden_size: Positive[int] = 128
    intermediate_size: Positive[int] = 384
    num_layers: Positive[int] = 3
    num_heads: Positive[int] = 4
    num_kv_heads: Positive[int] = 4
    head_dim: Positive[int] = 32
    experts: NotNegative[int] = 0
    experts_per_token: Positive[int] = 2
    rope_theta: Finite[Positive[float]] = 10_000.0
    vision: Tower | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.experts == 0 or self.experts_per_token <= self.experts,
            f"FromScratch.experts_per_token={self.experts_per_token} must be at most experts={self.experts}",
        )


@dataclass(frozen=True)
class Pretrained:
    """Hugging Face checkpoint or GGUF file, with its tokenizer and chat template.

    Attributes:
      path: Local directory, `.gguf` file, or hub id such as `Qwen/Qwen2.5-0.5B-Instruct`; `...@v1.0` names a branch,
        tag or commit.
      vision: True also loads the checkpoint's vision tower, for prompts with images; False loads only the text part.
      mtp: True also loads the checkpoint's layer that predicts the second next token (multi-token prediction). The
        layer drafts tokens with `rollout.speculation`, is trained along, and is exported. False leaves it out.
    """

    path: str
    vision: bool = False
    mtp: bool = False


@dataclass(frozen=True)
class Nnx(Settings):
    """Causal language model of your own: a `flax.nnx` module with random weights.

    The module is called with tokens, positions and segments, `[rows, width]` each. A row holds several sequences; a
    position counts within its sequence; a token attends to earlier tokens of its own segment (0 is padding). The module
    returns hidden states `[rows, width, D]` after the last norm. Its method `head()` returns the `[V, D]` matrix that
    maps them to logits (with tied weights, the embedding). `jaxrlhf.models.nnx` documents how parameters are sharded.
    Hugging Face has no format for the module, so its runs cannot be exported; `Config.tokenizer` is the embedded
    tokenizer or your own.

    Attributes:
      build: Function that takes `nnx.Rngs` and returns the module.
      max_positions: Longest sequence that the module can process; None is unlimited.
    """

    build: Annotated[Callable[[Any], Any], Bound(callable, "a function of nnx.Rngs", object)]
    max_positions: Positive[int] | None = None


Model = FromScratch | Pretrained | Nnx


@dataclass(frozen=True)
class Arithmetic(Settings):
    """Generated multi-step word problems with worked solutions.

    Attributes:
      difficulty: Difficulty from 1 to 5; higher has more steps and larger numbers.
      train_problems, eval_problems: Number of records of each split; no problem text is in both splits.
      unfinished_share: Share of the training solutions that stop one step early with a wrong answer; supervised
        training learns this mistake, rewards train against it.
    """

    difficulty: Annotated[int, within(1, 5)] = 2
    train_problems: Positive[int] = 20_000
    eval_problems: Positive[int] = 256
    unfinished_share: Share[float] = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Shapes(Settings):
    """Generated pictures with a question: read the digit of one color, or the two digits of a row.

    Attributes:
      train_problems, eval_problems: Number of records of each split.
      hasty_share: Share of the training solutions with a mistake that their first word announces: they read the digit
        of another color (always the same one), or from right to left. Supervised training learns this mistake, rewards
        train against it.
      shuffled: True gives each question the picture of another question, so that only the text can be learned.
    """

    train_problems: Positive[int] = 12_800
    eval_problems: Positive[int] = 256
    hasty_share: Share[float] = 0.0
    shuffled: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Gsm8k:
    """Grade-school math word problems (Cobbe et al. 2021, arXiv:2110.14168), with answers after `####`.

    Attributes:
      path: Hub id, or a directory with train and test as `.jsonl` or `.parquet`.
      instruction: Text appended to each question.
    """

    path: str = "openai/gsm8k"
    instruction: str = 'Let\'s think step by step and output the final answer after "####".'


@dataclass(frozen=True, kw_only=True)
class PromptFields:
    """Field names of prompt records; `a.b` is the field `b` of the field `a`.

    Columns of verl, TRL and ShareGPT are read as they are. If a record has no `answer`, the answer is
    `reward_model.ground_truth`. If it has no `prompt`, the prompt is `messages` or `conversations` before the
    assistant's last messages; named as `solution_key`, the same field gives those last messages as the solution.

    Attributes:
      prompt_key: Field with the prompt: a text, or a list of chat messages. A final assistant message is continued.
      answer_key: Field with the reference answer for rewards; None if there is none.
      solution_key: Field with a worked solution for supervised training: a text, or assistant messages such as TRL's
        `completion`; None if there is none.
      image_key: Field with an image or a list of images: encoded bytes, a path, a data URL, or the format of
        `datasets`. Images replace `<image>` in the prompt, or come first if the prompt has no `<image>`. None uses only
        the images in the content parts of the prompt's messages.
      control_tokens: Handling of control tokens such as `<|im_end|>` spelled out in texts of the file: "parse" makes
        them tokens, as the tokenizer does by default; "text" keeps the letters, so that no text can end a turn.
    """

    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    solution_key: str | None = None
    image_key: str | None = None
    control_tokens: Literal["parse", "text"] = "parse"


@dataclass(frozen=True)
class RecordFiles(Settings):
    """Local files with records: `.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv` (also packed), `.parquet` or `.arrow`.

    Attributes:
      train: File of training records, a pattern for several files such as `data/*.jsonl`, or a folder of `datasets`.
      evaluation: File of held-out records; None trains without evaluation.
    """

    train: str
    evaluation: str | None = None


@dataclass(frozen=True)
class PromptFile(PromptFields, RecordFiles):
    """Prompts from local files; the settings `..._key` name the columns."""


@dataclass(frozen=True)
class HubFiles(Settings):
    """Splits of a Hugging Face hub data set, in the file formats of `RecordFiles`.

    Files are downloaded to the hub's cache one by one, when their records are read.

    Attributes:
      path: Hub id such as `openai/gsm8k`, or a local directory with the layout of a hub data set.
      subset: Configuration (subset) of the data set; None is the only or the default configuration.
      train: Split with the training records.
      evaluation: Split with the held-out records; None trains without evaluation.
      revision: Branch, tag or commit; None is the newest commit of the main branch.
      train_problems: Largest number of training records that are read; later files are not downloaded. None is all.
    """

    path: str
    subset: str | None = None
    train: str = "train"
    evaluation: str | None = "test"
    revision: str | None = None
    train_problems: Positive[int] | None = None


@dataclass(frozen=True)
class HubData(PromptFields, HubFiles):
    """Prompts from a Hugging Face hub data set; the settings `..._key` name the columns."""


@dataclass(frozen=True)
class Generated(Settings):
    """Records made by a function.

    Attributes:
      function: Function, as `module:function` or `path/to/file.py:function`, that takes a split (`train` or
        `evaluation`), a number of records and a seed, and returns that many records. A record has `prompt` (a text or
        chat messages) and may have `answer` and `solution`. A solution of several turns is a list of messages:
        assistant messages are imitated, tool calls included.
      arguments: Further arguments of the function, each a name and a Python literal such as `tokens=4096`.
      train_problems, eval_problems: Number of records of each split.
    """

    function: Reference
    arguments: tuple[str, ...] = ()
    train_problems: Positive[int] = 10_000
    eval_problems: Positive[int] = 256
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.keywords  # refuses arguments that are not literals

    @property
    def keywords(self) -> dict[str, Any]:
        """Further arguments of the function, by name."""
        return literals(self.arguments, "Generated.arguments")


@dataclass(frozen=True)
class ArithmeticPairs(Settings):
    """Problems of `Arithmetic`, each with its correct solution as chosen and a wrong solution as rejected.

    Half of the wrong solutions stop one step early, if there are several steps; the others have a slip in one step.
    """

    difficulty: Annotated[int, within(1, 5)] = 2
    train_problems: Positive[int] = 20_000
    eval_problems: Positive[int] = 256
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class PairFields(Settings):
    """Field names of preference-pair records.

    A record has a prompt and two answers. It may also have two lists of messages, or two dialogues in the format of
    hh-rlhf (Bai et al. 2022, arXiv:2204.05862) with turns after `\\n\\nHuman:` and `\\n\\nAssistant:`; the two differ
    in the last turn.

    Attributes:
      evaluation_fraction: Share of the prompts of `train` that is held out; pairs with the same prompt stay together.
      prompt_key: Field with the prompt: a text, or a list of chat messages. None takes the prompt from the common
        beginning of both answers (TRL's implicit prompts): the messages before the last, the turns of a dialogue, or
        the words that both texts begin with.
      chosen_key, rejected_key: Fields with the two answers, each a text or TRL's list of messages. Without a prompt
        field, the messages that both lists begin with are the prompt.
      margin_key: Field with a number, the margin by which the chosen answer's score should be higher; None if there is
        none.
      safe_keys: Two boolean fields that say whether the chosen and the rejected answer are harmless; None if there are
        none.
      malformed_fraction: Largest share of malformed pairs; up to this share they are left out and reported, above it
        the data is refused.
      control_tokens: Handling of control tokens such as `<|im_end|>` spelled out in texts of the file: "parse" makes
        them tokens, as the tokenizer does by default; "text" keeps the letters, so that no text can end a turn.
    """

    evaluation_fraction: Annotated[float, within(0.0, 0.5)] = 0.0
    prompt_key: str | None = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    safe_keys: tuple[str, str] | None = None
    malformed_fraction: Share[float] = 0.01
    control_tokens: Literal["parse", "text"] = "parse"

    def __post_init__(self) -> None:
        super().__post_init__()
        evaluation = getattr(self, "evaluation", None)
        require(
            evaluation is None or not self.evaluation_fraction,
            f"{type(self).__name__} has evaluation={evaluation!r} and "
            f"evaluation_fraction={self.evaluation_fraction}; set only one of them",
        )


@dataclass(frozen=True)
class PairFile(PairFields, RecordFiles):
    """Preference pairs from local files; the settings `..._key` name the columns.

    Attributes:
      evaluation: File of held-out records; None holds out `evaluation_fraction` of the prompts.
    """


@dataclass(frozen=True)
class HubPairs(PairFields, HubFiles):
    """Preference pairs from a Hugging Face hub data set; the settings `..._key` name the columns.

    Attributes:
      evaluation: Split with the held-out records; None holds out `evaluation_fraction` of the prompts.
    """

    evaluation: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepFields(Settings):
    """Field names of records with labeled solution steps, with the defaults of TRL's `PRMTrainer`.

    Attributes:
      prompt_key: Field with the prompt: a text, or a list of chat messages.
      steps_key: Field with the steps, a list of texts.
      labels_key: Field with the labels, a list of booleans: true if the step is right.
      separator: Text after each step, including the last. A step is judged at its last token, the separator's last
        token.
      control_tokens: Handling of control tokens such as `<|im_end|>` spelled out in texts of the file: "parse" makes
        them tokens, "text" keeps the letters.
    """

    prompt_key: str = "prompt"
    steps_key: str = "completions"
    labels_key: str = "labels"
    separator: NotEmpty[str] = "\n"
    control_tokens: Literal["parse", "text"] = "parse"


@dataclass(frozen=True)
class StepFile(StepFields, RecordFiles):
    """Labeled solution steps from local files; the settings `..._key` name the columns."""


@dataclass(frozen=True)
class HubSteps(StepFields, HubFiles):
    """Labeled solution steps from a hub data set, such as `trl-lib/math_shepherd` or `trl-lib/prm800k`."""


_PromptSet = Arithmetic | Generated | Gsm8k | HubData | PromptFile | Shapes
DataSet = _PromptSet | ArithmeticPairs | HubPairs | HubSteps | PairFile | StepFile
