"""Errors of a save in the log: one that is raised is not logged too."""

import asyncio
import gc

import pytest

import jaxrlhf.checkpoint  # noqa: F401  (sets the filter)


@pytest.mark.parametrize(
    ("file", "words", "logged"),
    [
        ("/lib/orbax/serialization.py", "no space", 0),
        ("/lib/asyncio/tasks.py", "no space [tensorstore_spec='{}']", 0),
        ("/lib/judge/ask.py", "no space", 1),
    ],
)
def test_errors_of_orbax_that_a_save_raises_are_not_logged(file, words, logged, caplog):
    """Orbax starts a task for each array; when a disk is full all of them fail, and only one error is raised."""
    scope = {}
    exec(compile(f"async def write():\n    raise OSError({words!r})", file, "exec"), scope)

    async def save():
        tasks = [asyncio.ensure_future(scope["write"]()) for _ in range(2)]
        await asyncio.sleep(0)
        await tasks[0]

    with pytest.raises(OSError, match="no space"):
        asyncio.run(save())
    gc.collect()
    assert len([record for record in caplog.records if "never retrieved" in record.getMessage()]) == logged
