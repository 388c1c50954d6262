"""Tasks of EleutherAI's lm-evaluation-harness (`lm_eval`), run on a policy in this process."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table
from tqdm import tqdm

from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.data.tokenizer import TokenBytes
from jaxrlhf.engine import Request
from jaxrlhf.trainer.served_policy.load import LoadedPolicy

_SEED = 1234
"""Seed of sampled answers; the harness sends the same to servers."""
_AT_ONCE = 256
"""Number of sequences between two updates of the progress bar."""
_MAX_GEN_TOKS = 256
"""Most tokens of an answer where a task names no number, as in the harness's own models."""
_RESAMPLES = 1000
"""Number of resamples for the standard errors that have no formula."""
_SAMPLING = {"temperature", "top_p", "top_k", "min_p"}


class HarnessModel(TemplateLM):
    """Model of the harness whose numbers come from an engine; texts are encoded as the harness's `hf` model does."""

    def __init__(self, policy: LoadedPolicy, name: str) -> None:
        super().__init__()
        self._engine, self._name = policy.engine, name
        self.tokenizer: Any = policy.tokenizer
        self._bytes = TokenBytes(policy.tokenizer)

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without context."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in caches of requests."""
        return self._name.replace("/", "__")

    @property
    def max_length(self) -> int:
        """Number of tokens that may precede a scored token."""
        return self._engine.context_tokens - 1

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text; by default the tokenizer adds its control tokens, a BOS at most once."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat, with the reply opened or the last message continued."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **how)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether its tokens are the likeliest ones."""
        texts = [(*context, *continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(texts), desc="log-likelihoods", disable=disable_tqdm) as progress:
            for start in range(0, len(order), _AT_ONCE):
                some = order[start : start + _AT_ONCE]
                for index, scores in zip(some, self._engine.score([texts[index] for index in some]), strict=True):
                    key, continuation = requests[index][0], requests[index][2]
                    own = slice(len(texts[index]) - len(continuation), None)
                    found[index] = float(scores.logp_T[own].sum()), bool(scores.is_greedy_T[own].all())
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, found[index])
                progress.update(len(some))
        return [found[index] for index in range(len(texts))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the context."""
        windows, owner = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            how = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length, "context_len": 1}
            for window in map(make_disjoint_window, get_rolling_token_windows(self.tok_encode(text), **how)):
                windows.append((None, *window))
                owner.append(number)
        sums = [0.0] * len(requests)
        for number, (logp, _) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[number] += logp
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return an answer to each text, up to the first of its stop texts.

        Raises:
          Refusal: A task requests more tokens than the engine allows, or sampling that the engine does not support.
        """
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="answers", disable=disable_tqdm) as progress:
            for numbers in alike.values():
                settings = normalize_gen_kwargs(requests[numbers[0]].args[1], _MAX_GEN_TOKS)
                queries, sampling, until = self._requests(
                    [requests[number].args[0] for number in numbers], dict(settings)
                )
                done = self._engine.generate(queries, sampling, seed=_SEED, on_completion=lambda _: progress.update())
                for number, completion in zip(numbers, done, strict=True):
                    text = self._bytes.text(completion.tokens)
                    texts[number] = min((text.partition(stop)[0] for stop in until), key=len, default=text)
                    self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return texts

    def _requests(
        self, contexts: Sequence[str], settings: dict[str, Any]
    ) -> tuple[list[Request], Sampling, tuple[str, ...]]:
        """Return the engine's requests for texts with equal settings, their sampling, and their stop texts."""
        most, samples = settings.pop("max_gen_toks"), settings.pop("do_sample")
        until = tuple(dict.fromkeys(stop for stop in settings.pop("until") if stop))
        if most > self._engine.response_tokens:
            raise Refusal(
                f"a task requests {most} response tokens, but the engine allows {self._engine.response_tokens}; "
                "raise --max-tokens"
            )
        if unknown := sorted(name for name in settings if name not in _SAMPLING):
            raise Refusal(f"a task sets {', '.join(unknown)} for its responses, which the engine does not support")
        how = {name: value for name, value in settings.items() if value is not None}
        greedy = not samples or not how.get("temperature")
        sampling = Sampling(greedy=True) if greedy else Sampling(**how)
        budget = self._engine.context_tokens - most
        prompts = [tuple(self.tok_encode(context)[-budget:]) for context in contexts]
        how = {"max_tokens": most, "stop_texts": until}
        return [Request(number, prompt, **how) for number, prompt in enumerate(prompts)], sampling, until


def evaluate_tasks(
    policy: LoadedPolicy,
    name: str,
    tasks: Sequence[str],
    *,
    folder: Path | None,
    limit: float | None,
    num_fewshot: int | None,
    chat: bool,
    out: Path | None,
) -> None:
    """Ask a policy the tasks of the harness, and print their table.

    Args:
      name: Name of the policy in the results.
      folder: Folder of further tasks; None is only those of the harness.
      limit: Number of examples of each task, or their share if below 1; None is all.
      num_fewshot: Number of solved examples before each example; None is what each task says.
      chat: True writes examples as chats, by the tokenizer's chat template.
      out: JSON file to write the results to; None writes no file.

    Raises:
      Refusal: The harness has no such task.
    """
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if missing := [task for task in tasks if not manager.match_tasks([task])]:
        where = "" if folder is None else f" or {folder}"
        raise Refusal(f"lm_eval{where} has no task {', '.join(missing)}; list the tasks with `lm-eval ls tasks`")
    os.environ["DISABLE_MULTIPROC"] = "1"  # the harness would fork processes for standard errors, next to JAX's threads
    results = simple_evaluate(
        model=HarnessModel(policy, name),
        tasks=manager.match_tasks([*tasks]),
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=_RESAMPLES,
    )
    assert results is not None, "only processes of other ranks get no results"
    results["config"]["model"] = name
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if out is not None:
        out.write_text(json.dumps(results, indent=2, default=handle_non_serializable) + "\n")
