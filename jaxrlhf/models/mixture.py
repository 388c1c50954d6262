"""Geometric mixture of two policies of the same shape, as a model to generate from."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Refusal
from jaxrlhf.models.attention.kv_cache import empty_cache
from jaxrlhf.models.causal_lm import AnyModel, CausalLM
from jaxrlhf.models.config import LAYERS, Head, ModelConfig
from jaxrlhf.models.decoder import DecodeOutput, HiddenStates, PrefillOutput, decode, hidden_states, prefill
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.heads import table
from jaxrlhf.models.parameters import declare, init_params
from jaxrlhf.models.stack import unstack_layers


@dataclass(frozen=True)
class GeometricMixture(CausalLM):
    """Model whose next-token distribution is proportional to policy^(1 - share) * reference^share.

    Its logits are (1 - share) times the policy's logits plus share times the reference's logits. One product computes
    them: both hidden states, scaled and concatenated, times both tables, concatenated. The cache has the layers of
    the policy, then the layers of the reference. Pipeline stages are not supported.

    Attributes:
      base: Configuration of both policies.
      share: Weight of the reference, from 0 to 1.
    """

    base: ModelConfig
    share: float
    name: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    num_layers: int
    num_kv_heads: int

    @classmethod
    def of(cls, base: AnyModel, share: float) -> "GeometricMixture":
        """Build the mixture of two policies.

        Raises:
          Refusal: `base` is not a dense text decoder with uncapped logits, and with keys and values in all layers.
        """
        what = None
        if not isinstance(base, ModelConfig):
            what = "has functions of its own"
        elif base.final_logit_softcapping is not None:
            what = "caps its logits, so that those of two are no product of both hidden states"
        elif {*base.pattern.stack_of()} != {LAYERS} or base.latent is not None:
            what = "has layers of several kinds, or with a latent instead of keys and values"
        elif base.experts is not None or base.vision is not None:
            what = "has experts, or reads images"
        if what is not None or not isinstance(base, ModelConfig):
            raise Refusal(f"a mixture of policies samples from dense decoders that read text, and the model {what}")
        sizes = base.vocab_size, 2 * base.hidden_size, base.max_positions, 2 * base.num_layers, base.num_kv_heads
        return cls(base, share, "a mixture of two policies", *sizes)

    def joined(self, policy: Params, reference: Params) -> Params:
        """Return the parameters of the mixture: the arrays of both policies, and both tables concatenated."""
        whole = _side_by_side(*(table(params, self.base) for params in (policy, reference)))
        return {"policy": policy, "reference": reference, "table": whole}

    def num_parameters(self, head: Head = "lm") -> int:
        return 2 * self.base.num_parameters(head)

    def declare(self, head: Head) -> dict[str, Any]:
        return {name: declare(self.base, head) for name in ("policy", "reference")}

    def init_params(self, head: Head, key: Any) -> Params:
        return self.joined(*(init_params(self.base, head, own) for own in jax.random.split(key)))

    def table(self, params: Params) -> Array:
        return params["table"]

    def hidden_states(self, params: Params, *rows: Any, **how: Any) -> HiddenStates:
        """Run both policies over packed rows."""
        each = [hidden_states(params[name], self.base, *rows, **how) for name in ("policy", "reference")]
        return HiddenStates(self._side_by_side(*(one.hidden_RWD for one in each)))

    def empty_cache(self, **sizes: Any) -> list[Any]:
        return [*empty_cache(self.base, **sizes), *empty_cache(self.base, **sizes)]

    def prefill(
        self,
        params: Params,
        token_PS: Array,
        length_P: Array,
        *,
        layers: list[Params] | None = None,
        chunk_tokens: int | None = None,
        execution: Execution = ONE_DEVICE,
    ) -> PrefillOutput:
        assert layers is None, "the layers of a mixture stay in their stacks"
        prompts, how = (token_PS, length_P), {"chunk_tokens": chunk_tokens, "execution": execution}
        policy, reference = (prefill(params[name], self.base, *prompts, **how) for name in ("policy", "reference"))
        prefix = jax.tree.map(lambda *layers: jnp.concatenate(layers), policy.prefix, reference.prefix)
        return PrefillOutput(self._side_by_side(policy.hidden_PD, reference.hidden_PD), prefix)

    def unstack_layers(self, params: Params, *, execution: Execution = ONE_DEVICE) -> list[Params]:
        names = ("policy", "reference")
        return [layer for name in names for layer in unstack_layers(params[name], self.base, execution=execution)]

    def decode(
        self,
        layers: list[Params],
        params: Params,
        token_B: Array,
        position_B: Array,
        cache: Any,
        *,
        execution: Execution = ONE_DEVICE,
    ) -> DecodeOutput:
        half, slots = self.base.num_layers, (token_B, position_B)
        policy, reference = (
            decode(layers[own], params[name], self.base, *slots, cache[own], execution=execution)
            for name, own in (("policy", slice(half)), ("reference", slice(half, None)))
        )
        hidden_BD = self._side_by_side(policy.hidden_BD, reference.hidden_BD)
        return DecodeOutput(hidden_BD, [*policy.cache, *reference.cache])

    def _side_by_side(self, policy_D: Array, reference_D: Array) -> Array:
        scales = ((1 - self.share) / self.base.logits_scaling, self.share / self.base.logits_scaling)
        return jnp.concatenate([scales[0] * policy_D, scales[1] * reference_D], axis=-1)


@jax.jit
def _side_by_side(policy_VD: Array, reference_VD: Array) -> Array:
    return jnp.concatenate([policy_VD, reference_VD], axis=1)
