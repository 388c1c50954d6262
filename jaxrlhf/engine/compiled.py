"""Programs compiled ahead of time and kept by the sizes they serve."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrlhf.engine.programs import Shape
from jaxrlhf.sharding.described import are_here, described

Size = str | int | None


class Compiled:
    """The compiled programs of one engine; another size compiles another, anything else that differs is an error.

    Args:
      whole: Sharding of arguments that come from the host.

    Attributes:
      programs: By name and sizes.
      here: False if the devices are only described: programs are lowered, and give shapes with shardings.
      lowered: Programs that were lowered instead of run, by name and sizes.
    """

    def __init__(self, shape: Shape, whole: NamedSharding) -> None:
        self._shape, self._whole, self.here = shape, whole, are_here(list(whole.mesh.devices.flat))
        self.programs: dict[tuple[Size, ...], jax.stages.Compiled] = {}
        self.lowered: dict[str, jax.stages.Lowered] = {}

    def __len__(self) -> int:
        return len(self.programs)

    def named(self, name: str) -> list[jax.stages.Compiled]:
        """The programs of every size."""
        return [program for (first, *_), program in self.programs.items() if first == name]

    def put(self, arrays: Any, sharding: Any) -> Any:
        """Host arrays on the devices."""
        return jax.device_put(arrays, sharding) if self.here else described(arrays, sharding)

    def run(self, sizes: tuple[Size, ...], program: Callable, *arguments: Any, out: Any, donate: Any = ()) -> Any:
        """Call a program compiled for these sizes, of which the first is its name; compile it the first time."""
        if sizes not in self.programs or not self.here:
            layout = jax.tree.map(lambda leaf: getattr(leaf, "sharding", self._whole), arguments)
            jitted = jax.jit(
                partial(program, shape=self._shape), in_shardings=layout, out_shardings=out, donate_argnums=donate
            )
            lowered = jitted.lower(*arguments)
            if not self.here:
                return self._outputs(sizes, lowered, out)
            self.programs[sizes] = lowered.compile()
        return self.programs[sizes](*arguments)

    def _outputs(self, sizes: tuple[Size, ...], lowered: jax.stages.Lowered, out: Any) -> Any:
        """Outputs of a program that does not run; where they are is the compiler's choice if `out` is None."""
        name, *rest = map(str, sizes)
        self.lowered[f"{name}[{', '.join(rest)}]" if rest else name] = lowered
        return described(lowered.out_info, lowered.compile().output_shardings if out is None else out)
