"""Update the output of `leaven plan` in docs/reference/overview.md and docs/concepts/planning.md: `make docs-plan`.

The first line of a code block is the command; the other lines are replaced by its output at 120 columns, without the
calibration history of this machine.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = tuple(ROOT / "docs" / page for page in ("reference/overview.md", "concepts/planning.md"))
_FENCE = re.compile(r"```\n\$ (leaven plan [^\n]*)\n.*?```", re.DOTALL)


def printed(command: str) -> str:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            env=os.environ | {"COLUMNS": "120", "LEAVEN_CACHE": cache, "NO_COLOR": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def renewed(page: str) -> str:
    """Return the page with the current output in every code block."""
    return _FENCE.sub(lambda found: f"```\n$ {found[1]}\n{printed(found[1])}\n```", page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
