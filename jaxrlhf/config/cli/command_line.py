"""Command lines: parsing of arguments to a `Config`, and refusals as one line on stderr."""

import argparse
import contextlib
import copy
import difflib
import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from inspect import isabstract
from typing import Any, NoReturn

from jaxrlhf.config.cli.annotations import alternatives, field_types, spell, variants
from jaxrlhf.config.cli.load import load, shipped
from jaxrlhf.config.cli.override import Classes, find, override, setting_names
from jaxrlhf.config.refusal import Refusal
from jaxrlhf.config.run import Config

_EPILOG = (
    "Any setting of the configuration can be changed by its dotted name: --steps 3 --rollout.prompts-per-step 8 "
    "--no-resume. A setting that is a class with settings takes None or the name of a class: --algorithm.kl KLInLoss "
    "--algorithm.kl.coefficient 1e-3. --config NAME --help lists all settings."
)

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as in shells."""

_EXTRAS = dict.fromkeys(("starlette", "uvicorn", "pydantic", "openai"), "serve") | {"lm_eval": "evaluate"}
"""Extras of jaxrlhf, by the package that each installs."""
_OF_UNIX = ("fcntl", "resource")
"""Modules of Python's standard library that Windows lacks."""
_FILES = 128
"""Number of open files that a command needs; with fewer, libraries fail at any place."""


def on_cluster(flags: Namespace) -> list[str]:
    """Return the setting that `--cluster` stands for, as command-line words.

    `ray` is a Ray cluster with the file's settings or the defaults, `None` is no cluster; without the flag the list is
    empty.
    """
    return {"ray": ["--cluster=RayCluster"], "None": ["--cluster=None"]}.get(flags.cluster, [])


