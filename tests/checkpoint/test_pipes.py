"""Checkpoints with a named pipe in place of a file: a read of the pipe would wait for a writer forever."""

import os
import re
import threading

import jax.numpy as jnp
import pytest

from jaxrlhf.checkpoint import Checkpoints, Damaged, TreeItem

STATE = {"step": 5}


def restored(folder):
    """Open checkpoints and restore step 5; return the state."""
    tree = {"embed": jnp.arange(8.0), "count": jnp.int32(7)}
    checkpoints = Checkpoints(folder, read_only=True)
    try:
        return checkpoints.restore(5, {"actor": TreeItem(lambda: tree, lambda _: None)})
    finally:
        checkpoints.close()


def test_named_pipe_instead_of_a_file_is_refused(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder)
    tree = {"embed": jnp.arange(8.0), "count": jnp.int32(7)}
    checkpoints.save(5, {"actor": TreeItem(lambda: tree, lambda _: None)}, STATE, metric=0.5)
    checkpoints.close()
    files = sorted(path for path in (folder / "step_5").rglob("*") if path.is_file())
    assert folder / "step_5" / "host" / "metadata" in files and len(files) > 6
    for file in files:
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        released = threading.Timer(20, lambda file=file: os.close(os.open(file, os.O_RDWR)))  # ends a read that waits
        released.start()
        with pytest.raises(Damaged, match=rf"{re.escape(str(file))} is no regular file") as refused:
            restored(folder)
        released.cancel()
        assert "\n" not in str(refused.value)
        file.unlink()
        file.write_bytes(content)
    assert restored(folder) == STATE
