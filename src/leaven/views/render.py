"""Self-contained HTML pages: a Jinja2 template, its styles, scripts, charts and plotly.js in one file."""

import base64
import gzip
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from leaven.recipe.errors import InputError
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


def render(template: str, charts: Mapping[str, Figure | None], **context: Any) -> str:
    """Return the page of a template in ``templates/``; every text in the context is escaped.

    A template draws the chart ``name`` with the macro ``chart``, and asks ``if charts.name`` where there may be none.

    Raises:
        InputError: if plotly is missing.
    """
    drawn = {name: figure for name, figure in charts.items() if figure is not None}
    context |= {"charts": defaultdict(dict, drawn), "plotly": _plotly_js()}
    return _environment().get_template(template).render(data={"template": TEMPLATE, "figures": drawn}, **context)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("leaven.views"),
        autoescape=True,
        undefined=StrictUndefined,
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
def _plotly_js() -> Markup:
    """plotly.js, compressed from nearly 5 MB. Without a time stamp, so that the same folder makes the same file."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError("a report needs plotly: pip install 'leaven[train]'") from None
    return Markup(base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode())
