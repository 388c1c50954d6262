"""Picture of the part of the weights that each of eight devices holds in training and in generation.

    python -m scripts.tools.draw_layouts

Writes `docs/layouts.png`: HybridFlow's order of axes next to the vanilla order, for training with tensor 4 and
generation with tensor 2 (Figure 8 of arXiv:2409.19256). The parts are read from the package's shardings.
"""

import os

os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from jaxrlhf.config import Layout
from jaxrlhf.sharding.mesh import factored_mesh
from jaxrlhf.sharding.rules import GENERATE, TRAIN, shardings
from scripts.pages import DOCS

OUTPUT = DOCS / "layouts.png"
SIZE = 4
"""Number of parts of the weights."""

KEPT, RECEIVED, DROPPED = "#2f6f9f", "#f2b134", "#c9d3db"


def parts(sharding: NamedSharding) -> list[set[int]]:
    """Return the parts that each device holds."""
    indices = sharding.devices_indices_map((SIZE,))
    return [set(range(SIZE)[indices[device][0]]) for device in jax.devices()]


def refining() -> tuple[list[set[int]], list[set[int]]]:
    """Return the parts of each device in the package's own training and generation layouts."""
    mesh = factored_mesh(Layout(tensor=4, generation_tensor=2), jax.devices())
    train, generate = (shardings(mesh, ("mlp",), rules) for rules in (TRAIN, GENERATE))
    return parts(train), parts(generate)


def vanilla() -> tuple[list[set[int]], list[set[int]]]:
    """Return the parts of each device if generation groups are consecutive devices, like training groups."""
    devices = np.asarray(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "micro", "tensor"), axis_types=(AxisType.Auto,) * 3)
    return parts(NamedSharding(mesh, PartitionSpec(("micro", "tensor")))), parts(
        NamedSharding(mesh, PartitionSpec("tensor"))
    )


def draw(axes: Axes, train: list[set[int]], generate: list[set[int]], title: str) -> None:
    """Draw a column for each device, with a box for each part that the device holds in either layout."""
    for device, (before, after) in enumerate(zip(train, generate, strict=True)):
        for part in before | after:
            color = KEPT if part in before & after else RECEIVED if part in after else DROPPED
            axes.add_patch(plt.Rectangle((device + 0.08, part + 0.05), 0.84, 0.9, color=color))
    axes.set(xlim=(0, len(train)), ylim=(0, SIZE), title=title, xlabel="device")
    axes.set_xticks(np.arange(len(train)) + 0.5, [str(device) for device in range(len(train))])
    axes.set_yticks(np.arange(SIZE) + 0.5, [f"{part + 1}/{SIZE}" for part in range(SIZE)])
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
    draw(left, *refining(), "refining order: each device keeps its part and receives one")
    draw(right, *vanilla(), "vanilla order: devices 1, 2, 5, 6 start over")
    left.set_ylabel("part of the weights")
    meaning = {"kept": KEPT, "received": RECEIVED, "dropped": DROPPED}
    handles = [Patch(color=color, label=label) for label, color in meaning.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(OUTPUT, dpi=120)
    print(OUTPUT)


if __name__ == "__main__":
    main()
