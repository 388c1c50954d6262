"""Python interpreter as a tool for the policy: each call runs a separate program in the sandbox."""

from jaxrlhf.rewards.sandbox.sandbox import Limits, run

_LIMITS = Limits(time_s=10.0, memory_bytes=1 << 29, output_bytes=1 << 16)
_REPORTING = """import traceback
try:
    exec(compile({code!r}, "<program>", "exec"), {{"__name__": "__main__"}})
except Exception:
    print(traceback.format_exc(limit=-1), end="")
"""


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: Whole program, without a network and with nothing kept from earlier calls. Print what you want to see.

    Raises:
        RuntimeError: If the machine cannot confine programs.
    """
    ended = run(_REPORTING.format(code=code), limits=_LIMITS)
    if ended.status == 0:
        return ended.output or "the program printed nothing"
    how = f"stopped after {_LIMITS.time_s:g} s" if ended.status is None else f"ended with status {ended.status}"
    return f"{ended.output}\nerror: {how}".lstrip()