def run_command(main: Callable[[], None]) -> None:
    """Run a command: a `Refusal` ends it with one line on stderr and exit code 2, Ctrl-C with one line and code 130.

    A missing package that an extra installs is treated like a `Refusal`. A closed standard stream is an empty one. If a
    reader of standard output such as `head` closes the pipe early, the command ends with code 1 and no message. Any
    other error keeps its traceback; with JAXRLHF_DEBUG=1 a refusal does too.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # text of a model may not fit the terminal's encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _exit_if_pipe_closes(exit_code=1):
            _check_files()
            main()
    except KeyboardInterrupt as interrupt:
        with contextlib.suppress(OSError):  # the same Ctrl-C ends a `tee` that reads both streams
            print(str(interrupt) or "stopped", file=sys.stderr)
            sys.stdout.flush()
        os._exit(INTERRUPTED)  # a normal exit would wait for calls that still run on the devices
    except (Refusal, ModuleNotFoundError) as error:
        reason = str(error) if isinstance(error, Refusal) else _missing(error)
        if reason is None or os.environ.get("JAXRLHF_DEBUG") == "1":
            raise
        message = "; ".join([reason, *getattr(error, "__notes__", [])])
        print("error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed, as by `>&-` in a shell."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the life of the process


def _check_files() -> None:
    import resource  # Windows lacks it

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _FILES:  # -1 is unlimited
        raise Refusal(
            f"this process may open {files} files, but a command needs {_FILES}; raise the limit, such as by ulimit "
            "-n 4096"
        )


def _missing(error: ModuleNotFoundError) -> str | None:
    """Return one line on a missing module, or None if no extra or platform explains it."""
    name = (error.name or "").partition(".")[0]
    if name in _OF_UNIX:
        return f"Python on this system has no module {name}; jaxrlhf runs on Linux and macOS, and on Windows in WSL"
    extra = _EXTRAS.get(name)
    return extra and f"this command needs {name}, which is not installed: pip install 'jaxrlhf[{extra}]'"


class CommandLine(argparse.ArgumentParser):
    """Argument parser that raises `Refusal` on errors and can also read a configuration.

    A command adds its flags and parses:

        command = CommandLine(prog="python -m jaxrlhf.train", description="Train a model.")
        command.add_argument("--dry-run", action="store_true", help="stop after the plan")
        config, flags = command.parse_config()
    """

    def __init__(
        self, prog: str | None = None, description: str | None = None, examples: Sequence[tuple[str, str]] = ()
    ) -> None:
        # No abbreviations: `--step` is a misspelled setting, not the start of a flag.
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=_Formatter,
            allow_abbrev=False,
            conflict_handler="resolve",
        )
        listed = "\n".join(f"  {self.prog} {words}\n      {what}" for words, what in examples)
        self.epilog = f"examples:\n{listed}" if examples else None

    def error(self, message: str) -> NoReturn:
        how = f"; see `{self.prog} --help`" if "are required" in message or "unrecognized" in message else ""
        raise Refusal(f"{message}{how}")

    def parse_config(
        self,
        argv: Sequence[str] | None = None,
        *,
        implied: Callable[[Namespace], list[str]] = lambda flags: [],
        default: Config | None = None,
    ) -> tuple[Config, Namespace]:
        """Read `--config`, the flags added to this parser, and settings to change.

        Args:
          implied: Function from the flags to settings that they stand for, as command-line words.
          default: Configuration used without `--config`; None makes `--config` required.

        Raises:
          Refusal: A configuration, flag or setting does not exist, or a value does not fit.
        """
        self.add_argument("-h", "--help", action="store_true", help="show this help, and all settings of --config")
        self.add_argument("--config", metavar="NAME", help=f"configuration file, or one of: {', '.join(shipped())}")
        self.epilog = "\n\n".join(part for part in (self.epilog, _EPILOG) if part)
        words = sys.argv[1:] if argv is None else [*argv]
        if {"-h", "--help"} & {*words}:  # before missing flags are reported
            self._show_help(words)
        flags, rest = self.parse_known_args(words)
        self._check_misspelled(rest)
        changed = [*implied(flags), *rest]

        def change(config: Config) -> Config:
            return override(config, _changes(config, changed))

        if flags.config is not None:
            return load(flags.config, change if changed else None), flags
        if default is not None:
            return change(default), flags
        if rest and not rest[0].startswith("-"):
            policy = ", and a policy as --policy POLICY" if "--policy" in self._option_string_actions else ""
            raise Refusal(f"unexpected argument {rest[0]!r}; give a configuration as --config NAME{policy}")
        self.error(f"--config is missing; give a file or one of: {', '.join(shipped())}")

    def _check_misspelled(self, words: Sequence[str]) -> None:
        """Refuse misspelled flags of this command, which would otherwise be read as settings."""
        settings = [f"--{name.replace('_', '-')}" for name in field_types(Config)]
        for word in words:
            flag = word.partition("=")[0]
            meant = flag.replace("_", "-")
            if not flag.startswith("--") or "." in flag or meant in settings:
                continue
            close = difflib.get_close_matches(meant, [*self._option_string_actions, *settings], n=1, cutoff=0.75)
            if close and close[0] in self._option_string_actions:
                raise Refusal(f"there is no {flag}; did you mean {close[0]}?")

    def _show_help(self, words: Sequence[str]) -> NoReturn:
        """Print the help, and the settings of the configuration if one is named, and exit."""
        named = CommandLine()
        named.add_argument("--config")
        config = named.parse_known_args([word for word in words if word != "-h" and word != "--help"])[0].config
        with _exit_if_pipe_closes(exit_code=0):
            self.print_help()
            if config is not None:
                print()
                _print_settings(load(config), command=f"{self.prog} --config {config}")
        self.exit()


class _Formatter(argparse.HelpFormatter):
    """Help formatter that wraps paragraphs and leaves examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        wrapped = super()._fill_text
        return "\n\n".join(one if one.startswith("examples:") else wrapped(one, width, indent) for one in paragraphs)


