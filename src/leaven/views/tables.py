"""The tables of a page: parameters, runs, provenance, parts, machine."""

from collections.abc import Iterable, Sequence
from typing import Any

from leaven.recipe.recipe import Recipe, flatten
from leaven.scaling.table import ParameterTable
from leaven.views import numbers
from leaven.views.figures import COLOURS
from leaven.views.html import Html, element, join
from leaven.views.parameters import QUANTITIES, Group, groups, reason
from leaven.views.story import Corpus, Demo, Machine, Part, Run

HEADERS = {
    "init_std": "init std",
    "lr": "peak lr",
    "weight_decay": "weight decay",
    "beta1": "β1",
    "beta2": "β2",
    "eps": "ε",
    "multiplier": "multiplier",
}


def scroll(table: Html, label: str) -> Html:
    """A wide table scrolls in its own box, by keyboard too."""
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def parameter_table(
    recipe: Recipe, table: ParameterTable, base: ParameterTable | None, names: tuple[str, str]
) -> Html:
    """Base beside target, a line a module; a second body, hidden at first, has every group of layers."""
    found = groups(table, base)
    by_label: dict[str, list[Group]] = {}
    for group in found:
        by_label.setdefault(group.label, []).append(group)
    span = 2 if base else 1
    top = [element("th", _sorter(name), rowspan=2, scope="col") for name in ("module", "layers", "shape", "role")]
    top += [element("th", HEADERS[name], colspan=span, scope="colgroup", class_="quantity") for name in QUANTITIES]
    below = [
        element("th", _sorter(name), scope="col", class_="number" + (" first" if i == 0 else ""))
        for _ in QUANTITIES
        for i, name in enumerate(names[-span:])
    ]
    summary = [_line(recipe, table, members, bool(base)) for members in by_label.values()]
    layers = [_line(recipe, table, [group], bool(base)) for group in found]
    many = len(layers) > len(summary)
    return join(
        element(
            "label",
            Html('<input type="checkbox" id="by-layer">'),
            " a line for every layer that differs",
            class_="switch",
        )
        if many
        else None,
        scroll(
            element(
                "table",
                element("thead", element("tr", *top), element("tr", *below)),
                element("tbody", *summary, class_="summary"),
                element("tbody", *layers, class_="layers", hidden=True) if many else None,
                class_="parameters sortable",
            ),
            "parameter table",
        ),
    )


def _sorter(name: str) -> Html:
    return element("button", name, type="button")


def _line(recipe: Recipe, table: ParameterTable, members: list[Group], beside: bool) -> Html:
    first, last = members[0], members[-1]
    span = "" if first.first is None else Group(first.label, first.first, last.last, first.row, None).layers
    shape = " × ".join(map(str, first.row.shape))
    size = 1
    for side in first.row.shape:
        size *= side
    cells = [
        element("th", first.label, scope="row"),
        element("td", span or numbers.NONE, data_v=-1 if first.first is None else first.first, class_="quiet"),
        element("td", shape, data_v=size, title=_base_shape(first), class_="quiet"),
        element("td", str(first.row.role).replace("_", " "), class_="quiet"),
    ]
    for name in QUANTITIES:
        told = f"{HEADERS[name]}: {reason(recipe, table, first.row, name)}"
        mine = [getattr(member.row, name) for member in members]
        if beside:
            bases = [getattr(member.base, name) for member in members if member.base]
            same = mine == bases
            cells.append(_value(bases, told, "base first"))
            cells.append(_value(mine, told, "same" if same else "moved"))
        else:
            cells.append(_value(mine, told, "first"))
    return element("tr", *cells)


def _base_shape(group: Group) -> str | None:
    if group.base is None or group.base.shape == group.row.shape:
        return None
    return f"base: {' × '.join(map(str, group.base.shape))}"


def _value(values: Sequence[float], told: str, kind: str) -> Html:
    if not values:
        return element("td", numbers.NONE, class_=f"number {kind}", data_v="-1")
    low, high = min(values), max(values)
    shown = numbers.span(low, high, numbers.value)
    return element("td", shown, class_=f"number {kind}", data_v=f"{high:.9g}", title=told)


def runs_table(demo: Demo) -> Html:
    """The runs with their losses, each difference against the transferred one."""
    mine = demo.transferred.loss if demo.transferred else None
    lines = []
    for arm in demo.arms:
        run = arm.run
        behind = None if arm.loss is None or mine is None or arm.key == "transferred" else arm.loss - mine
        state = None if run and run.finished else element("span", _state(run), class_="state")
        lines.append(
            element(
                "tr",
                element(
                    "th",
                    swatch(arm.key),
                    arm.title,
                    state,
                    scope="row",
                ),
                element("td", numbers.loss(arm.loss), class_="number strong"),
                element(
                    "td", numbers.delta(behind), class_="number " + verdict(-behind if behind is not None else None)
                ),
                element("td", numbers.quantity(run.tokens) if run else numbers.NONE, class_="number"),
                element("td", numbers.quantity(run.tokens_per_second) if run else numbers.NONE, class_="number"),
                element("td", numbers.seconds(run.seconds) if run else numbers.NONE, class_="number"),
            )
        )
        lines.append(element("tr", element("td", element("span", arm.why), colspan=6), class_="why"))
    heads = ("run", "validation loss", "against transferred", "tokens", "tokens/s", "time")
    units = ("", "nats per token", "nats", "", "", "")
    header = [
        element(
            "th",
            name,
            element("small", unit) if unit else None,
            scope="col",
            class_=None if name == "run" else "number",
        )
        for name, unit in zip(heads, units, strict=True)
    ]
    return scroll(
        element("table", element("thead", element("tr", *header)), element("tbody", *lines), class_="runs"),
        "runs compared",
    )


