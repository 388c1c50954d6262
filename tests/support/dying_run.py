"""`jaxrlhf.train` as a program that signals itself at a chosen moment, again and again.

    python dying_run.py

reads requests, one a line: JSON with a file for what a program prints, one for its errors, and

    SIGNAL MOMENT COUNT ARGUMENTS OF jaxrlhf.train

as a list, or an empty SIGNAL for a program that runs to its end. It answers with the exit code. Each program is a
fork of this process, which has imported everything and started no device: seconds of each.

MOMENT is a place that the run reaches again and again; the signal comes the COUNT-th time:

    update   a gradient of the actor is computed and not applied yet
    write    a checkpoint's files are being written
    commit   a checkpoint is complete but for its last rename
    clock    a hundredth of a second has passed
"""

import gc
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

import tensorboardX  # noqa: F401 - runs import it, and with it torch where that is there
from jax._src import xla_bridge

import jaxrlhf.trainer.policy
import jaxrlhf.trainer.run  # noqa: F401
from jaxrlhf.trainer import log


def left_blank(source: Path, png: Path, title: str) -> Path:
    """A picture that takes seconds to draw; others look at those."""
    png.touch()
    return png


def forked() -> list[str]:
    """Answer requests; returns in each fork, with what it shall run."""
    log.save_learning_curve = log.save_step_picture = left_blank
    gc.freeze()  # what is imported stays, and need not be looked at again
    for line in sys.stdin:
        printed, errors, words = json.loads(line)
        assert not xla_bridge.backends_are_initialized(), "threads of a device do not survive a fork"
        process = os.fork()
        if not process:
            for stream, path in ((1, printed), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            return words
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    sys.exit()


def main(name: str, moment: str, count: str, *arguments: str) -> None:
    """Arm, and run the command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    left = int(count)

    def reached() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.Signals[name])

    if name:
        watched = {"update": watch_updates, "write": watch_writes, "commit": watch_commits, "clock": watch_clock}
        watched[moment](reached)
    sys.argv = ["jaxrlhf.train", *arguments]
    runpy.run_module("jaxrlhf.train", run_name="__main__", alter_sys=True)


def watch_updates(reached) -> None:
    from jaxrlhf.workers.trained_model import TrainedWorker

    original = TrainedWorker.gradient

    def gradient(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if self.role == "actor":
            reached()
        return result

    TrainedWorker.gradient = gradient


def watch_writes(reached) -> None:
    def hook(event, args):
        # The interpreter tells of every file that is opened, whoever opens it.
        if event == "open" and "w" in str(args[1]) and "/actor_optimizer" in str(args[0]) and "/_META" in str(args[0]):
            reached()

    sys.addaudithook(hook)


def watch_commits(reached) -> None:
    def hook(event, args):
        if event == "os.rename" and os.path.basename(args[1]).startswith("step_"):
            reached()

    sys.addaudithook(hook)


def watch_clock(reached) -> None:
    def tick():
        while True:
            time.sleep(0.01)
            reached()

    threading.Thread(target=tick, daemon=True).start()


if __name__ == "__main__":
    main(*forked())
