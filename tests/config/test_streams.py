"""Standard streams of a command: cut short by their reader, closed, or in another encoding."""

import os
import subprocess
import sys

import pytest

from jaxrlhf.config import run_command

SHOW = "from jaxrlhf.config import *\nrun_command(lambda: print(CommandLine().parse_config()[0].name))"


def test_help_may_be_cut_short():
    command = [sys.executable, "-c", SHOW, "--config", "ppo_gsm8k", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
        shown.stdout.close()  # as `head` does once it has seen enough
        assert (shown.stderr.read(), shown.wait()) == ("", 0)


@pytest.mark.parametrize(("length", "unbuffered"), [(1, ""), (100_000, "1")], ids=["written at the end", "at once"])
def test_output_may_be_cut_short(length, unbuffered):
    code = f"from jaxrlhf.config import run_command; run_command(lambda: print('x' * {length}))"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as shown:
        shown.stdout.close()
        assert (shown.stderr.read(), shown.wait()) == (b"", 1)


def test_closed_streams_are_empty():
    code = "import sys; from jaxrlhf.config import run_command; run_command(lambda: sys.stdout.write(sys.stdin.read()))"
    for closed in ("<&- >&-", "<&- 2>&-", ">&- 2>&-"):
        command = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-c", code]
        done = subprocess.run(command, input="", capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_another_pipe_that_breaks_is_an_error():
    def break_down():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_command(break_down)


def test_any_text_is_printed_in_any_encoding():
    code = r"from jaxrlhf.config import run_command; run_command(lambda: print('\xb7 \u6f22 \ud83d'))"
    for encoding, shown in (("ascii", "\\xb7 \\u6f22 \\ud83d"), ("utf-8", "\xb7 \u6f22 \\ud83d")):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
        assert (done.returncode, done.stdout) == (0, f"{shown}\n".encode()), done.stderr
