"""Models to start from, and data sets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxrlhf.config.named_functions import check_reference
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Settings, Share, literals, within


@dataclass(frozen=True)
class Tower(Settings):
    """A randomly initialised vision tower, shaped like Qwen2.5-VL, every layer of which sees the whole image.

    Attributes:
      hidden_size: Width of a patch.
      patch_size: Side of a patch in pixels.
      merge: Side in patches of the square that becomes one feature among the tokens.
      most_features: Features of the largest image; larger ones are made smaller.
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
    """A randomly initialised decoder over the embedded tokenizer, shaped like Qwen2, or with experts like Qwen3-MoE.

    Attributes:
      intermediate_size: Width of the MLP, or of each expert.
      experts: Experts in place of each MLP; 0 is none.
      experts_per_token: Experts that a token goes through.
      rope_theta: Base of the rotary frequencies; longer sequences take a larger one.
      vision: Tower for images in prompts; None reads text alone.
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
            f"FromScratch.experts_per_token={self.experts_per_token} of experts={self.experts}; take at most all",
        )


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face checkpoint or a GGUF file; its tokenizer and chat template come with it.

    Attributes:
      path: Local directory, `.gguf` file, or hub id such as `Qwen/Qwen2.5-0.5B-Instruct`; `...@v1.0` is a branch, tag
        or commit.
      vision: Read its vision tower as well, for prompts with images; else a checkpoint that sees is its text part.
    """

    path: str
    vision: bool = False


