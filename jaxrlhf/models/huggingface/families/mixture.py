"""Where a mixture of experts lies in a checkpoint: a tensor for each expert of each layer."""

from jaxrlhf.models.huggingface.families.family import DECODER, LAYER, StoredTensor


def mixture(place: str, *, gate: str, up: str, down: str) -> dict[str, StoredTensor]:
    """`DECODER` with routed experts in place of the MLP.

    Args:
      place: Of the mixture in a layer, such as `mlp`; the others are names of an expert's matrices.
    """
    layer = f"{LAYER}{place}."
    expert = layer + "experts.{expert}."
    rest = {path: stored for path, stored in DECODER.items() if not path.startswith("layers.mlp.")}
    return rest | {
        "layers.mlp.router": StoredTensor(layer + "gate.weight", "DE", "E D"),
        "layers.mlp.experts.gate": StoredTensor(f"{expert}{gate}.weight", "DF", "F D"),
        "layers.mlp.experts.up": StoredTensor(f"{expert}{up}.weight", "DF", "F D"),
        "layers.mlp.experts.down": StoredTensor(f"{expert}{down}.weight", "FD", "D F"),
    }
