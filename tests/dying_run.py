"""`jaxrlhf.train` as a program that signals itself at a chosen moment.

    python dying_run.py SIGNAL MOMENT COUNT ARGUMENTS OF jaxrlhf.train

MOMENT is a place that the run reaches again and again; the signal comes the COUNT-th time:

    update   a gradient of the actor is computed and not applied yet
    write    a checkpoint's files are being written
    commit   a checkpoint is complete but for its last rename
"""

import os
import runpy
import signal
import sys


def main() -> None:
    """Arm, and run the command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    name, moment, count, *arguments = sys.argv[1:]
    left = int(count)

    def reached() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.Signals[name])

    {"update": watch_updates, "write": watch_writes, "commit": watch_commits}[moment](reached)
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


if __name__ == "__main__":
    main()
