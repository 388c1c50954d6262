"""Programs compiled ahead of time and kept by the sizes they serve."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxrlhf.engine.programs import Shape

Size = str | int | None


class Compiled:
    """The compiled programs of one engine; another size compiles another, anything else that differs is an error.

    Args:
      whole: Sharding of arguments that come from the host.
    """

    def __init__(self, shape: Shape, whole: Any) -> None:
        self._shape, self._whole = shape, whole
        self._programs: dict[tuple[Size, ...], jax.stages.Compiled] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def named(self, name: str) -> list[jax.stages.Compiled]:
        """The programs of every size."""
        return [program for (first, *_), program in self._programs.items() if first == name]

    def run(self, sizes: tuple[Size, ...], program: Callable, *arguments: Any, out: Any, donate: Any = ()) -> Any:
        """Call a program compiled for these sizes, of which the first is its name; compile it the first time."""
        if sizes not in self._programs:
            layout = jax.tree.map(lambda leaf: getattr(leaf, "sharding", self._whole), arguments)
            jitted = jax.jit(
                partial(program, shape=self._shape), in_shardings=layout, out_shardings=out, donate_argnums=donate
            )
            self._programs[sizes] = jitted.lower(*arguments).compile()
        return self._programs[sizes](*arguments)
