"""Export commands: the flags that `jaxrlhf export` and `jaxrlhf train --export` share, and the export they describe."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrlhf.config import Config, FromScratch, Refusal
from jaxrlhf.trainer.publishing.gguf import TYPES, check_new_file, convert_export, find_converter

_WHOLE = "--gguf requires whole weights, but the run trains adapters; add --merge, or omit --gguf"


def add_flags(command: ArgumentParser) -> None:
    """Add the flags of an export, except for the directory, which the command itself parses as `directory`."""
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the exported weights; default: float32, or the dtype of a converted checkpoint",
    )
    command.add_argument("--merge", action="store_true", help="merge the adapters into the base weights")
    command.add_argument(
        "--average", action="store_true", help="export the average of the weights, from Optimizer.average_decay"
    )
    command.add_argument("--gguf", metavar="FILE", help="also write a GGUF file, with llama.cpp's converter")
    command.add_argument(
        "--gguf-type", choices=TYPES, help="with --gguf: type of the weights; default: auto, a 16-bit type"
    )
    command.add_argument(
        "--gguf-converter", metavar="COMMAND", help="with --gguf: name on PATH, or path, of the converter"
    )
    command.add_argument("--push", metavar="OWNER/NAME", help="upload the export to this repository on the hub")
    command.add_argument("--private", action="store_true", help="with --push: make a new repository private")
    command.add_argument("--overwrite", action="store_true", help="with --push: replace the files in the repository")


@dataclass(frozen=True)
class Export:
    """Export of a run in Hugging Face format, and its upload.

    Attributes:
      dtype: Dtype of the weights; None is float32, or the dtype of a converted checkpoint.
      merge: True writes whole weights with the trained adapters added.
      average: True writes the average of the weights that the run kept.
      gguf: GGUF file to write in addition; None writes none. A file within the directory is uploaded with it.
      gguf_type: Type of the GGUF file's weights, from `gguf.TYPES`.
      gguf_converter: Converter that writes the GGUF file; None is the converter on PATH.
      push: Repository of the hub to upload the directory to; None uploads nothing.
      private: True makes a new repository private.
      overwrite: True replaces the files in the repository.
    """

    directory: Path
    dtype: str | None
    merge: bool
    average: bool
    gguf: str | None
    gguf_type: str | None
    gguf_converter: str | None
    push: str | None
    private: bool
    overwrite: bool

    @classmethod
    def of(cls, flags: Namespace) -> "Export | None":
        """Read the flags; return None without an export, raise `Refusal` if it could not be written or uploaded."""
        from jaxrlhf.models.huggingface.save import check_new
        from jaxrlhf.trainer.publishing.push import check_push

        given = {name: getattr(flags, name) for name in cls.__dataclass_fields__ if name != "directory"}
        if flags.directory is None:
            if alone := [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
                raise Refusal(f"{', '.join(alone)} require an export; add --export DIRECTORY, or omit them")
            return None
        if flags.push is None and (flags.private or flags.overwrite):
            raise Refusal("--private and --overwrite require an upload; add --push OWNER/NAME, or omit them")
        if flags.gguf is None and (flags.gguf_type or flags.gguf_converter):
            raise Refusal("--gguf-type and --gguf-converter require a GGUF file; add --gguf FILE, or omit them")
        export = cls(check_new(flags.directory), **given)
        if export.gguf is not None:
            check_new_file(export.gguf)
            find_converter(export.gguf_converter)
        if export.push is not None:
            check_push(export.push, overwrite=export.overwrite)
        return export

    def check(self, config: Config) -> None:
        """Raise `Refusal` if `write` would refuse the model that a run of the configuration trains."""
        from jaxrlhf.trainer.policy import check_exportable

        check_exportable(config, merge=self.merge, average=self.average)
        if self.gguf is not None and not self.merge and any(one.lora for one in config.trained.values()):
            raise Refusal(_WHOLE)
        if self.gguf is not None and isinstance(config.model, FromScratch):
            raise Refusal(
                "--gguf does not support the tokenizer of FromScratch, which llama.cpp's converter cannot read; omit "
                "--gguf, or start from a checkpoint with --model Pretrained"
            )

    def write(self, run: str | Path, step: int | None = None) -> None:
        """Write the export of a run or of a converted checkpoint, upload it if `push` is set, and print both places.

        Args:
          step: Step of the checkpoint; None is the newest.
        """
        from jaxrlhf.checkpoint.pretrained import export_converted, is_converted
        from jaxrlhf.tracking import BytesBar
        from jaxrlhf.trainer.failures import writing
        from jaxrlhf.trainer.policy import export_policy
        from jaxrlhf.trainer.publishing.push import push
        from jaxrlhf.trainer.saved_policy import find_run

        with writing(self.directory), BytesBar("writing") as bar:
            if is_converted(run):
                if step is not None or self.merge or self.average:
                    raise Refusal(
                        f"{run} is a converted checkpoint, without steps, adapters or average; omit --step, --merge "
                        "and --average"
                    )
                export_converted(run, self.directory, dtype=self.dtype, progress=bar)
                what = "model"
            else:
                if self.gguf is not None and not self.merge and find_run(run, step, reward_model=True).adapted:
                    raise Refusal(_WHOLE)
                how: dict[str, Any] = {"step": step, "dtype": self.dtype or "float32"}
                how |= {"merge": self.merge, "average": self.average, "name": self.push}
                what = f"model of step {export_policy(run, self.directory, **how, progress=bar)}"
        print(f"wrote the {what} to {self.directory}, {bar.total / 1e9:.3g} GB")
        if self.gguf is not None:
            self._convert(check_new_file(self.gguf))
        if self.push is not None:
            print(f"uploaded to {push(self.directory, self.push, message=what, private=self.private)}")

    def _convert(self, file: Path) -> None:
        converter = find_converter(self.gguf_converter)
        print(f"writing {file} with {converter[-1]} ...", flush=True)
        convert_export(self.directory, file, converter=converter, kind=self.gguf_type or "auto")
        print(f"wrote {file}, {file.stat().st_size / 1e9:.3g} GB")