def _changes(config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Return settings by dotted name, from `--name value`, `--name=value`, `--switch` and `--no-switch`."""
    flags = [(flag, flag.removeprefix("--").replace("-", "_"), values) for flag, values in _flags(words)]
    classes = _classes(config, [(name, values) for _, name, values in flags])
    changes: dict[str, Any] = {}
    for flag, name, values in flags:
        owner, _, last = name.rpartition(".")
        switch = f"{owner}.{last.removeprefix('no_')}".removeprefix(".")
        is_switch = _is_switch(config, switch, classes)
        if is_switch and switch != name and values:
            raise Refusal(f"{flag} takes no value, got {' '.join(values)!r}")
        if is_switch and not values:
            changes[switch] = switch == name
        else:
            changes[name] = _value(config, name, values, classes)
    return changes


def _classes(config: Config, flags: Sequence[tuple[str, list[str]]]) -> Classes:
    """Return the settings that are given the name of a class, as in `--algorithm.kl KLInLoss`."""
    found: dict[str, type] = {}
    for name, values in sorted(flags, key=lambda flag: flag[0].count(".")):
        with contextlib.suppress(Refusal):  # an unknown setting is refused later, when its value is read
            value, annotation = find(config, name, found)
            if isinstance(value, tuple):
                continue
            named = [kind for kind in variants(annotation) if [kind.__name__] == values and not isabstract(kind)]
            if named:
                found[name] = named[0]
    return found


def _is_switch(config: Config, name: str, classes: Classes) -> bool:
    try:
        return find(config, name, classes)[1] is bool
    except Refusal:
        return False


def _flags(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag with the words that follow it."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise Refusal(f"unexpected argument {word!r}; give settings as --name value")
    return found


def _value(config: Config, name: str, words: list[str], classes: Classes) -> Any:
    """Convert command-line words to a value of the type of setting `name`."""
    value, annotation = find(config, name, classes)
    if kinds := variants(annotation):
        if words == ["None"] and type(None) in alternatives(annotation):
            return None
        if name in classes:
            return classes[name]
        names = {kind.__name__.lower(): kind.__name__ for kind in kinds if not isabstract(kind)}
        close = difflib.get_close_matches(" ".join(words).lower(), names, n=1)
        if close and not isinstance(value, tuple):
            message = f"{name} takes the name of a class, but {' '.join(words)!r} is none"
            raise Refusal(f"{message}; did you mean {names[close[0]]}?")
        below = [setting for setting in setting_names(config) if setting.startswith(f"{name}.")]
        has = f" ({', '.join(below)})" if below else ""
        listed = f"give a class: {' or '.join(names.values())}"
        how = "edit the configuration file" if isinstance(value, tuple) else listed
        raise Refusal(f"{name} holds settings{has}, not a value; to replace them, {how}")
    import tyro

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(annotation, args=["--", *words], add_help=False, console_outputs=False)
    except SystemExit:
        given = repr(" ".join(words)) if words else "nothing"
        raise Refusal(f"{name} must be {spell(annotation)}, got {given}") from None


def _print_settings(config: Config, *, command: str) -> None:
    import tyro

    about = f"Settings of {config.name} and their values."
    how = (tyro.conf.AvoidSubcommands,)
    config = _without_words(config)
    with contextlib.suppress(SystemExit):  # tyro exits after its help
        tyro.cli(type(config), prog=command, description=about, default=config, args=["--help"], config=how)


def _without_words(settings: Any) -> Any:
    """Return a copy to show, with None for settings given as a word, which tyro would read as a positional argument."""
    shown = copy.copy(settings)
    for name, kind in field_types(type(settings)).items():
        value = getattr(settings, name)
        if isinstance(value, str) and variants(kind):
            object.__setattr__(shown, name, None)
        elif is_dataclass(value):
            object.__setattr__(shown, name, _without_words(value))
    return shown


@contextlib.contextmanager
def _exit_if_pipe_closes(*, exit_code: int) -> Iterator[None]:
    """Exit without a message if the reader of standard output, such as `head`, closes the pipe within the block."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if _is_read():  # another pipe was closed
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at exit
        sys.exit(exit_code)


def _is_read() -> bool:
    """Return False if the reader of standard output has closed the pipe."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return False
    return True
