"""Benchmark of the card: rates of matrix products, memory and transfers to the host, and time to start a program.

python -m scripts.tools.gpu_day.card
"""

from dataclasses import asdict

import jax

from scripts.planning.calibration.calibrate import calibrate
from scripts.tools.gpu_day.report import say

if __name__ == "__main__":
    found = calibrate(jax.local_devices()[:1], seconds_per_figure=1.0, progress=lambda *_: None)
    say("card", **{name: value for name, value in asdict(found).items() if isinstance(value, (int, float, str))})