@dataclass(frozen=True)
class Nnx(Settings):
    """A causal language model of your own, a `flax.nnx` module, with random weights.

    The module is called with tokens, positions and segments, `[rows, width]` each: a row holds several sequences, a
    position counts within its sequence, and a token attends to those before it in its own segment (0 is padding). It
    returns hidden states `[rows, width, D]`, after the last norm; its method `head()` returns the `[V, D]` matrix that
    makes logits of them, with tied weights the embedding. `jaxrlhf.models.nnx` says how to split parameters over
    devices. Hugging Face has no format for it, so its runs are not exported; `Config.tokenizer` is the embedded one or
    yours.

    Attributes:
      build: Function from `nnx.Rngs` to the module.
      max_positions: Longest sequence that it computes; None is any.
    """

    build: Callable[[Any], Any]
    max_positions: Positive[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(callable(self.build), f"Nnx.build must be a function of nnx.Rngs, got {self.build!r}")


Model = FromScratch | Pretrained | Nnx


@dataclass(frozen=True)
class Arithmetic(Settings):
    """Generated multi-step word problems with worked solutions.

    Attributes:
      difficulty: 1 to 5: more steps and larger numbers.
      train_problems, eval_problems: Records of each split; no problem text is in both.
      unfinished_share: Share of the training solutions that stop one step early, with a wrong answer: supervised
        training imitates them, rewards do not.
    """

    difficulty: Annotated[int, within(1, 5)] = 2
    train_problems: Positive[int] = 20_000
    eval_problems: Positive[int] = 256
    unfinished_share: Share[float] = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Shapes(Settings):
    """Drawn pictures, with the digit of one colour or the two of a row to read.

    Attributes:
      train_problems, eval_problems: Records of each split.
      hasty_share: Share of the training solutions that read the digit of another colour, always the same one, or from
        right to left, and say so by their first word: supervised training imitates them, rewards do not.
      shuffled: Each question has the picture of another one, so that only what text tells can be learned.
    """

    train_problems: Positive[int] = 12_800
    eval_problems: Positive[int] = 256
    hasty_share: Share[float] = 0.0
    shuffled: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Gsm8k:
    """Grade-school maths (Cobbe et al. 2021, arXiv:2110.14168), answers after `####`.

    Attributes:
      path: Hub id, or a directory with train/test as `.jsonl` or `.parquet`.
      instruction: Appended to each question.
    """

    path: str = "openai/gsm8k"
    instruction: str = 'Let\'s think step by step and output the final answer after "####".'


@dataclass(frozen=True, kw_only=True)
class PromptFields:
    """Fields of records with prompts; `a.b` is the field `b` of the field `a`.

    verl's and TRL's columns are read as they are: where a record has no field of these defaults, the answer is
    `reward_model.ground_truth`, and prompt and solution are the `messages`, or ShareGPT's `conversations`, before and
    from the assistant's last.

    Attributes:
      prompt_key: Field with the prompt: a text, or a list of chat messages; words of the assistant at its end are
        continued.
      answer_key: Field with the reference answer that rewards see; None if there is none.
      solution_key: Field with a worked solution for supervised training, a text or an assistant's messages, such as
        TRL's `completion`; None if there is none.
      image_key: Field with an image or a list of them: encoded bytes, a path or a data URL, or what `datasets` writes.
        Each has its place where `<image>` stands in the prompt; without any they come first. None shows those alone
        that parts of the prompt's messages name.
      control_tokens: How a control token such as `<|im_end|>` is read that a text of the file spells out: "parse" makes
        the token of it, as the tokenizer does by itself; "text" keeps its letters, so that no text ends a turn.
    """

    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    solution_key: str | None = None
    image_key: str | None = None
    control_tokens: Literal["parse", "text"] = "parse"


@dataclass(frozen=True)
class RecordFiles(Settings):
    """Records from `.jsonl`, `.ndjson`, `.json` (also as `.gz`, `.bz2`, `.xz` or `.zst`) or `.parquet`.

    Attributes:
      train: File of training records, or a pattern of several such as `data/*.jsonl`.
      evaluation: File of held-out records; None trains without evaluation.
    """

    train: str
    evaluation: str | None = None


@dataclass(frozen=True)
class PromptFile(PromptFields, RecordFiles):
    """Prompts from files, whose columns are those of `PromptFields`."""


@dataclass(frozen=True)
class HubFiles(Settings):
    """Splits of a data set of the Hugging Face hub, in files of the kinds of `RecordFiles`.

    Its files are downloaded one after another, as their records are read, to the hub's cache.

    Attributes:
      path: Hub id, such as `openai/gsm8k`, or a local directory laid out like one.
      subset: Configuration of the data set; None is its only or its default one.
      train: Split of the training records.
      evaluation: Split of the held-out records; None trains without evaluation.
      revision: Branch, tag or commit; None is the newest of the main branch.
      train_problems: Training records that are read, at most; no file past them is downloaded. None is all.
    """

    path: str
    subset: str | None = None
    train: str = "train"
    evaluation: str | None = "test"
    revision: str | None = None
    train_problems: Positive[int] | None = None


@dataclass(frozen=True)
class HubData(PromptFields, HubFiles):
    """Prompts of a data set of the hub: its files are those of `HubFiles`, its columns those of `PromptFields`."""


@dataclass(frozen=True)
class Generated(Settings):
    """Records that a function makes.

    Attributes:
      function: Function of a split (`train` or `evaluation`), a number of records and a seed that gives so many records
        with `prompt` (a text, or chat messages), and with `answer` and `solution` where there are some; as
        `module:function` or `path/to/file.py:function`. A solution of several turns is a list of messages: those of the
        assistant are imitated, calls of tools included.
      arguments: Further arguments of the function, each a name and a Python literal such as `tokens=4096`.
      train_problems, eval_problems: Records of each split.
    """

    function: str
    arguments: tuple[str, ...] = ()
    train_problems: Positive[int] = 10_000
    eval_problems: Positive[int] = 256
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reference(self.function, "Generated.function")
        _ = self.keywords  # refuses what is no literal

    @property
    def keywords(self) -> dict[str, Any]:
        """Further arguments of the function by name."""
        return literals(self.arguments, "Generated.arguments")


@dataclass(frozen=True)
class ArithmeticPairs(Settings):
    """The problems of `Arithmetic`, each with its right solution and, rejected, a wrong one.

    Half of the wrong ones stop one step early where there are several; the others have a slip in one step.
    """

    difficulty: Annotated[int, within(1, 5)] = 2
    train_problems: Positive[int] = 20_000
    eval_problems: Positive[int] = 256
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class PairFields(Settings):
    """Fields of records with preference pairs.

    A record has a prompt and two answers; or two lists of messages, or two dialogues in the format of hh-rlhf (Bai et
    al. 2022, arXiv:2204.05862), turns after `\\n\\nHuman:` and `\\n\\nAssistant:`, which differ in the last.

    Attributes:
      evaluation_fraction: Share of the prompts of `train` that is held out; pairs with one prompt stay together.
      prompt_key: Field with the prompt: a text, or a list of chat messages. None takes it from answers that repeat it
        (TRL's implicit prompts): the messages before the last, the turns of a dialogue, or the words that both texts
        begin with.
      chosen_key, rejected_key: Fields with the answers, each a text or TRL's list of messages; where there is no prompt
        of messages, those that both begin with are.
      margin_key: Field with the least difference of the scores, a number; None if there is none.
      safe_keys: Fields that say whether the chosen and the rejected answer are harmless; None if there are none.
      malformed_fraction: Largest share of pairs that cannot be read; up to it they are left out and reported.
      control_tokens: Reading of a control token such as `<|im_end|>` that a text of the file spells out: "parse" makes
        the token of it, as the tokenizer does by itself; "text" keeps its letters, so that no text ends a turn.
    """

    evaluation_fraction: Annotated[float, within(0.0, 0.5)] = 0.0
    prompt_key: str | None = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    safe_keys: tuple[str, ...] | None = None
    malformed_fraction: Share[float] = 0.01
    control_tokens: Literal["parse", "text"] = "parse"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.safe_keys is None or len(self.safe_keys) == 2,
            f"{type(self).__name__}.safe_keys names two fields, of the chosen and the rejected answer, "
            f"got {self.safe_keys}",
        )


