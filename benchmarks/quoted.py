"""Update the output of `leaven new` and `leaven plan` in the pages of docs that quote it: `make docs-quoted`.

The first line of a code block is the command; the other lines are replaced by its output at 120 columns, on a machine
that has no calibration history and can train only models below 20 M parameters.
"""

import os
import re
import shlex
import sys
import tempfile
from contextlib import chdir, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from leaven.cli import main, next_commands
from leaven.views.terminal.console import NO_TERMINAL, console

DOCS = Path(__file__).parents[1] / "docs"
PAGES = tuple(DOCS / page for page in ("how-to/starters.md", "reference/overview.md", "concepts/planning.md"))
_FENCE = re.compile(r"```\n\$ leaven ((?:new|plan) [^\n]*)\n.*?```", re.DOTALL)


def printed(command: str) -> str:
    """Return what a command prints in an empty folder."""
    out = StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        patch.dict(os.environ, LEAVEN_CACHE=folder, NO_COLOR="1"),
        patch.object(sys, "argv", ["leaven", *shlex.split(command)]),
        patch.object(console, "_width", NO_TERMINAL),
        patch.object(next_commands, "trainable_here", lambda recipe: recipe.model.params < 20_000_000),
        redirect_stdout(out),
        suppress(SystemExit),
    ):
        main()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def renewed(page: str) -> str:
    """Return the page with the current output in every code block that begins with one of the commands."""
    return _FENCE.sub(lambda found: f"```\n$ leaven {found[1]}\n{printed(found[1])}\n```", page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
