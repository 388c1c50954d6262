"""Eight CPU devices, strict JAX, checked annotations."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

# XLA:CPU can deadlock when collectives of eight devices queue on few threads; the thread
# pool is sized from this variable, which has to be set before JAX starts.
os.environ["NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # torch's second thread, and that of numpy's BLAS, would spin while it has no work
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # nothing of one test reaches another, or the user's own cache
# Tests run a program once or twice, so what counts is how long it compiles: LLVM leaves machine code as it comes, and
# fusions go through XLA:CPU's older emitters instead of a pipeline of MLIR's each. That is half of all processor time.
# XLA's own passes, which decide what is computed, stay; before the older emitters they make loops of scatters. One
# thread of LLVM for each program: to split small ones costs a fifth more. JAX 0.12 has the newer emitters alone.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
os.environ["XLA_FLAGS"] = "--xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith(("0.10.", "0.11.")):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# A shell's background jobs ignore Ctrl-C, and so would what tests start from one and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import type_checks
from jaxtyping import install_import_hook

# Annotated calls in these rooms are checked, the first of each test (`type_checks.py`). `batch` is left out: JAX
# rebuilds pytrees with arbitrary leaves; and what counts weights holds no arrays, and is called a million times by a
# search.
_TESTS = Path(__file__).parent
_ROOMS = ["algos", "data", "sharding", "resharding", "rewards", "engine"]
_MODELS = {path.stem for path in _TESTS.parent.glob("jaxrlhf/models/[a-z]*")} - {"config", "memory"}
type_checks.check_first_calls()
install_import_hook(
    [f"jaxrlhf.{name}" for name in (*_ROOMS, *(f"models.{name}" for name in sorted(_MODELS)))], "type_checks.check"
)

import jax  # noqa: E402 - after its environment is set and the hook is in place
from refusal_wording import Wording  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

_LONGEST = (
    *("learning/test_learning", "distributed/test_runs", "distributed/test_run_failures", "runs/test_gsm8k"),
    *("dataflows/test_learn", "runs/test_asynchronous", "runs/test_resume", "runs/test_placed"),
    *("distributed/test_processes", "config/test_recipes", "engine/test_states", "agent_loop/test_agent_loop"),
    *("runs/test_lora", "runs/test_vision", "distributed/test_failures", "workers/test_quantized"),
    *("docs/test_first_week", "runs/test_resume_algorithms", "models/test_own", "runs/test_episodes"),
    *("models/test_transformers", "models/test_recent", "workers/test_gradient", "checkpoint/test_pretrained"),
    *("runs/test_auto", "serving/test_load", "planner/test_compiled", "runs/test_mixtures"),
    *("rewards/test_failing", "checkpoint/test_hosts", "agent_loop/test_images", "workers/test_lora"),
    *("models/test_families", "models/test_context", "engine/test_rings", "engine/test_turns"),
    *("engine/test_stages", "learning/test_experts", "learning/test_lora", "runs/test_metrics"),
    *("distributed/test_machines", "workers/test_replicas", "runs/test_policy", "models/test_experts"),
)
"""Files that take long in either tier, the longest first."""


class _PeerModule(pytest.Module):
    """Test file, skipped by name where a peer that it compares with is not installed.

    torch has no build for CPUs alone in package indices; of Pythons newer than 3.11 nobody need fetch gigabytes of it.
    """

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            if (peer := getattr(error.__cause__, "name", None)) not in ("torch", "peft"):
                raise
            # Half a module is no use to files that import this one.
            sys.modules.pop(".".join(self.path.relative_to(_TESTS.parent).with_suffix("").parts), None)
            pytest.skip(f"{self.path.name}: {peer} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _PeerModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in the order in which workers shall take them: what takes minutes does not begin when all else is done.

    Cells of `seeds` are of no other tier, though the test that they are of may be `slow`.
    """
    if config.option.markexpr and "seeds" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("seeds")])
        items[:] = [item for item in items if not item.get_closest_marker("seeds")]
    tests = Counter(item.path for item in items)
    rank = {_TESTS / f"{name}.py": place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path, len(rank)), -tests[item.path]))


def pytest_xdist_auto_num_workers() -> int:
    """A worker more than cores: tests wait for processes that start, and for limits of time."""
    return (os.cpu_count() or 1) + 1


_BUDGET_S = {
    **{"models": 150, "engine": 120, "workers": 100, "planner": 65, "rewards": 65, "runs": 60, "conversations": 40},
    **{"agent_loop": 60, "environments": 75},
    **{"serving": 40, "distributed": 40, "resharding": 40, "data": 40, "trainer": 40, "algos": 35, "extending": 30},
    **{"scripts": 25, "checkpoint": 25, "dataflows": 20, "house": 20, "docs": 15, "runtime": 15, "tracking": 15},
    **{"sharding": 15, "config": 15, "viewer": 15, "algorithms": 25},
}
"""Seconds of one worker that the fast tests of a room may take; what takes more is shown, so that somebody looks."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Seconds by room, of all workers together; `*` is over the budget by fast tests alone."""
    seconds: Counter[str] = Counter()
    fast: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            room = Path(report.location[0]).parent.name
            seconds[room] += report.duration
            fast[room] += 0 if {"slow", "real", "seeds"} & report.keywords.keys() else report.duration
    rows = [f"{room} {took:.0f}{'*' * (fast[room] > _BUDGET_S.get(room, 0))}" for room, took in seconds.most_common()]
    terminalreporter.write_line(f"seconds by room: {', '.join(rows)}")


def pytest_runtest_setup() -> None:
    type_checks.begin_test()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-refusals", action="store_true", help="write tests/golden/refusals.json anew")


@pytest.fixture
def refused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wording]:
    """`with refused(): ...` is a block that raises a `Refusal` in the words of tests/golden/refusals.json."""
    update = request.config.getoption("--update-refusals")
    file = request.node.path.relative_to(_TESTS).with_suffix("")
    wording = Wording(f"{file}::{request.node.name}", tmp_path_factory.getbasetemp(), update=update)
    yield wording
    wording.close()


def pytest_collection_finish() -> None:
    """All modules are imported and stay: the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_leftovers() -> None:
    """Arrays in the tracebacks of errors that were caught would go at any time, and change what is counted."""
    gc.collect()
    gc.freeze()  # to look at what is left once more takes most of a second, before each of two hundred tests


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what whole runs have compiled, the same for all workers of pytest."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct's GGUF file, fetched once into the cache folder and kept there."""
    from jaxrlhf.runtime.cache_folder import cache_folder

    folder = (cache_folder() or Path(tempfile.gettempdir())) / "models"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers ask for the model at the same time
        script = _TESTS.parent / "scripts" / "tools" / "get_smollm2.py"
        ran = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
    if ran.returncode:
        pytest.skip(f"SmolLM2 cannot be fetched: {ran.stderr.strip().splitlines()[-1]}")
    return Path(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def programs(compiled: Path) -> Iterator[None]:
    """In modules that ask for this, programs that one of them compiled are loaded, in child processes too."""
    from placed_runs import compiled_once

    with compiled_once(compiled):
        yield


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """In modules that ask for this, runs are so long that LLVM's optimisations pay, in child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "false")
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """In modules that ask for this, runs draw no pictures at their end, seconds of each; others look at them."""
    from jaxrlhf.trainer import log

    with pytest.MonkeyPatch.context() as patch:
        for name in ("save_learning_curve", "save_step_picture"):
            patch.setattr(log, name, lambda source, png, title: png)
        yield
