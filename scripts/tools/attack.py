"""Attack what docs/security.md promises, and print a table of what was attacked and what held.

    python -m scripts.tools.attack [ATTACK ...]

The attacks are tests of the slow tier and of the tier `seeds`, about an hour on two cores; a failed test is a promise
that does not hold.
"""

import argparse
import subprocess
import sys
import time

from scripts.pages import ROOT

ATTACKS = {
    "flipped bits and missing files of checkpoints": [
        *("tests/checkpoint/test_checkpoint.py", "tests/checkpoint/test_damaged_state.py"),
        *("tests/checkpoint/test_pipes.py", "tests/runs/test_damaged_policy.py"),
    ],
    "kills, damaged checkpoints, a full disk": ["tests/runs/test_resume.py", "tests/runs/test_odd_folders.py"],
    "kills of asynchronous runs, changed responses": [
        *("tests/runs/test_asynchronous.py", "tests/trainer/test_queue_item.py"),
    ],
    "records of other programs, cut and damaged lines": ["tests/tracking/test_tracking.py"],
    "damaged model folders, files that execute": [
        *("tests/models/test_damage.py", "tests/models/test_checkpoints.py", "tests/models/test_gguf.py"),
        *("tests/data/test_tokenizer.py", "tests/data/test_kept.py"),
    ],
    "pictures": ["tests/data/test_pictures.py", "tests/data/test_images.py"],
    "connections and requests": [
        *("tests/serving/test_limits.py", "tests/serving/test_costs.py", "tests/serving/test_load.py"),
        "tests/processes/test_server.py",
    ],
    "files of a viewed folder": ["tests/viewer/test_files.py"],
    "programs in the sandbox": ["tests/rewards/test_sandbox.py", "tests/rewards/test_code.py"],
    "rewards": ["tests/rewards/test_pool.py", "tests/rewards/test_failing.py"],
    "tools and environments": ["tests/environments/test_hostile.py", "tests/processes"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"all, or some of: {'; '.join(ATTACKS)}")
    chosen = parser.parse_args().attacks or ATTACKS
    failed = 0
    for attack in chosen:
        start = time.monotonic()
        tests = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not network and not accel", *ATTACKS[attack]]
        done = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        outcome = "held" if done.returncode == 0 else "DID NOT HOLD"
        print(f"{attack:50}  {outcome:12}  {time.monotonic() - start:5.0f} s  {lines[-1] if lines else done.stderr}")
        for line in lines:
            if line.startswith(("FAILED", "ERROR", "SKIPPED")):
                print(f"  {line}")
        sys.stdout.flush()
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
