"""Compiled programs on disk: the next process loads them, and the user's settings decide where they are."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrlhf.runtime.compilation_cache import prune

PROGRAM = """
import json
import jax
import jax.numpy as jnp
from jax._src import xla_bridge
from jaxrlhf.runtime import compilation_cache
from jaxrlhf.tracking import CompileCounter

compilation_cache.turn_on()
compilation_cache.turn_on()  # a second run of the same process
touched = bool(xla_bridge._backends)
row = compilation_cache.settings_row()
events, counter = [], CompileCounter()
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
for function in (jnp.sin, jnp.sum, lambda x: x @ x.T):
    jax.jit(function)(jnp.ones((8, 8))).block_until_ready()
counts = {name: events.count(name) for name in ("compile_requests_use_cache", "cache_hits", "cache_misses")}
print(json.dumps({"row": row, "touched": touched, "counter": (counter.count, counter.loaded), **counts}))
"""


def process(**settings: str) -> dict:
    """Return what a process with these environment variables prints about its cache."""
    ours = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=ours | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    return json.loads(done.stdout)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_the_second_process_compiles_nothing(tmp_path):
    first, second = process(XDG_CACHE_HOME=str(tmp_path)), process(XDG_CACHE_HOME=str(tmp_path))
    programs = first["compile_requests_use_cache"]
    assert programs >= 4  # the three functions, and their argument
    assert (first["cache_hits"], first["cache_misses"]) == (0, programs)
    assert (second["cache_hits"], second["cache_misses"]) == (programs, 0)
    assert (first["counter"], second["counter"]) == ([programs, 0], [programs, programs])
    folder = tmp_path / "jaxrlhf" / "xla"
    assert first["row"][2:] == ["none yet", f"this run compiles and keeps them in {folder}"]
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert second["row"][2:] == [f"{programs} kept", f"{size / 2**20:.1f} MiB in {folder}"]
    assert not first["touched"]


def test_the_folder_of_the_user_is_taken(tmp_path):
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    told = process(XDG_CACHE_HOME=str(ours), JAX_COMPILATION_CACHE_DIR=str(mine))
    assert len(files(mine)) == told["cache_misses"] > 0
    assert not ours.exists()
    assert str(mine) in told["row"][3]


@pytest.mark.slow
def test_nothing_is_kept_where_that_is_off(tmp_path):
    told = process(XDG_CACHE_HOME=str(tmp_path), JAX_ENABLE_COMPILATION_CACHE="false")
    assert files(tmp_path) == []
    assert told["cache_hits"] == told["cache_misses"] == 0
    assert told["row"][2] == "not kept"
    assert "JAX_ENABLE_COMPILATION_CACHE" in told["row"][3]


ANOTHERS = """
import os
from jaxrlhf.data.table import cache
from jaxrlhf.runtime import compilation_cache

if os.getuid() == 0:
    os.setuid(65533)
os.environ["HOME"] = os.environ["ANOTHERS"]
compilation_cache.turn_on()
print(compilation_cache.settings_row()[2:])
with cache.new_folder(cache._place() / "x") as made:
    assert made is None
os.environ.pop("HOME")
os.path.expanduser = lambda path: path  # as of a user without an entry
assert cache._place() is None
print(compilation_cache.settings_row()[2:])
"""


@pytest.mark.slow
def test_a_home_that_is_anothers_or_none_is_left_alone(tmp_path):
    """A container may run as an unknown user, with the HOME of root or with none."""
    home, here = tmp_path / "locked" / "home", tmp_path / "here"
    home.mkdir(parents=True)
    here.mkdir()
    home.parent.chmod(0)
    names = ("COMPILATION_CACHE", "XDG_CACHE_HOME", "JAXRLHF_DATA_CACHE")
    given = {name: value for name, value in os.environ.items() if not any(other in name for other in names)}
    command = [sys.executable, "-c", ANOTHERS]
    done = subprocess.run(command, env=given | {"ANOTHERS": str(home)}, cwd=here, capture_output=True, text=True)
    home.parent.chmod(0o700)
    assert done.returncode == 0, done.stderr
    first, second = map(ast.literal_eval, done.stdout.splitlines())
    assert first == ("not kept", f"{home}/.cache/jaxrlhf/xla cannot be written; give JAX_COMPILATION_CACHE_DIR")
    assert second == ("not kept", "this user has no home folder; give JAX_COMPILATION_CACHE_DIR")
    assert not any(here.iterdir()) and not any(home.iterdir())


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    for name, size, written, read in [
        ("a", 30, 100, 900),
        ("b", 30, 700, 700),
        ("c", 30, 800, 100),
        ("d", 0, 999, 999),
    ]:
        path = tmp_path / f"{name}-cache"
        path.write_bytes(b"x" * size)
        os.utime(path, (read, written))
    (tmp_path / "other").write_bytes(b"x" * 500)
    prune(tmp_path, most_bytes=90)
    assert files(tmp_path) == ["a-cache", "b-cache", "c-cache", "other"]
    prune(tmp_path, most_bytes=89)
    assert files(tmp_path) == ["a-cache", "c-cache", "other"]
    prune(tmp_path / "nowhere", most_bytes=0)


@pytest.mark.slow
def test_a_run_turns_it_on(tmp_path):
    ours = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    config = str(Path(__file__).parents[1] / "support" / "tiny_runs.py")
    command = [sys.executable, "-m", "jaxrlhf.train", "--config", config, "--dry-run"]
    settings = ours | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [row] = [line for line in done.stdout.splitlines() if "compiled programs" in line]
    assert "none yet" in row
