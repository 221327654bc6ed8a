"""What a person sees of the laws: all of them side by side, how far each is stretched, and their spread."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rich.console import RenderableType

from leaven.catalogue.laws import TRUST, LawResult, Optimum, best_tokens_per_param, critical_batch, lr_at_batch
from leaven.catalogue.noise_scale import steps_over_least, tokens_over_least
from leaven.recipe.units import format_quantity
from leaven.views.terminal.tables import Column, Columns, Facts, learning_rate

Parts = tuple[str, ...]
_COUNTED = {
    "all": "N all parameters",
    "non-embedding": "N without embeddings",
    "without input embedding": "N without the input embedding",
}


def laws_screen(
    results: Sequence[LawResult],
    params: float,
    tokens: float,
    batch_tokens: float | None = None,
    params_non_embedding: float | None = None,
) -> Iterator[RenderableType]:
    """What every law says of a run, where a batch stands among them, and how far they are apart."""
    yield law_table(results)
    yield ""
    yield other_laws(results)
    yield ""
    if batch_tokens is not None:
        yield batch_table(results, batch_tokens)
        yield batch_facts(results, batch_tokens)
        yield ""
    yield range_legend()
    yield law_spread(results, params, tokens, batch_tokens, params_non_embedding)


def optimum_screen(found: Sequence[Optimum]) -> Iterator[RenderableType]:
    """The best sizes for a budget of FLOPs by every answer."""
    yield optimum_table(found)
    yield ""
    yield range_legend()
    yield optimum_spread(found)


def law_table(results: Sequence[LawResult]) -> Columns:
    """The laws that give an lr or a batch."""
    columns = (
        Column("law", align="left"),
        Column("peak lr", align="point"),
        Column("batch", "tokens"),
        Column("kind", "of batch", align="left"),
        Column("fitted range", align="left"),
    )
    told = [result for result in results if _has_number(result)]
    rows = [
        (
            result.law,
            learning_rate(result.lr),
            _tokens(result.batch_tokens),
            result.batch_kind or "-",
            _range(result, most=2),
        )
        for result in told
    ]
    return Columns(columns, rows, notes=[_notes(result) for result in told])


def other_laws(results: Sequence[LawResult]) -> Columns:
    """The laws that say something else: a loss, a timescale, an exponent."""
    columns = (Column("law", align="left"), Column("says", align="left"), Column("fitted range", align="left"))
    told = [result for result in results if not _has_number(result)]
    rows = [(result.law, _says(result), _range(result, most=2)) for result in told]
    return Columns(columns, rows, notes=[_notes(result) for result in told])


def batch_table(results: Sequence[LawResult], batch_tokens: float) -> Columns:
    """The lr of every law at a batch that was asked for, by every rule."""
    columns = (
        Column("lr at this batch", align="left"),
        Column("its batch", "tokens"),
        Column("lr there", align="point"),
        Column("sqrt", align="point"),
        Column("linear", align="point"),
        Column("surge", align="point"),
        Column("own data", align="point"),
    )
    noise, rows = critical_batch(results), []
    for result in results:
        moved = lr_at_batch(result, batch_tokens, noise)
        if moved is not None:
            numbers = (result.lr, moved.square_root, moved.linear, moved.surge, moved.own)
            rows.append((result.law, _tokens(result.lr_batch_tokens), *map(learning_rate, numbers)))
    return Columns(columns, rows)


def batch_facts(results: Sequence[LawResult], batch_tokens: float) -> Facts:
    """Where a batch stands among what the laws say of batches."""
    facts: list[tuple[str, Parts]] = []
    for kind in ("optimal", "critical"):
        named = [each for each in results if each.batch_kind == kind and each.batch_tokens and not each.form_of]
        said = [f"{batch_tokens / (each.batch_tokens or 1):.2g}x {each.law}" for each in named]
        facts.append((f"{kind} batch", tuple(said)))
    critical = critical_batch(results)
    more, longer = tokens_over_least(batch_tokens, critical), steps_over_least(batch_tokens, critical)
    cost = (
        f"at the median critical batch of {format_quantity(critical)}: {more:.2f}x the fewest tokens",
        f"{longer:.2f}x the fewest steps (McCandlish 2018)",
    )
    rules = (
        "sqrt: Adam below the critical batch",
        "linear: SGD there, and AdamW at fixed decay by tau",
        f"surge: peak at {format_quantity(critical)}, falling above",
        "none holds above the critical batch: there the best lr is about flat",
    )
    return Facts([*facts, ("cost", cost), ("rules", rules)])


def law_spread(
    results: Sequence[LawResult],
    params: float,
    tokens: float,
    batch_tokens: float | None,
    params_non_embedding: float | None,
) -> Facts:
    """What was taken for N, and median and range of what there is more than one opinion on, each law once."""
    own = [result for result in results if result.form_of is None]
    lrs = [(each.lr, each.in_range) for each in own if each.lr]
    batches = {
        kind: [(each.batch_tokens, each.in_range) for each in own if each.batch_tokens and each.batch_kind == kind]
        for kind in ("optimal", "critical")
    }
    losses = [(each.loss, each.in_range) for each in own if each.loss]
    best = best_tokens_per_param(6 * params * tokens)
    lr, batch = median(lr for lr, _ in lrs), median(each for each, _ in batches["optimal"])
    if batch_tokens is not None:
        moved = [lr_at_batch(each, batch_tokens, critical_batch(results)) for each in own]
        lr, batch = median(each.square_root for each in moved if each), batch_tokens
    taus = [each.tau for each in own if each.tau]
    decay = batch / (taus[0] * tokens * lr)
    return Facts(
        [
            ("N less embeddings", _smaller_counts(results, params, params_non_embedding)),
            ("loss", (*_spread(losses, lambda loss: f"{loss:.3f}"), "nats a token, of Chinchilla's text")),
            (
                "tokens a parameter",
                (f"{tokens / params:.3g}", f"compute-optimal {min(best):.3g} .. {max(best):.3g} (laws --flops)"),
            ),
            *((f"{kind} batch", (*_spread(found, _tokens), "tokens")) for kind, found in batches.items()),
            (
                "weight decay",
                (f"{decay:.2g} by tau {taus[0]:.2g}, at lr {learning_rate(lr)} and batch {_tokens(batch)}",),
            ),
            ("peak lr", (*_spread(lrs, learning_rate), "tune at small scale")),
        ]
    )


def _smaller_counts(results: Sequence[LawResult], params: float, params_non_embedding: float | None) -> Parts:
    body, head = (
        [each.law for each in results if each.params_definition == definition]
        for definition in ("non-embedding", "without input embedding")
    )
    if params_non_embedding is None:
        taken = f"taken as {format_quantity(params)}, embeddings and all: give --params-non-embedding"
    else:
        taken = f"taken as {format_quantity(params_non_embedding)}"
    return (*body, taken, *head, f"less the input embedding only: taken as {format_quantity(params)}, all parameters")


def range_legend() -> Facts:
    return Facts(
        [
            (
                "fitted range",
                ("x7 above, /7 below the fit in", "N parameters", "D tokens", "C FLOPs", "D/N tokens a parameter"),
            ),
            ("trust", tuple(f"{trust}: {meaning}" for trust, meaning in TRUST.items())),
        ]
    )


def optimum_table(found: Sequence[Optimum]) -> Columns:
    columns = (
        Column("law", align="left"),
        Column("params"),
        Column("tokens"),
        Column("tokens", "a param", align="point"),
        Column("loss", "approach 3", align="point", drop=1),
        Column("loss", "replication", align="point"),
        Column("fitted range", align="left"),
    )
    rows = [
        (
            each.law,
            format_quantity(each.params),
            format_quantity(each.tokens),
            f"{each.tokens_per_param:.1f}",
            f"{each.loss:.3f}",
            f"{each.loss_replication:.3f}",
            _range(each, most=1),
        )
        for each in found
    ]
    return Columns(columns, rows, notes=[_notes(each) for each in found])


def optimum_spread(found: Sequence[Optimum]) -> Facts:
    losses = [loss for each in found for loss in (each.loss, each.loss_replication)]
    return Facts(
        [
            ("params", _spread([(each.params, each.in_range) for each in found], format_quantity)),
            ("tokens", _spread([(each.tokens, each.in_range) for each in found], format_quantity)),
            (
                "loss",
                (
                    f"{min(losses):.3f} .. {max(losses):.3f} nats a token of Chinchilla's text",
                    "between the sizes it hardly moves: a smaller model trained longer is cheaper to use",
                ),
            ),
        ]
    )


def _spread(values: Sequence[tuple[float, bool | None]], show: Callable[[float], str]) -> Parts:
    """Median, range and factor of all laws, and of those that are inside their range."""
    numbers = [value for value, _ in values]
    inside = [value for value, within in values if within]
    parts = [
        f"median {show(median(numbers))} of {len(numbers)} laws",
        f"{show(min(numbers))} .. {show(max(numbers))}, a spread of {max(numbers) / min(numbers):.3g}x",
    ]
    if not inside:
        parts.append("all of them extrapolate")
    elif len(inside) < len(numbers):
        parts.append(f"{len(inside)} inside their range: {' .. '.join(dict.fromkeys(map(show, _ends(inside))))}")
    return tuple(parts)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _notes(law: LawResult | Optimum) -> list[str]:
    told = [law.conditions]
    if isinstance(law, LawResult):
        told.append(_COUNTED[law.params_definition])
    return [*told, law.source, f"trust: {law.trust}" + (f" ({law.doubt})" if law.doubt else "")]


def _says(result: LawResult) -> str:
    if result.loss is not None:
        return f"loss {result.loss:.3f} nats a token"
    return f"tau {result.tau:.3g} of the run" if result.tau is not None else result.says


def _has_number(result: LawResult) -> bool:
    return not result.says and result.loss is None and result.tau is None


def _range(law: LawResult | Optimum, most: int) -> str:
    if law.in_range is None:
        return "not known"
    signs = {"above": "x", "below": "/"}
    told = [f"{signs[each.side]}{_factor(each.factor)} {each.axis}" for each in law.beyond[:most]]
    return ", ".join(told) or "inside"


def _factor(number: float) -> str:
    """Two digits: ``1.1``, ``20``, ``4,200``, ``1.7e+16``."""
    return f"{float(f'{number:.2g}'):,.0f}" if 10 <= number < 1e6 else f"{number:.2g}"


def _tokens(number: float | None) -> str:
    return "-" if number is None else format_quantity(number)
