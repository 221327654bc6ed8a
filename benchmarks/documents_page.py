"""Write docs/reference/documents.md, the keys of every ``--json`` document: `python benchmarks/documents_page.py`.

The comments of the fields in leaven.documents become the descriptions on the page.
"""

import ast
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from leaven.documents import Document, Entry, catalogue, checks, planning, runs

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "documents.md"
HEAD = """\
# Documents

With `--json` every command prints one JSON document, or a list of documents, and nothing else on standard output.
`schema` names the document and its version. Keys may be added, but are never renamed or removed; the version changes
when the meaning of a key changes. A number that is not finite is `null`. `python benchmarks/documents_page.py` writes
this page.
"""
_FIELD = re.compile(r"^    (?P<name>\w+): (?P<type>[^#=]+?)(?: = (?P<default>[^#]*?))?(?:  # (?P<comment>.*))?$")


def page() -> str:
    """Return the page: a table for each document, followed by the tables of its parts."""
    parts = [HEAD]
    for module in (catalogue, planning, checks, runs):
        for document in _defined(module):
            if issubclass(document, Document):
                parts += [_section(document), *(_table(entry) for entry in _entries(document, module))]
    return "\n".join(parts)


@cache
def _sources(module: ModuleType) -> dict[str, list[str]]:
    """Return the source lines of each class of a module, in order."""
    text = inspect.getsource(module)
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {node.name: text.splitlines()[node.lineno : node.end_lineno] for node in classes}


def _defined(module: ModuleType) -> list[type[Entry]]:
    return [getattr(module, name) for name in _sources(module)]


def _entries(document: type[Entry], module: ModuleType) -> list[type[Entry]]:
    """Return the entry classes in the types of a document's fields, each followed by those in its own fields."""
    source = " ".join(row[1] for row in _rows(document))
    named = [
        each
        for each in _defined(module)
        if not issubclass(each, Document) and each.__name__ in re.findall(r"\w+", source)
    ]
    return [entry for each in named for entry in (each, *_entries(each, module))]


def _section(document: type[Document]) -> str:
    text = inspect.cleandoc(document.__doc__ or "").replace("``", "`")
    return f"## {document.SCHEMA}\n\n{text}\n\n{_rows_text(document)}"


def _table(entry: type[Entry]) -> str:
    return f"`{entry.__name__}`:\n\n{_rows_text(entry)}"


def _rows_text(entry: type[Entry]) -> str:
    lines = [f"| `{name}` | `{type_}` | {comment} |" for name, type_, comment in _rows(entry)]
    return "\n".join(["| key | type | what it is |", "|---|---|---|", *lines, ""])


def _rows(entry: type[Entry]) -> list[tuple[str, str, str]]:
    """Return (key, type, comment) of each field, inherited fields first."""
    rows = {}
    for each in reversed(entry.__mro__):
        if issubclass(each, Entry) and each not in {Entry, Document}:
            for line in _sources(sys.modules[each.__module__])[each.__name__]:
                field = _FIELD.match(line)
                if field and field["name"] in each.model_fields:
                    key = each.model_fields[field["name"]].alias or field["name"]
                    type_ = field["type"].replace("|", "\\|")
                    rows[key] = (key, type_, (field["comment"] or "").replace("|", "\\|"))
    return list(rows.values())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
