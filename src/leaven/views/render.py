"""Render HTML pages from Jinja2 templates.

A page is one file with styles, scripts, charts and plotly.js. ``with served(...)`` makes pages for ``leaven serve``,
which link to other pages, and load plotly.js and updates from the server.
"""

import base64
import gzip
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from leaven.errors import InputError, shown
from leaven.recipe.recipe import short_path
from leaven.views import numbers
from leaven.views.charts import TEMPLATE, Figure

FILTERS = {
    "delta": numbers.delta,
    "duration": numbers.duration,
    "loss": numbers.loss,
    "quantity": numbers.quantity,
    "ratio": numbers.ratio,
    "seconds": numbers.seconds,
    "short_path": short_path,
    "span": lambda ends: numbers.span(ends[0], ends[1], numbers.value),
    "two_digits": "{:.2f}".format,
    "value": numbers.value,
}


@dataclass(frozen=True)
class ServedPage:
    links: Mapping[str, str]  # addresses of the pages in the navigation, by name
    here: str  # the name of this page in ``links``, or ""
    tag: str = ""  # the ETag of this page; "" if the page never changes by itself


_SERVED: ContextVar[ServedPage | None] = ContextVar("served", default=None)


@contextmanager
def served(page: ServedPage) -> Iterator[None]:
    """Make :func:`render` add ``page`` to the pages that are rendered in this ``with`` block."""
    token = _SERVED.set(page)
    try:
        yield
    finally:
        _SERVED.reset(token)


def render(template: str, charts: Mapping[str, Figure | None], **context: Any) -> str:
    """Return the HTML of a template in ``templates/``. Texts in ``context`` are escaped, with ``***`` for secrets.

    Raise InputError if plotly is missing and the page is not for ``leaven serve``.
    """
    drawn = {name: figure for name, figure in charts.items() if figure is not None}
    here = _SERVED.get()
    context |= {"charts": defaultdict(dict, drawn), "served": here, "plotly": None if here else _plotly_packed()}
    return _environment().get_template(template).render(data={"template": TEMPLATE, "figures": drawn}, **context)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("leaven.views"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: shown(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    environment.globals["NONE"] = numbers.NONE
    environment.policies["json.dumps_kwargs"] = {
        "allow_nan": False, "ensure_ascii": False, "separators": (",", ":"),
    }  # fmt: skip
    return environment


@cache
def plotly_gzipped() -> bytes:
    """Return plotly.js (nearly 5 MB), compressed with gzip. Raise InputError if plotly is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError("a report needs the package plotly; run: pip install 'leaven[train]'") from None
    return gzip.compress(get_plotlyjs().encode(), 9, mtime=0)


@cache
def _plotly_packed() -> Markup:
    """Return plotly.js as base64 text, which page.js decompresses."""
    return Markup(base64.b64encode(plotly_gzipped()).decode())
