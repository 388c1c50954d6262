"""Policies on disk: the checkpoints of runs, with whole weights or LoRA adapters, and Hugging Face checkpoints."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrlhf.batch import Params
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.checkpoint.items import stored_shapes
from jaxrlhf.checkpoint.pretrained import load_pretrained
from jaxrlhf.config import COLD_START, FromScratch, Lora, Model, Pretrained, Quantization, Refusal, Tower
from jaxrlhf.config.refusal import read_object, reading
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.load import Progress, has_mtp
from jaxrlhf.models.huggingface.peft import WEIGHTS, save_adapters
from jaxrlhf.models.huggingface.save import save_tokenizer
from jaxrlhf.models.linear import Adapter
from jaxrlhf.models.lora.lora import adapter_shapes, change_of, is_matrix
from jaxrlhf.models.lora.quantized import quantize
from jaxrlhf.models.parameters import init_params, param_shapes, path_name
from jaxrlhf.tracking.files import SETTINGS
from jaxrlhf.trainer.resume import PUT_BACK
from jaxrlhf.trainer.workdir import CHECKPOINTS, MODEL

SUFFIX = "_adapters"
"""End of the name of a checkpoint item that holds a role's adapters in place of its weights."""

NO_FORMAT = "a user-defined module (Nnx), which has no Hugging Face format"