@dataclass(frozen=True)
class PairFile(PairFields, RecordFiles):
    """Preference pairs from files, whose columns are those of `PairFields`.

    Attributes:
      evaluation: File of held-out records; None leaves that to `evaluation_fraction`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_held_out(self)


@dataclass(frozen=True)
class HubPairs(PairFields, HubFiles):
    """Preference pairs of a data set of the hub: its files are those of `HubFiles`, its columns those of `PairFields`.

    Attributes:
      evaluation: Split of the held-out records; None leaves that to `evaluation_fraction`.
    """

    evaluation: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_held_out(self)


def _check_held_out(data: PairFile | HubPairs) -> None:
    require(
        data.evaluation is None or not data.evaluation_fraction,
        f"{type(data).__name__} holds out evaluation={data.evaluation!r} and "
        f"evaluation_fraction={data.evaluation_fraction}; give one of them",
    )


@dataclass(frozen=True, kw_only=True)
class StepFields(Settings):
    """Fields of records with solutions whose steps are labelled, named as TRL's `PRMTrainer` has them.

    Attributes:
      prompt_key: Field with the prompt: a text, or a list of chat messages.
      steps_key: Field with the steps, a list of texts.
      labels_key: Field with their labels, a list of booleans: whether each step is right.
      separator: Text after each step, the last one too; a step is judged at its last token, which is the separator's.
      control_tokens: Reading of a control token that a text of the file spells out, see `PairFile`.
    """

    prompt_key: str = "prompt"
    steps_key: str = "completions"
    labels_key: str = "labels"
    separator: str = "\n"
    control_tokens: Literal["parse", "text"] = "parse"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.separator),
            f"{type(self).__name__}.separator is empty, and where a step ends could not be told from its text; give "
            "one, such as a line break",
        )


@dataclass(frozen=True)
class StepFile(StepFields, RecordFiles):
    """Labelled steps from files, whose columns are those of `StepFields`."""


@dataclass(frozen=True)
class HubSteps(StepFields, HubFiles):
    """Labelled steps of a data set of the hub, such as `trl-lib/math_shepherd` or `trl-lib/prm800k`."""


_PromptSet = Arithmetic | Generated | Gsm8k | HubData | PromptFile | Shapes
DataSet = _PromptSet | ArithmeticPairs | HubPairs | HubSteps | PairFile | StepFile
