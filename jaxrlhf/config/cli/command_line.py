"""Command lines: from words to a `Config`, and refusals as one line on stderr."""

import argparse
import contextlib
import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from jaxrlhf.config.cli.annotations import alternatives, spell
from jaxrlhf.config.cli.load import load, shipped
from jaxrlhf.config.cli.override import find, override, setting_names
from jaxrlhf.config.cluster import RayCluster
from jaxrlhf.config.refusal import Refusal
from jaxrlhf.config.run import Config

_EPILOG = (
    "Any setting of the configuration can be changed by its dotted name: --steps 3 "
    "--rollout.prompts-per-step 8 --no-resume. --config NAME --help lists them."
)

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""


def on_cluster(config: Config, flags: Namespace) -> Config:
    """The configuration with `--cluster ray` applied: hosts joined by Ray, as it describes them or by default."""
    return replace(config, cluster=config.cluster or RayCluster()) if flags.cluster == "ray" else config


def run_command(main: Callable[[], None]) -> None:
    """Run a command: a `Refusal` ends it with one line on stderr and exit code 2, Ctrl-C with one and code 130.

    Any other error keeps its traceback, and under JAXRLHF_DEBUG=1 a refusal does too.
    """
    try:
        main()
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "stopped", file=sys.stderr)
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # the interpreter would wait for calls that still run on the devices
    except Refusal as error:
        if os.environ.get("JAXRLHF_DEBUG") == "1":
            raise
        said = "; ".join([str(error), *getattr(error, "__notes__", [])])
        print("error:", " ".join(said.split()), file=sys.stderr)
        sys.exit(2)


class CommandLine(argparse.ArgumentParser):
    """An argument parser whose errors are refusals, and that can read a configuration too.

    A command adds what flags it has and parses:

        command = CommandLine(prog="python -m jaxrlhf.train", description="Train a model.")
        command.add_argument("--dry-run", action="store_true", help="stop after the plan")
        config, flags = command.parse_config()
    """

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        # No abbreviations: `--step` is a misspelled setting, not the start of a flag.
        super().__init__(prog=prog, description=description, allow_abbrev=False, conflict_handler="resolve")

    def error(self, message: str) -> NoReturn:
        raise Refusal(message)

    def parse_config(
        self,
        argv: Sequence[str] | None = None,
        *,
        prepare: Callable[[Config, Namespace], Config] = lambda config, flags: config,
    ) -> tuple[Config, Namespace]:
        """Read `--config`, the flags added to this parser, and settings to change.

        Args:
          prepare: Applies flags to the configuration, before its settings are changed.

        Raises:
          Refusal: No such configuration, flag or setting, or a value that does not fit.
        """
        self.add_argument("-h", "--help", action="store_true", help="show this help, and every setting of --config")
        self.add_argument("--config", metavar="NAME", help=f"a file, or one of: {', '.join(shipped())}")
        self.epilog = _EPILOG
        flags, rest = self.parse_known_args(argv)
        if flags.help:
            with _until_the_reader_leaves():
                self.print_help()
                if flags.config is not None:
                    print()
                    _print_settings(load(flags.config), command=f"{self.prog} --config {flags.config}")
            self.exit()
        if flags.config is None:
            self.error(f"--config is missing; give a file or one of: {', '.join(shipped())}")
        config = prepare(load(flags.config), flags)
        return override(config, _changes(config, rest)), flags


def _changes(config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Settings by dotted name from `--name value`, `--name=value`, `--switch` and `--no-switch`."""
    changes = {}
    known = setting_names(config)
    for flag, values in _flags(words):
        name = flag.removeprefix("--").replace("-", "_")
        room, _, last = name.rpartition(".")
        switch = f"{room}.{last.removeprefix('no_')}".removeprefix(".")
        is_switch = switch in known and find(config, switch)[1] is bool
        if is_switch and switch != name and values:
            raise Refusal(f"{flag} takes no value, got {' '.join(values)!r}")
        if is_switch and not values:
            changes[switch] = switch == name
        else:
            changes[name] = _value(config, name, values)
    return changes


def _flags(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the words that follow it."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise Refusal(f"do not know what to do with {word!r}; settings are given as --name value")
    return found


def _value(config: Config, name: str, words: list[str]) -> Any:
    """Words of a command line as a value of the type that setting `name` has."""
    annotation = find(config, name)[1]
    if name not in setting_names(config):
        if words == ["None"] and type(None) in alternatives(annotation):
            return None
        below = [setting for setting in setting_names(config) if setting.startswith(f"{name}.")]
        kinds = f" ({', '.join(below)})" if below else ""
        raise Refusal(f"{name} holds settings{kinds}, not a value; to replace it edit the configuration file")
    import tyro

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(annotation, args=["--", *words], add_help=False, console_outputs=False)
    except SystemExit:
        given = repr(" ".join(words)) if words else "nothing"
        raise Refusal(f"{name} must be {spell(annotation)}, got {given}") from None


def _print_settings(config: Config, *, command: str) -> None:
    import tyro

    about = f"The settings of {config.name}, and what they are there."
    how = (tyro.conf.AvoidSubcommands,)
    with contextlib.suppress(SystemExit):  # tyro leaves after its help
        tyro.cli(type(config), prog=command, description=about, default=config, args=["--help"], config=how)


@contextlib.contextmanager
def _until_the_reader_leaves() -> Iterator[None]:
    """Suppress the error of a reader, such as `head`, that leaves before all is printed."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
