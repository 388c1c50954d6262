"""Parameters of the residual stream besides attention and the MLP: layers' own inputs, streams and narrow products.

All norms declared here start with a scale of one.
"""

from typing import Any

from jaxrlhf.models.config import LayerInputs, ModelConfig, padded_rows
from jaxrlhf.models.config.param import Param
from jaxrlhf.sharding.rules import Dim


def declare_around_layers(config: ModelConfig) -> dict[str, Any]:
    """Declare the parameters that all layers share."""
    tree: dict[str, Any] = {}
    if config.layer_inputs is not None:
        tree["layer_inputs"] = _layer_inputs(config, config.layer_inputs)
    if config.streams is not None:
        width = config.hidden_size
        square = Param((config.streams.count - 1, width, width), (None, "embed", None), fan_in=width)
        tree["streams"] = {"spread": square, "gather": square}
    return tree


def _layer_inputs(config: ModelConfig, inputs: LayerInputs) -> dict[str, Param]:
    """Declare the embedding table and projection of layer inputs, stored together for all layers."""
    rows, width, layers, each = padded_rows(inputs.vocab_size), config.hidden_size, config.num_layers, inputs.width
    whole: tuple[Dim, ...] = ("vocab", None, ("embed", each))
    return {
        "embed": Param((rows, layers, each), whole, fan_in=each, padding=rows - inputs.vocab_size),
        "projection": Param((width, layers, each), ("embed", None, None), fan_in=width),
        "norm": Param((each,), (None,), "ones"),
    }


def declare_in_layers(config: ModelConfig) -> dict[str, Any]:
    """Declare the parameters of layers that are alike."""
    layers, width = config.num_layers, config.hidden_size
    norm = Param((layers, width), ("layers", None), "ones")
    tree: dict[str, Any] = {}

    def narrow(inner: int) -> dict[str, Param]:
        return {
            "narrow": Param((layers, width, inner), ("layers", "embed", None), fan_in=width),
            "widen": Param((layers, inner, width), ("layers", None, "embed"), fan_in=inner),
            "norm": norm,
        }

    if config.layer_inputs is not None:
        tree["layer_input"] = narrow(config.layer_inputs.width)
    if config.laurel_rank is not None:
        tree["laurel"] = narrow(config.laurel_rank)
    if config.streams is not None:
        count, small = config.streams.count, ("layers", None, None)
        tree["streams"] = {
            "router": Param((layers, width, count), ("layers", "embed", None), fan_in=width),
            "router_norm": norm,
            "predict": Param((layers, count, count**2), small, fan_in=count),
            "correct": Param((layers, count, count), small, fan_in=count),
            "scale": norm,
        }
    if config.layer_scale:
        tree["scale"] = Param((layers, 1), ("layers", None), "ones", fixed=True)
    return tree
