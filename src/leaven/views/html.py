"""HTML from Python, escaped by construction: only :class:`Html` goes into a page as it is."""

import json
from collections.abc import Iterable
from html import escape
from typing import Any


class Html(str):
    """Text that is HTML already."""


def join(*children: Any) -> Html:
    """The children in a row; plain text is escaped, None is left out, iterables are flattened."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            parts.append(child if isinstance(child, Html) else escape(child))
        elif isinstance(child, Iterable):
            parts.append(join(*child))
        else:
            parts.append(escape(str(child)))
    return Html("".join(parts))


def element(tag: str, *children: Any, **attributes: Any) -> Html:
    """One element. ``class_`` is written class, ``data_key`` data-key; None is left out and True stands bare.

    >>> element("b", "<i>", class_="x")
    '<b class="x">&lt;i&gt;</b>'
    """
    written = []
    for key, attribute in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if attribute is True:
            written.append(f" {name}")
        elif attribute is not None:
            written.append(f' {name}="{escape(str(attribute))}"')
    opening = f"<{tag}{''.join(written)}>"
    return Html(f"{opening}{join(*children)}</{tag}>")


def script_json(document: Any) -> Html:
    """JSON that no text in it can end the script element of."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)
