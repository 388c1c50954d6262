"""Ends of runs: the first Ctrl-C lets a step be finished and saved, the second does not, and no error hides another."""

import errno
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest
from tiny_runs import get_config

import jaxrlhf
from jaxrlhf.trainer import run as whole
from jaxrlhf.trainer.failures import DiskFull, afterwards
from jaxrlhf.trainer.log import PhaseLog
from jaxrlhf.trainer.signals import AGAIN_S, Stop, stopped_by_signals
from tests.trainer.test_loop import Log, run

FULL = OSError(errno.ENOSPC, "No space left on device")


def raised(error: BaseException):
    raise error


@pytest.fixture
def pythons_handler():
    """Ctrl-C raises, as in an interpreter that was started by hand."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_handler")
def test_the_first_interrupt_asks_and_the_second_raises(capsys):
    stop = Stop()
    stop.step = 7
    with stopped_by_signals(stop):
        signal.raise_signal(signal.SIGINT)
        assert stop.asked and stop.interrupted
        said = "finishing and saving step 7; press Ctrl-C again to stop immediately\n"
        assert capsys.readouterr().out == said
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_asks_also_where_nobody_reads(monkeypatch):
    for broken in (BrokenPipeError(), RuntimeError("reentrant call inside <_io.BufferedWriter>")):
        stop = Stop()
        monkeypatch.setattr("builtins.print", lambda *_, broken=broken, **__: raised(broken))
        stop.interrupt()
        assert stop.asked and stop.interrupted


class Deleted:
    def __init__(self, told: Callable[[], object]) -> None:
        self.told = told

    def __del__(self) -> None:
        self.told()


def delete(interrupt: Callable[[], object]) -> None:
    Deleted(interrupt)


def collect(interrupt: Callable[[], object]) -> None:
    """Interrupt in a callback of the garbage collector, as JAX has one."""

    def callback(*_) -> None:
        gc.callbacks.remove(callback)
        interrupt()

    gc.callbacks.append(callback)
    gc.collect(0)


@pytest.mark.usefixtures("pythons_handler")
@pytest.mark.parametrize("again", [0, 1, 2])
@pytest.mark.parametrize("dropped", [delete, collect])
def test_a_second_interrupt_whose_exception_is_dropped_comes_again(dropped, again):
    before = sys.unraisablehook
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), stopped_by_signals(Stop()):
        signal.raise_signal(signal.SIGINT)
        dropped(lambda: signal.raise_signal(signal.SIGINT))
        for _ in range(again):  # what comes again may be dropped again
            dropped(lambda: time.sleep(20))
        Future().result(timeout=20)  # as a call on the devices, in which the main thread does nothing else
    assert time.monotonic() - start < 10
    assert sys.unraisablehook is before


@pytest.mark.usefixtures("pythons_handler")
def test_nothing_comes_again_once_the_block_is_left():
    with stopped_by_signals(Stop()):
        signal.raise_signal(signal.SIGINT)
        delete(lambda: signal.raise_signal(signal.SIGINT))
    time.sleep(3 * AGAIN_S)


@pytest.mark.usefixtures("pythons_handler")
def test_other_errors_that_python_drops_are_told_as_before(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(what.exc_value))
    with stopped_by_signals(Stop()):
        delete(lambda: raised(FULL))
        thread = threading.Thread(target=delete, args=(lambda: raised(KeyboardInterrupt("not the main thread's")),))
        thread.start()
        thread.join()
    assert [str(error) for error in told] == [str(FULL), "not the main thread's"]


@pytest.mark.usefixtures("pythons_handler")
def test_sigterm_asks_and_is_nobodys_interrupt(capsys):
    stop, before = Stop(), signal.getsignal(signal.SIGTERM)
    with stopped_by_signals(stop):
        signal.raise_signal(signal.SIGTERM)
    assert stop.asked and not stop.interrupted
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("chosen", [signal.SIG_IGN, lambda *_: None], ids=["nohup", "a handler of the user's"])
def test_an_interrupt_that_somebody_sees_to_is_left_alone(chosen):
    before = signal.signal(signal.SIGINT, chosen)
    try:
        stop = Stop()
        with stopped_by_signals(stop):
            signal.raise_signal(signal.SIGINT)
        assert not stop.asked
        assert signal.getsignal(signal.SIGINT) is chosen
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_left_alone_outside_the_main_thread():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def look():
        with stopped_by_signals(Stop()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_loop_that_is_asked_saves_the_step_in_progress_and_ends():
    stop, events = Stop(), []
    stop.ask()
    assert not run(events, stop=stop)
    assert ("saved", 1) in events and stop.step == 1
    assert not any(event[1] == 2 for event in events if event != "closed")


@pytest.mark.parametrize("finished", [True, False])
def test_an_interrupted_run_raises_once_it_has_ended(finished, tmp_path, monkeypatch):
    def interrupted(context, *_, dry_run):
        context.stop.interrupt()
        return finished

    monkeypatch.setattr(whole, "_launch_and_run", interrupted)
    said = "^finished " if finished else "^stopped after saving; the same command continues from "
    with pytest.raises(KeyboardInterrupt, match=said + str(tmp_path)):
        jaxrlhf.run(replace(get_config(), workdir=str(tmp_path)))


def test_what_fails_afterwards_is_a_note_on_what_failed_first():
    with pytest.raises(ValueError, match="first") as caught, afterwards("the end", lambda: raised(FULL)):
        raise ValueError("first")
    assert caught.value.__notes__ == ["and the end failed: OSError(28, 'No space left on device')"]
    with pytest.raises(OSError, match="No space"), afterwards("the end", lambda: raised(FULL)):
        pass


def test_a_log_that_cannot_be_closed_does_not_hide_why_the_run_ended(monkeypatch):
    monkeypatch.setattr(Log, "close", lambda self: raised(FULL))
    with pytest.raises(FloatingPointError, match="gradient norms") as caught:
        run([], fails_at=1)
    assert "and closing the log failed: OSError(28, 'No space left on device')" in caught.value.__notes__


def test_a_log_closes_all_its_files_also_if_one_fails(tmp_path, monkeypatch):
    log = PhaseLog(tmp_path, steps=1, first_step=0)
    closed = []
    for name in ("_metrics", "_samples", "_timeline"):
        monkeypatch.setattr(getattr(log, name), "close", lambda name=name: closed.append(name))
    monkeypatch.setattr(log._evaluation, "close", lambda: raised(FULL))
    with pytest.raises(DiskFull):
        log.close()
    assert sorted(closed) == ["_metrics", "_samples", "_timeline"]


COMMAND = """
import signal, threading, time
from concurrent.futures import ThreadPoolExecutor
from jaxrlhf.config import run_command

signal.signal(signal.SIGINT, signal.default_int_handler)

def main():
    ThreadPoolExecutor().submit(time.sleep, 1000)  # as a call that runs on the devices
    print("started", end="")
    signal.raise_signal(signal.SIGINT)

run_command(main)
"""


def test_a_command_that_is_interrupted_ends_at_once_with_one_line():
    ended = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "started", "stopped\n")
