"""Export of runs that trained LoRA adapters: the base weights, and base weights and adapters merged."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.batch import Params
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.checkpoint.pretrained import load_pretrained
from jaxrlhf.config import COLD_START, FromScratch, Lora, Model, Pretrained, Quantization, Refusal, Tower
from jaxrlhf.config.refusal import read_object, reading
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.load import Progress
from jaxrlhf.models.huggingface.peft import WEIGHTS, save_adapters
from jaxrlhf.models.huggingface.save import save_tokenizer
from jaxrlhf.models.linear import Adapter
from jaxrlhf.models.lora.lora import adapter_shapes, change_of, is_matrix
from jaxrlhf.models.lora.quantized import quantize
from jaxrlhf.models.parameters import init_params, param_shapes, path_name
from jaxrlhf.tracking.files import SETTINGS
from jaxrlhf.trainer.resume import PUT_BACK
from jaxrlhf.trainer.workdir import CHECKPOINTS

SUFFIX = "_adapters"
"""End of the name of a checkpoint item that holds a role's adapters in place of its weights."""


@dataclass(frozen=True)
class AdaptedRun:
    """Description of a run's adapters and their base weights, from the run's config.json.

    Attributes:
      lora: Settings of the adapters.
      model: Origin of the base weights.
      seed: Seed of the run; a model from scratch was initialized from it.
      cold_start: Folder of the run's cold start, which trained the base weights; None if there was none.
    """

    lora: Lora
    model: Model
    seed: int
    cold_start: Path | None

    @classmethod
    def of(cls, run: Path, role: str, saved: Mapping[str, Any]) -> "AdaptedRun":
        """Read the description from the run's workdir.

        Args:
          saved: JSON state of a checkpoint of the run, with the settings that its adapters were trained with.

        Raises:
          Refusal: config.json is damaged, or differs from the checkpoint.
        """
        config = read_object(run / SETTINGS, PUT_BACK)
        with reading(run / SETTINGS, PUT_BACK):
            return cls._of(config, run, role, saved)

    @classmethod
    def _of(cls, config: dict[str, Any], run: Path, role: str, saved: Mapping[str, Any]) -> "AdaptedRun":
        training = config["actor"] if role == "actor" else config["algorithm"][role]
        lora = {name: value for name, value in training["lora"].items() if name != "class"}
        trained = saved.get("adapters", {}).get(role, {})  # an earlier version saved none
        for name, value in lora.items():
            if trained.get(name, value) != value:
                raise Refusal(
                    f"{run / SETTINGS} has {name}={value!r} for the adapters of {role}, but the checkpoint was trained "
                    f"with {trained[name]!r}; {PUT_BACK}"
                )
        kinds: dict[str, Any] = {kind.__name__: kind for kind in (FromScratch, Pretrained)}
        model = dict(config["model"])
        if isinstance(tower := model.get("vision"), dict):
            model["vision"] = Tower(**{name: value for name, value in tower.items() if name != "class"})
        cold = run / COLD_START
        return cls(
            Lora(**{**lora, "targets": tuple(lora["targets"])}),
            kinds[model.pop("class")](**model),
            config["seed"],
            cold if config["cold_start"] is not None else None,
        )

    @property
    def trained_weights(self) -> Path | None:
        """Checkpoint item of the cold start that holds the base weights; None without a cold start."""
        if self.cold_start is None:
            return None
        with closing(Checkpoints(self.cold_start / CHECKPOINTS, read_only=True)) as checkpoints:
            return checkpoints.checked_folder(self._newest(checkpoints), "actor")

    def weights(self, config: ModelConfig, head: Head) -> Iterator[tuple[str, jax.Array]]:
        """Yield each base weight in float32, with its path; a value head is zero."""
        whole = _on_host()
        if self.cold_start is not None:
            target = placed(param_shapes(config, head, jnp.float32))
            with closing(Checkpoints(self.cold_start / CHECKPOINTS, read_only=True)) as checkpoints:
                yield from checkpoints.read_each(self._newest(checkpoints), "actor", target)
            return
        with jax.default_device(next(iter(whole.device_set))):
            if isinstance(self.model, Pretrained):
                shardings = jax.tree.map(lambda _: whole, param_shapes(config, head, jnp.float32))
                params = load_pretrained(self.model.path, config, head, shardings)
            else:
                params = init_params(config, head, jax.random.key(self.seed))
        yield from ((path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(params))

    def merged(self, adapters: Params, config: ModelConfig, head: Head) -> Iterator[tuple[str, jax.Array]]:
        """Yield each weight with its adapter's change added, and its path."""
        trained = jax.tree.leaves_with_path(adapters, is_leaf=lambda node: isinstance(node, Adapter))
        changes = {path_name(path): node for path, node in trained}
        for path, weight in self.weights(config, head):
            change = changes.get(path)
            if self.lora.quantize is not None and is_matrix(path):
                weight = _rounded(weight, self.lora.quantize)
            if isinstance(change, Adapter):
                yield path, weight + change_of(change)
            else:
                yield path, weight if change is None else change

    def adapters(self, checkpoints: Checkpoints, step: int, role: str, config: ModelConfig, head: Head) -> Params:
        """Read the adapters of one step."""
        name = role + SUFFIX
        return checkpoints.read(step, {name: placed(adapter_shapes(config, head, self.lora))})[name]

    def save(
        self,
        adapters: Params,
        config: ModelConfig,
        head: Head,
        directory: Path,
        *,
        tokenizer: Any,
        dtype: str,
        progress: Progress,
    ) -> None:
        """Write the adapters alone, with the tokenizer.

        Raises:
          Refusal: The base weights exist only in the run's own checkpoints.
        """
        source = checkpoint_of(self.model, cold_start=self.cold_start is not None)
        save_adapters(adapters, config, head, self.lora, directory, model=source.path, dtype=jnp.dtype(dtype))
        save_tokenizer(tokenizer, directory)
        size = (directory / WEIGHTS).stat().st_size
        progress(size, size)

    def _newest(self, checkpoints: Checkpoints) -> int:
        step = checkpoints.latest()
        if step is None:
            raise Refusal(
                f"{checkpoints.directory} is missing, and with it the base weights of the adapters; restore the folder"
            )
        return step


def checkpoint_of(model: Model, *, cold_start: bool) -> Pretrained:
    """Return the pretrained checkpoint that holds the base weights of adapters exported alone.

    Raises:
      Refusal: The base weights exist only in the run's own checkpoints.
    """
    if cold_start or not isinstance(model, Pretrained):
        raise Refusal(
            "the base weights of the adapters exist only in this run; export base weights and adapters together with "
            "--merge"
        )
    return model


@partial(jax.jit, static_argnums=1)
def _rounded(weight: jax.Array, kind: Quantization) -> jax.Array:
    """Round a weight to its quantized values, layer by layer because XLA takes much memory for it."""
    return jax.lax.map(lambda layer: quantize(layer, kind).astype(layer.dtype), weight)


def placed(shapes: Any) -> Any:
    """Give shapes a sharding in this host's memory."""
    whole = _on_host()
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)


def _on_host() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
