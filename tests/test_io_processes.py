"""Worker processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
from concurrent.futures import ProcessPoolExecutor
from math import sqrt

from prism.io.processes import WORKERS

print("once", flush=True)
with ProcessPoolExecutor(2, WORKERS) as pool:
    print(sum(pool.map(sqrt, [1, 4, 9])))
print(__file__)
"""


def test_a_worker_does_not_run_the_users_script_again(tmp_path: Path) -> None:
    """No script in the README guards itself with `if __name__ == "__main__":`."""
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["once", "6.0", str(script)], "")
