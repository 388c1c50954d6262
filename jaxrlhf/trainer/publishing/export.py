"""Exports by command: flags that `jaxrlhf export` and `jaxrlhf train --export` share, and what they stand for."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrlhf.config import Config, Refusal


def add_flags(command: ArgumentParser) -> None:
    """Add the flags of an export, but for the directory, which is `directory` among what is parsed."""
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of exported weights; default: float32, or as a checkpoint was converted",
    )
    command.add_argument("--merge", action="store_true", help="export adapters added to the weights they belong to")
    command.add_argument("--average", action="store_true", help="export the average of the weights that the run kept")
    command.add_argument("--push", metavar="OWNER/NAME", help="upload the export to this repository of the hub")
    command.add_argument("--private", action="store_true", help="with --push: of a new repository")
    command.add_argument("--overwrite", action="store_true", help="with --push: replace what the repository holds")


@dataclass(frozen=True)
class Export:
    """Export of a run as Hugging Face has it, and its upload.

    Attributes:
      dtype: Dtype of the weights; None is float32, or as a checkpoint was converted.
      merge: Write whole weights, with the adapters that the run trained added to them.
      average: Write the average of the weights that the run kept.
      push: Repository of the hub that is to hold the directory; None uploads nothing.
      private: Make a new repository a private one.
      overwrite: Take the place of what the repository holds.
    """

    directory: Path
    dtype: str | None
    merge: bool
    average: bool
    push: str | None
    private: bool
    overwrite: bool

    @classmethod
    def of(cls, flags: Namespace) -> "Export | None":
        """Read flags; None if they ask for no export, `Refusal` if it could not be written or uploaded."""
        from jaxrlhf.models.huggingface.save import check_new
        from jaxrlhf.trainer.publishing.push import check_push

        given = {name: getattr(flags, name) for name in cls.__dataclass_fields__ if name != "directory"}
        if flags.directory is None:
            if alone := [f"--{name}" for name, value in given.items() if value]:
                raise Refusal(f"{', '.join(alone)} say how to export; add --export DIRECTORY, or drop them")
            return None
        if flags.push is None and (flags.private or flags.overwrite):
            raise Refusal("--private and --overwrite are of an upload; add --push OWNER/NAME, or drop them")
        export = cls(check_new(flags.directory), **given)
        if export.push is not None:
            check_push(export.push, overwrite=export.overwrite)
        return export

    def check(self, config: Config) -> None:
        """Raise `Refusal` if `write` would refuse what a run of the configuration trains."""
        from jaxrlhf.trainer.policy import check_exportable

        check_exportable(config, merge=self.merge, average=self.average)

    def write(self, run: str | Path, step: int | None = None) -> None:
        """Write the export of a run, or of a converted checkpoint, upload it if asked to, and say so.

        Args:
          step: Step of the checkpoint; None is the newest.
        """
        from jaxrlhf.checkpoint.pretrained import export_converted, is_converted
        from jaxrlhf.tracking import BytesBar
        from jaxrlhf.trainer.failures import writing
        from jaxrlhf.trainer.policy import export_policy
        from jaxrlhf.trainer.publishing.push import push

        with writing(self.directory), BytesBar("writing") as bar:
            if is_converted(run):
                if step is not None or self.merge or self.average:
                    raise Refusal(f"{run} is a converted checkpoint: it has no steps or adapters; drop the flags")
                export_converted(run, self.directory, dtype=self.dtype, progress=bar)
                what = "model"
            else:
                how: dict[str, Any] = {"step": step, "dtype": self.dtype or "float32"}
                how |= {"merge": self.merge, "average": self.average, "name": self.push}
                what = f"model of step {export_policy(run, self.directory, **how, progress=bar)}"
        print(f"wrote the {what} to {self.directory}, {bar.total / 1e9:.3g} GB")
        if self.push is not None:
            print(f"it is at {push(self.directory, self.push, message=what, private=self.private)}")
