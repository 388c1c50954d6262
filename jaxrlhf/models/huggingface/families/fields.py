"""Fields of a config.json: each is read, known not to matter, or refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrlhf.config import Refusal

# Descriptions of the file, and defaults of training or generation; none affects the forward pass.
_HARMLESS = {
    *("architectures", "model_type", "auto_map", "_name_or_path", "name_or_path", "transformers_version"),
    *("_model_name_or_path",),  # transformers copies it from a GGUF file
    *("torch_dtype",),
    *("dtype", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    *("tokenizer_class", "prefix", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("decoder_start_token_id", "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop"),
    *("embd_pdrop", "classifier_dropout", "use_cache", "cache_implementation", "return_dict", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "torchscript", "use_bfloat16", "tf_legacy_loss"),
    *("chunk_size_feed_forward", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores"),
    *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "unsloth_fixed"),
    *("unsloth_version", "pretraining_tp"),
}
# Options of every architecture; no supported architecture has them switched on.
_OFF = {
    *("is_encoder_decoder", "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder"),
    *("pruned_heads",),
}
_DEQUANTISED = ("mxfp4", "fp8")
"""Values of `quant_method` whose tensors `quantized_files` can read."""
_PLAIN = ("gguf",)
"""Values of `quant_method` in directories whose tensors are not quantized, because transformers dequantized them."""


_REQUIRED = "required"


class Link(NamedTuple):
    """Field of config.json that is an attribute of `ModelConfig` or of one of its parts.

    Attributes:
      theirs: Name of the field.
      ours: Name of the attribute.
      default: Value of an absent field; without a default the field is required.
      kind: Type to convert the field to; None keeps the value.
    """

    theirs: str
    ours: str
    default: Any = _REQUIRED
    kind: Callable[[Any], Any] | None = None


def written(part: Any, links: Sequence[Link]) -> dict[str, Any]:
    """Return the linked fields of a model's configuration, or of one of its parts."""
    assert part is not None, f"the family requires a part with {links[0].ours}"
    return {link.theirs: getattr(part, link.ours) for link in links}


class Fields:
    """Fields of a config.json, and a record of the fields that were read.

    Args:
      where, family: Names of the file and of the family, for messages.
    """

    def __init__(self, given: Mapping[str, Any], where: str, family: str):
        self._given, self._where, self._family = dict(given), where, family
        self._asked: set[str] = set()

    def default(self, **values: Any) -> None:
        """Set values of fields that are absent or null."""
        self._given |= {name: value for name, value in values.items() if self._given.get(name) is None}

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if the field is absent; None if the field is null."""
        self._asked.add(name)
        return self._given.get(name, default)

    def need(self, name: str) -> Any:
        """Return a required field."""
        value = self.take(name)
        if value is None:
            raise Refusal(f"{self._where} has no {name}, which a {self._family} checkpoint requires")
        return value

    def linked(self, links: Sequence[Link], **defaults: Any) -> dict[str, Any]:
        """Return attributes by name, from their linked fields.

        Args:
          defaults: Values of absent fields, in place of the links' defaults.
        """
        found = {}
        for theirs, ours, default, kind in links:
            default = defaults.get(theirs, default)
            value = self.need(theirs) if default is _REQUIRED else self.take(theirs, default)
            found[ours] = value if kind is None else kind(value)
        return found

    def only(self, name: str, *values: Any) -> None:
        """Refuse a field unless it has one of the supported values; absent and null count as the first value."""
        given = self.take(name)
        if given is not None and given not in values:
            computed = " or ".join(map(repr, values)) or "null"
            raise self.error(f"{name}={given!r}", f"this {self._family} decoder supports only {computed}")

    def error(self, what: str, why: str) -> Refusal:
        """Return a refusal of the file: what the file has, and why that is wrong."""
        return Refusal(f"{self._where} has {what}; {why}")

    def unreadable(self, error: TypeError) -> Refusal:
        """Return a refusal of a file with values of wrong types, such as null."""
        nulls = sorted(name for name in self._asked if self._given.get(name, 0) is None)
        what = f"null for {', '.join(nulls)}" if nulls else "a value of the wrong type"
        return self.error(what, f"expected the fields of a {self._family} checkpoint ({error})")

    def finish(self) -> None:
        """Refuse fields that nothing read and that might change the numbers.

        Raises:
          Refusal: There is such a field, or a quantization that is not supported.
        """
        for name in sorted(_OFF):
            if self._given.get(name):
                raise self.error(
                    f"{name}={self._given[name]!r}", f"the {self._family} decoder does not support this setting"
                )
        quantised = self._given.get("quantization_config")
        if quantised and quantised.get("quant_method") not in (*_DEQUANTISED, *_PLAIN):
            raise self.error(
                f"quantization_config={quantised!r}",
                f"supported are {' and '.join(_DEQUANTISED)}, which are dequantized; use another checkpoint in "
                "bfloat16",
            )
        block = (quantised or {}).get("weight_block_size") or ()
        if any(size & (size - 1) for size in block):
            raise self.error(f"weight_block_size={block}", "block sizes must be powers of two")
        unknown = self._given.keys() - self._asked - _HARMLESS - _OFF - {"quantization_config"}
        for name in sorted(unknown):
            if self._given[name] is not None:
                raise self.error(
                    f"{name}={self._given[name]!r}",
                    f"this is an unknown field of a {self._family} checkpoint and might change its results",
                )