def _state(run: Run | None) -> str:
    if run is None:
        return "no run"
    return "not finished" if run.stopped in {None, "interrupted"} else "diverged"


def swatch(key: str) -> Html:
    return element("i", class_="swatch", style=f"background:{COLOURS.get(key, 'var(--other)')}")


def verdict(gain: float | None) -> str:
    """The class of a number that is better than something, worse, or neither."""
    return "" if not gain else "good" if gain > 0 else "bad"


def provenance(recipe: Recipe) -> Html:
    """Every value of a recipe under the reason it was chosen for; those without one are folded away."""
    document = recipe.model_dump(exclude={"why", "name", "tuning"}, exclude_none=True)
    by_reason: dict[str | None, list[Html]] = {}
    for path, setting in flatten(document).items():
        neutral = path.startswith(("hyperparameters.modules.", "hyperparameters.depth.")) and setting in (1.0, (1.0,))
        if neutral or setting in ({}, ()):
            continue
        keys = path.split(".")
        name = element("span", [(key, Html(".<wbr>")) for key in keys[:-1]], keys[-1], class_="path")
        shown = join(name, " ", element("b", _setting(setting)))
        by_reason.setdefault(_why(recipe, path), []).append(element("li", shown))
    plain = by_reason.pop(None, [])
    blocks = [
        join(element("dt", element("ul", *values)), element("dd", told or "")) for told, values in by_reason.items()
    ]
    rest = None
    if plain:
        summary = element("summary", f"{len(plain)} other values, as written or by default")
        rest = element("details", summary, element("ul", *plain))
    return element(
        "div",
        element("dl", *blocks) if blocks else element("p", "No value of this recipe has a reason written with it."),
        rest,
        class_="provenance",
    )


def _why(recipe: Recipe, path: str) -> str | None:
    """The reason written for a path, a point of it (``hyperparameters.depth.lr[2]``), or the part it stands in."""
    candidates = [key for key in recipe.why if path == key.partition("[")[0] or path.startswith(f"{key}.")]
    return recipe.why[max(candidates, key=len)] if candidates else None


def _setting(setting: Any) -> str:
    if isinstance(setting, bool):
        return "true" if setting else "false"
    if isinstance(setting, int):
        return f"{setting:,}".replace(",", "_") if setting >= 10_000 else str(setting)
    if isinstance(setting, float):
        return numbers.value(setting)
    if isinstance(setting, list | tuple):
        return ", ".join(_setting(item) for item in setting)
    return str(setting)


def parts_table(parts: Iterable[Part]) -> Html:
    """How long each part took, as bars of one scale."""
    parts = list(parts)
    total = sum(part.seconds for part in parts)
    longest = max((part.seconds for part in parts), default=0.0) or 1.0
    lines = [
        join(
            element("span", part.name),
            element("div", element("i", style=f"width:{100 * part.seconds / longest:.3g}%"), class_="bar"),
            element("span", numbers.seconds(part.seconds), class_="number"),
            element("span", f"{part.seconds / total:.0%}" if total else "", class_="number quiet"),
        )
        for part in parts
    ]
    return element("div", *lines, class_="parts")


def facts(pairs: Iterable[tuple[str, str | None]]) -> Html:
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", told)) for name, told in pairs if told),
        class_="facts",
    )


def machine(about: Machine) -> Html:
    return facts(
        (
            ("processor", about.processor),
            ("cores", str(about.cores) if about.cores else None),
            ("memory", f"{about.memory_gib:.1f} GiB" if about.memory_gib else None),
            ("platform", about.platform),
            ("Python", about.python),
            ("torch", about.torch),
            ("leaven", about.leaven),
        )
    )


def corpus(about: Corpus) -> Html:
    return facts(
        (
            ("source", about.source),
            ("size", numbers.text_size(about.bytes, about.documents)),
            ("training", f"{numbers.quantity(about.train_tokens)} tokens"),
            ("validation", f"{numbers.quantity(about.validation_tokens)} tokens"),
            ("vocabulary", f"{about.vocab_size:,}"),
        )
    )


def legend(runs: Sequence[Run]) -> Html:
    """Which colour is which run, above the charts; pressing one hides its lines."""
    return element(
        "div",
        *(
            element(
                "button",
                swatch(run.key),
                run.title,
                element("b", numbers.loss(run.loss)),
                type="button",
                data_group=run.key,
                aria_pressed="true",
            )
            for run in runs
        ),
        class_="legend",
    )


def four(*entries: tuple[str, str, str, str]) -> Html:
    """The four numbers: label, value, what it is against, and a class for its colour."""
    return element(
        "div",
        *(
            element("div", element("span", label), element("b", shown, class_=kind), element("small", note))
            for label, shown, note, kind in entries
        ),
        class_="four",
    )
