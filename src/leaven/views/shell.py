"""What every page stands in: its styles, its scripts and plotly. It asks no other host for anything."""

import base64
import gzip
from functools import cache
from importlib.resources import files
from typing import Any

from leaven.views.html import Html, element, join, script_json

# Scripts and styles stand in the page itself; with this no browser fetches anything, whatever a text in it says.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@cache
def _library() -> str:
    """plotly.js, packed: plain it is nearly 5 MB. No time stamp, so that the same folder makes the same file."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def document(title: str, body: Html, charts: dict[str, Any]) -> str:
    """A whole page: what is in ``body``, and the charts that its boxes name."""
    ours = files("leaven.views")
    css, script = (Html(ours.joinpath(name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    head = element(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        element("title", title),
        element("style", css),
    )
    tail = join(
        element(
            "noscript", element("p", "The charts need JavaScript; texts, tables and numbers do not.", class_="told")
        ),
        element("script", script_json(charts), type="application/json", id="charts"),
        element("script", Html(_library()), type="text/plain", id="plotly"),
        element("script", script),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body, tail), lang='en')}\n"
