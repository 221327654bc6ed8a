"""Update the output of `leaven new` in docs/how-to/starters.md: `make docs-starters`.

The first line of a code block is the command; the other lines are replaced by its output.
"""

import io
import re
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from leaven.catalogue.starter.request import StarterRequest
from leaven.cli import next_commands
from leaven.planning.start import start
from leaven.recipe.units import parse_quantity
from leaven.views.terminal.console import next_lines
from leaven.views.terminal.files import derived

SMALL = 20_000_000
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "starters.md"
_FENCE = re.compile(
    r"```\n\$ leaven new (\S+)\.toml --params (\S+) --tokens (\S+)(?: --from (\S+))?\n.*?```", re.DOTALL
)


def printed(name: str, params: str, tokens: str, lead: str | None = None) -> str:
    """Return the output of `leaven new` at 100 columns."""
    out = io.StringIO()
    started = start(StarterRequest(name, parse_quantity(params), parse_quantity(tokens), reference=lead))
    # Print the same page on every machine: as on a machine that can train only small models itself.
    with patch.object(next_commands, "trainable_here", lambda recipe: recipe.model.params < SMALL):
        following = next_commands.after_new(Path(f"{name}.toml"), started.proxy, started.target)
    console = Console(file=out, width=100, highlight=False, markup=False, soft_wrap=True)
    document = started.document(Path(f"{name}.toml"), Path(f"{name}-proxy.toml"))
    for part in (*derived(document), *next_lines(following)):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def renewed(page: str) -> str:
    """Return the page with the current output in every code block."""

    def fence(found: re.Match[str]) -> str:
        name, params, tokens, lead = found.groups()
        command = f"$ leaven new {name}.toml --params {params} --tokens {tokens}" + (
            f" --from {lead}" if lead else ""
        )
        return f"```\n{command}\n{printed(name, params, tokens, lead)}\n```"

    return _FENCE.sub(fence, page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
