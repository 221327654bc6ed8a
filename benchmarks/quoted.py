"""Update the output of `leaven new` and `leaven plan` in the pages of docs that quote it: `make docs-quoted`.

The first line of a code block is the command; the other lines are replaced by its output at 120 columns, on a machine
that has no calibration history and can train only models below 20 M parameters.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGES = tuple(DOCS / page for page in ("how-to/starters.md", "reference/overview.md", "concepts/planning.md"))
_FENCE = re.compile(r"```\n\$ leaven ((?:new|plan) [^\n]*)\n.*?```", re.DOTALL)
_SMALL_MACHINE = """
from leaven.cli import main, next_commands
next_commands.trainable_here = lambda recipe: recipe.model.params < 20_000_000
main()
"""


def printed(command: str) -> str:
    """Return what a command prints in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _SMALL_MACHINE, *shlex.split(command)],
            env=os.environ | {"LEAVEN_CACHE": folder, "NO_COLOR": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def renewed(page: str) -> str:
    """Return the page with the current output in every code block that begins with one of the commands."""
    return _FENCE.sub(lambda found: f"```\n$ leaven {found[1]}\n{printed(found[1])}\n```", page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
