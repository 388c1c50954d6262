"""What the tokens of the policy, of the other models and of the tokenizer have to do with each other."""

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Config, Pretrained, Refusal
from jaxrlhf.data import load_tokenizer
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.huggingface.config import read_stop_tokens
from jaxrlhf.models.huggingface.hub import resolve


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: AnyModel, *, role: str) -> None:
    """Raise `Refusal` if the tokenizer has ids that the model has no embedding for."""
    if len(tokenizer) > model.vocab_size:
        raise Refusal(
            f"{role}: the tokenizer has {len(tokenizer)} tokens and the model embeds {model.vocab_size}; "
            f"use the tokenizer that belongs to the model"
        )


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise `Refusal` if the tokens of the checkpoint at a path are not those of the policy's tokenizer."""
    if load_tokenizer(str(resolve(path))).get_vocab() != tokenizer.get_vocab():
        raise Refusal(
            f"reference_model={path!r} has another tokenizer than the policy, so it cannot judge the policy's tokens; "
            "choose one of the same family"
        )


def stop_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's EOS, those of the checkpoint's generation_config.json, and the configured texts.

    Raises:
      Refusal: A configured text is not one token.
    """
    if config.rollout.sampling.ignore_eos:
        return ()
    stops = [tokenizer.eos_token_id]
    if isinstance(config.model, Pretrained):
        stops += read_stop_tokens(config.model.path)
    for text in config.rollout.sampling.stop_tokens:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise Refusal(
                f"rollout.sampling.stop_tokens: {text!r} is {len(ids)} tokens in this tokenizer; a stop token is one"
            )
        stops += ids
    return tuple(dict.fromkeys(stops))