@dataclass(frozen=True)
class AdaptedRun:
    """Description of a run's adapters and their base weights, from the run's config.json.

    Attributes:
      lora: Settings of the adapters.
      model: Origin of the base weights.
      seed: Seed of the run; a model from scratch was initialized from it.
      cold_start: Policy of the run's cold start, whose weights are the base weights; None if there was none.
    """

    lora: Lora
    model: Model
    seed: int
    cold_start: "SavedPolicy | None"

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
        return cls(
            Lora(**{**lora, "targets": tuple(lora["targets"])}),
            kinds[model.pop("class")](**model),
            config["seed"],
            _newest(run / COLD_START) if config["cold_start"] is not None else None,
        )

    def weights(self, config: ModelConfig, head: Head) -> Iterator[tuple[str, jax.Array]]:
        """Yield each base weight in float32, with its path; a value head is zero."""
        if self.cold_start is not None:
            return self.cold_start.weights(config)
        whole = _on_host()
        with jax.default_device(next(iter(whole.device_set))):
            if isinstance(self.model, Pretrained):
                shardings = jax.tree.map(lambda _: whole, param_shapes(config, head, jnp.float32))
                params = load_pretrained(self.model.path, config, head, shardings)
            else:
                params = init_params(config, head, jax.random.key(self.seed))
        return ((path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(params))

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


@dataclass(frozen=True)
class SavedPolicy:
    """Policy on disk: the model of a run's checkpoint, or a Hugging Face checkpoint.

    Attributes:
      source: Workdir of the run, or path or hub id of the Hugging Face checkpoint.
      run: Workdir of the run; None for a Hugging Face checkpoint.
      step: Step of the run's checkpoint; 0 for a Hugging Face checkpoint.
      role: Role that the run trained; `critic` is the reward model of a run without an actor.
      adapted: Adapters and base weights; None if the run trained whole weights.
    """

    source: str
    run: Path | None = None
    step: int = 0
    role: Literal["actor", "critic"] = "actor"
    adapted: AdaptedRun | None = None

    @property
    def name(self) -> str:
        """Path or hub id of the policy, with the step of a run's checkpoint."""
        return self.source if self.run is None else f"{self.run}, step {self.step}"

    @property
    def head(self) -> Head:
        """Head of the model."""
        return "lm" if self.role == "actor" else "value"

    @property
    def is_described(self) -> bool:
        """True if the model has a configuration and tokenizer in Hugging Face format."""
        return self.run is None or (self.run / MODEL).is_dir()

    @property
    def description(self) -> str:
        """Path or hub id of the model's configuration and tokenizer.

        Raises:
          Refusal: The run trained a user-defined module.
        """
        if not self.is_described:
            raise Refusal(
                f"{self.run} trained {NO_FORMAT}; evaluate it with the configuration of its run, or choose another run"
            )
        return self.source if self.run is None else str(self.run / MODEL)

    @property
    def mtp(self) -> bool:
        """True if the weights include a layer that predicts the second next token."""
        if self.run is None:
            return has_mtp(self.source)
        if self.adapted is not None:
            return isinstance(self.adapted.model, Pretrained) and self.adapted.model.mtp
        return "mtp.norm" in stored_shapes(self.folder(self.role))

    def folder(self, item: str) -> Path:
        """Return the folder of an item of the run's checkpoint, such as `actor`; the files are intact if they exist."""
        with closing(self._checkpoints()) as checkpoints:
            exists = item in checkpoints.holds(self.step)
            return (checkpoints.checked_folder if exists else checkpoints.folder)(self.step, item)

    def adapters(self, config: ModelConfig) -> Params:
        """Read the adapters of the run's checkpoint."""
        assert self.adapted is not None
        name = self.role + SUFFIX
        with closing(self._checkpoints()) as checkpoints:
            shapes = placed(adapter_shapes(config, self.head, self.adapted.lora))
            return checkpoints.read(self.step, {name: shapes})[name]

    def weights(self, config: ModelConfig) -> Iterator[tuple[str, jax.Array]]:
        """Yield each weight of the run's checkpoint in float32, with adapters merged, and its path."""
        if self.adapted is not None:
            return self.adapted.merged(self.adapters(config), config, self.head)
        with closing(self._checkpoints()) as checkpoints:
            return checkpoints.read_each(self.step, self.role, placed(param_shapes(config, self.head, jnp.float32)))

    def _checkpoints(self) -> Checkpoints:
        assert self.run is not None, "only runs have checkpoints of ours"
        return Checkpoints(self.run / CHECKPOINTS, read_only=True)


def find_policy(source: str | Path, step: int | None = None) -> SavedPolicy:
    """Find the policy that a command names.

    Args:
      source: Workdir of a run, directory of a Hugging Face checkpoint, GGUF file, or hub id.
      step: Step of a run's checkpoint; None is the newest.

    Raises:
      Refusal: There is no such checkpoint, or the run trained no policy.
    """
    place = Path(source).expanduser()
    if (place / MODEL).is_dir() or (place / CHECKPOINTS).is_dir():
        return find_run(source, step)
    if step is not None:
        raise Refusal(f"--step {step} requires the workdir of a run, but {source} is none; omit --step")
    return SavedPolicy(str(source))


def find_run(workdir: str | Path, step: int | None = None, *, reward_model: bool = False) -> SavedPolicy:
    """Find the policy of a run.

    Args:
      step: Step of the run's checkpoint; None is the newest.
      reward_model: True finds the reward model of a run that trained no policy.

    Raises:
      Refusal: There is no such run or checkpoint, or the run trained no policy.
    """
    run = Path(workdir).expanduser()
    if run.name == COLD_START and (run.parent / MODEL).is_dir():
        raise Refusal(f"{run} is the cold start of the run in {run.parent}; choose {run.parent} or another whole run")
    if not (run / MODEL).is_dir() and not (run / CHECKPOINTS).is_dir():
        raise Refusal(
            f"{run} has no {MODEL} folder, so it is not the workdir of a run; train first, or choose another policy"
        )
    with closing(Checkpoints(run / CHECKPOINTS, read_only=True)) as checkpoints:
        found = checkpoints.latest() if step is None else step
        if found is None or found not in checkpoints.steps():
            which = "" if found is None else f" of step {found}"
            raise Refusal(f"{checkpoints.directory} has no checkpoint{which}; it has {checkpoints.steps()}")
        held = checkpoints.holds(found)
        role: Literal["actor", "critic"] = "actor" if held & {"actor", f"actor{SUFFIX}"} else "critic"
        if role == "critic" and not reward_model:
            raise Refusal(f"{run} trained no policy, and only a policy answers prompts; choose another run")
        adapted = AdaptedRun.of(run, role, checkpoints.state(found)) if role + SUFFIX in held else None
    return SavedPolicy(str(run), run, found, role, adapted)


def _newest(cold_start: Path) -> SavedPolicy:
    """Return the policy that a cold start has trained."""
    with closing(Checkpoints(cold_start / CHECKPOINTS, read_only=True)) as checkpoints:
        step = checkpoints.latest()
    if step is None:
        raise Refusal(
            f"{checkpoints.directory} is missing, and with it the base weights of the adapters; restore the folder"
        )
    return SavedPolicy(str(cold_start), cold_start, step)


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
