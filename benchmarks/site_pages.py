"""Hooks of mkdocs: generate the pages about commands and recipe keys, and resolve links into the repository.

mkdocs.yml loads this file. The pages exist only in the built site, so they are always up to date.
"""

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from leaven.cli import VERBS, command_of
from leaven.recipe.recipe import Recipe

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/leaven-authors/leaven/blob/main/"
_OUTSIDE = re.compile(
    r"\]\((?:\.\./)+((?:benchmarks|examples|src|tests|README|CONTRIBUTING|CHANGELOG)[^)#]*)(#[^)]*)?\)"
)

_TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    for name, text in generated().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to files outside docs/ at the repository. A link to a missing file fails the strict build.

    In code in tables, write ``|`` for ``\\|``: GitHub needs the backslash, and mkdocs would show it.
    """
    import logging

    def resolved(found: re.Match[str]) -> str:
        if not (ROOT / found[1]).exists():
            logging.getLogger("mkdocs.hooks.site_pages").warning(
                "%s links to %s, which is missing", page.file, found[1]
            )
        return f"]({REPOSITORY}{found[1]}{found[2] or ''})"

    markdown = _TABLE_ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    return _OUTSIDE.sub(resolved, markdown)


def generated() -> dict[str, str]:
    """Return the Markdown of every generated page by its name."""
    return {"commands": commands_page(), "recipe": recipe_page()}


def commands_page() -> str:
    """Return the page with every command, its arguments and its options."""
    parts = [
        "# Commands",
        "",
        "Generated from the command line's own definitions: the same text as `leaven VERB --help`. "
        "Exit codes: 0 done, 1 failed, 2 wrong input, 75 interrupted (run the command again to resume).",
        "",
    ]
    for verb in VERBS:
        parts += _command(command_of(verb), f"leaven {verb}", 2)
    return "\n".join(parts)


def _command(command: Any, name: str, level: int) -> Iterator[str]:
    """Yield the lines of one command, followed by those of its subcommands."""
    yield f"{'#' * level} {name}\n"
    yield command.help + "\n"
    children = getattr(command, "commands", {})
    params = [each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
    if params:
        context = command.context_class(command)
        arguments = [_placeholder(each, context) for each in params if each.param_type_name == "argument"]
        yield f"```\n{' '.join([name, *arguments, '[OPTIONS]'])}\n```\n"
        yield "| argument or option | value | default | what it does |\n|---|---|---|---|"
        for each in params:
            yield _parameter(each, context)
        yield ""
    for child, subcommand in children.items():
        yield from _command(subcommand, f"{name} {child}", level + 1)


def _parameter(param: Any, context: Any) -> str:
    option = param.param_type_name == "option"
    names = ", ".join(f"`{each}`" for each in [*param.opts, *param.secondary_opts])
    if not option:
        names = f"`{_placeholder(param, context)}`"
    flag = getattr(param, "is_flag", False)
    value = "" if flag or not option else f"`{_placeholder(param, context)}`"
    default, described = param.default, getattr(param, "show_default", None)
    if param.required:
        shown = "required"
    elif isinstance(described, str):
        shown = described
    else:
        shown = "" if default is None or default == () or callable(default) or flag else f"`{default}`"
    return f"| {_cell(names)} | {_cell(value)} | {_cell(shown)} | {_cell(getattr(param, 'help', '') or '')} |"


def _placeholder(param: Any, context: Any) -> str:
    """Return the placeholder for the value of an argument or option, e.g. RECIPE."""
    return str(param.metavar or param.display_type(context))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def recipe_page() -> str:
    """Return the page with every key of a recipe, its type, default and description."""
    parts = [
        "# Recipe keys",
        "",
        "Generated from the models that validate a recipe. `--set TABLE.KEY=VALUE` changes a key for one command. "
        "A key without a default is required.",
        "",
    ]
    parts += _tables(Recipe, "")
    return "\n".join(parts)


def _tables(model: type[BaseModel], path: str) -> Iterator[str]:
    """Yield the table of one part of the recipe, followed by those of its parts."""
    comments = _comments(model)
    rows, below = [], []
    for name, field in model.model_fields.items():
        key = f"{path}.{name}" if path else name
        parts = _parts(field.annotation)
        if parts:
            below += [(each, key + (".MODULE" if get_origin(field.annotation) is dict else "")) for each in parts]
        else:
            rows.append(f"| `{key}` | {_cell(_kind(field))} | {_default(field)} | {_cell(comments.get(name, ''))} |")
    if path:
        yield f"## {path}\n"
        yield _prose(model) + "\n"
    if rows:
        yield "| key | type | default | what it is |\n|---|---|---|---|"
        yield from rows
        yield ""
    for each, key in below:
        yield from _tables(each, key)


def _prose(model: type[BaseModel]) -> str:
    text = inspect.cleandoc(model.__doc__ or "")
    return re.sub(r":\w+:`~?\.?([^`]*)`", r"`\1`", text).replace("``", "`")


def _parts(annotation: Any) -> list[type[BaseModel]]:
    """Return the recipe parts that a type contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [part for each in get_args(annotation) for part in _parts(each)]


def _kind(field: FieldInfo) -> str:
    return ", ".join([_type(field.annotation), *_limits(field.metadata)])


def _limits(metadata: Iterable[Any]) -> list[str]:
    return [f"{word} {getattr(each, name):,}" for each in metadata for name, word in _LIMITS if hasattr(each, name)]


_LIMITS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is types.UnionType or "Union" in str(origin):
        return " or ".join(_type(each) for each in inner if each is not type(None))
    if "Literal" in str(origin):
        return ", ".join(f"`{each}`" for each in inner)
    if "Annotated" in str(origin):
        metadata = [some for each in inner[1:] for some in getattr(each, "metadata", ())]
        return ", ".join([_type(inner[0]), *_limits(metadata)])
    if origin in {tuple, list, frozenset}:
        return f"list of {_type(inner[0])}"
    if origin is not None:
        return f"table of {_type(inner[-1])}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        getattr(annotation, "__name__", str(annotation)), "value"
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None or default in ({}, ()):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """Return the comment of each field, which follows the field or is on the lines above it."""
    comments: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if not (isinstance(each, type) and issubclass(each, BaseModel)) or each is BaseModel:
            continue
        source = inspect.getsource(sys.modules[each.__module__])
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == each.__name__:
                comments |= _field_comments(node, lines)
    return comments


def _field_comments(node: ast.ClassDef, lines: list[str]) -> dict[str, str]:
    comments = {}
    for following, field in zip([*node.body[1:], None], node.body, strict=True):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        behind = lines[(field.end_lineno or 0) - 1].partition("  # ")[2]
        above, number = [], field.lineno - 2
        while lines[number].strip().startswith("#"):
            above.insert(0, lines[number].strip().removeprefix("#").strip())
            number -= 1
        text = following.value.value if _is_text(following) else ""  # a string below the field
        comments[field.target.id] = " ".join([*above, behind, " ".join(str(text).split())]).strip()
    return comments


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
