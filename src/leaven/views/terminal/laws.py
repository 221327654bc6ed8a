"""Show ``leaven laws`` in the terminal: the predictions of every law, and the median and range of all laws."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rich.console import RenderableType

from leaven.catalogue.laws import TRUST, BatchKind, batches, best_tokens_per_param, critical_batch
from leaven.catalogue.noise_scale import steps_over_least, tokens_over_least
from leaven.documents.catalogue import LawRow, OptimumRow
from leaven.recipe.units import format_quantity
from leaven.views import numbers
from leaven.views.numbers import quantity, scientific
from leaven.views.tables import Column, Fact, Facts, Table

_KINDS: tuple[BatchKind, ...] = ("optimal", "critical")  # of batch sizes
_COUNTED = {
    "all": "N all parameters",
    "non-embedding": "N without embeddings",
    "without input embedding": "N without the input embedding",
}


def _notes(law: LawRow | OptimumRow) -> list[str]:
    counted = [_COUNTED[law.params_definition]] if isinstance(law, LawRow) else []
    return [law.conditions, *counted, law.source, f"trust: {law.trust}" + (f" ({law.doubt})" if law.doubt else "")]


_loss = numbers.known("{:.3f}".format)


def _says(law: LawRow) -> str:
    if law.loss is not None:
        return f"loss {law.loss:.3f} nats per token"
    return f"tau {law.tau:.3g} of the run" if law.tau is not None else law.says


def _range(law: LawRow | OptimumRow, most: int) -> str:
    if law.in_range is None:
        return "not known"
    signs = {"above": "x", "below": "/"}
    parts = [f"{signs[each.side]}{_factor(each.factor)} {each.axis}" for each in law.beyond[:most]]
    return ", ".join(parts) or "inside"


def _factor(number: float) -> str:
    """Return a factor with two digits, for example ``1.1``, ``20``, ``4,200`` or ``1.7e+16``."""
    return f"{float(f'{number:.2g}'):,.0f}" if 10 <= number < 1e6 else f"{number:.2g}"


_LAW = Column("law", lambda law: law.law, align="left")
_RANGE = Column("fitted range", lambda law: _range(law, most=2), align="left")
_LAWS = (
    _LAW,
    Column("peak lr", lambda law: scientific(law.lr), align="point"),
    Column("batch", lambda law: quantity(law.batch_tokens), unit="tokens"),
    Column("kind", lambda law: law.batch_kind or numbers.NONE, unit="of batch", align="left"),
    _RANGE,
)
_OTHERS = (_LAW, Column("says", _says, align="left"), _RANGE)
_AT_BATCH = (
    Column("lr at this batch", lambda law: law.law, align="left"),
    Column("its batch", lambda law: quantity(law.lr_batch_tokens), unit="tokens"),
    Column("lr there", lambda law: scientific(law.lr), align="point"),
    Column("sqrt", lambda law: scientific(law.at_batch.square_root), align="point"),
    Column("linear", lambda law: scientific(law.at_batch.linear), align="point"),
    Column("surge", lambda law: scientific(law.at_batch.surge), align="point"),
    Column("own data", lambda law: scientific(law.at_batch.own), align="point"),
)
_OPTIMA = (
    _LAW,
    Column("params", lambda optimum: format_quantity(optimum.params)),
    Column("tokens", lambda optimum: format_quantity(optimum.tokens)),
    Column("tokens", lambda optimum: f"{optimum.tokens_per_param:.1f}", unit="a param", align="point"),
    Column("loss", lambda optimum: _loss(optimum.loss), unit="approach 3", align="point", drop=1),
    Column("loss", lambda optimum: _loss(optimum.loss_replication), unit="replication", align="point"),
    Column("fitted range", lambda optimum: _range(optimum, most=1), align="left"),
)
_LEGEND = Facts(
    (
        "fitted range",
        (
            "x7 N: N is 7 times above the range",
            "/7: below",
            "N parameters",
            "D tokens",
            "C FLOPs",
            "D/N ratio",
            "E experts",
        ),
    ),
    ("trust", tuple(f"{trust}: {meaning}" for trust, meaning in TRUST.items())),
)


def laws_screen(
    rows: Sequence[LawRow],
    params: float,
    tokens: float,
    batch_tokens: float | None = None,
    params_non_embedding: float | None = None,
    *,
    experts: float = 1,
) -> Iterator[RenderableType]:
    """Yield the predictions of all laws for a run, their median and range, and a comparison with ``batch_tokens``."""
    with_number = [law for law in rows if not law.says and law.loss is None and law.tau is None]
    yield Table.of(_LAWS, with_number, _notes)
    yield ""
    yield Table.of(_OTHERS, [law for law in rows if law not in with_number], _notes)
    yield ""
    if batch_tokens is not None:
        yield Table.of(_AT_BATCH, [law for law in rows if law.at_batch is not None])
        yield _batch(rows, batch_tokens)
        yield ""
    yield _LEGEND
    yield _spreads(rows, params, tokens, batch_tokens, params_non_embedding, experts=experts)


def optimum_screen(rows: Sequence[OptimumRow]) -> Iterator[RenderableType]:
    """Yield each law's compute-optimal size and tokens for a FLOP budget, and the median and range of all laws."""
    yield Table.of(_OPTIMA, rows, _notes)
    yield ""
    yield _LEGEND
    losses = [loss for each in rows for loss in (each.loss, each.loss_replication) if loss is not None]
    yield Facts(
        ("params", _spread(rows, "params", format_quantity)),
        ("tokens", _spread(rows, "tokens", format_quantity)),
        (
            "loss",
            (
                f"{min(losses):.3f} .. {max(losses):.3f} nats per token of Chinchilla's training text",
                "nearly flat between these sizes: a smaller model trained longer is cheaper to use",
            ),
        ),
    )


def _batch(laws: Sequence[LawRow], batch_tokens: float) -> Facts:
    multiples = {
        kind: [f"{batch_tokens / batch:.2g}x {law}" for law, batch in batches(laws, kind).items()] for kind in _KINDS
    }
    critical = critical_batch(laws)
    more, longer = tokens_over_least(batch_tokens, critical), steps_over_least(batch_tokens, critical)
    cost = (
        f"{more:.2f}x the fewest possible tokens if the critical batch is {format_quantity(critical)} (laws' median)",
        f"{longer:.2f}x the fewest possible steps (McCandlish 2018)",
    )
    rules = (
        "sqrt: Adam below the critical batch",
        "linear: SGD below the critical batch; AdamW if weight decay and batch / (lr x decay x tokens) stay constant",
        f"surge: the lr peaks at a batch of {format_quantity(critical)} and falls above",
        "far above the critical batch, no rule holds: the best lr hardly changes",
    )
    return Facts(*((f"{kind} batch", parts) for kind, parts in multiples.items()), ("cost", cost), ("rules", rules))


def _spreads(
    laws: Sequence[LawRow],
    params: float,
    tokens: float,
    batch_tokens: float | None,
    params_non_embedding: float | None,
    *,
    experts: float,
) -> Facts:
    own = [law for law in laws if law.form_of is None]
    by_kind = [(kind, [law for law in own if law.batch_kind == kind]) for kind in _KINDS]
    best = best_tokens_per_param(6 * params * tokens)
    lr, batch = median(law.lr for law in own if law.lr), median(batches(laws, "optimal").values())
    if batch_tokens is not None:
        lr, batch = median(each.at_batch.square_root for each in own if each.at_batch), batch_tokens
    tau = next(law.tau for law in own if law.tau)
    decay = f"{batch / (tau * tokens * lr):.2g} from tau {tau:.2g}, lr {scientific(lr)} and batch {quantity(batch)}"
    counted = params if params_non_embedding is None else params_non_embedding
    missing = "" if params_non_embedding else " (all parameters are used instead; give --params-non-embedding)"
    smaller = [law.law for law in laws if law.params_definition == "non-embedding"]
    head = [law.law for law in laws if law.params_definition == "without input embedding"]
    smaller_n = f"{format_quantity(counted)} without embeddings{missing}, in these laws: {', '.join(smaller)}"
    head_n = f"{format_quantity(params)} (all parameters; the number without the input embedding is unknown)"
    head_n += f", in these laws: {', '.join(head)}"
    compute_optimal = f"compute-optimal {min(best):.3g} .. {max(best):.3g} (laws --flops)"
    return Facts(
        ("N", (smaller_n, head_n)),
        *_losses(own, experts),
        ("tokens a parameter", (f"{tokens / params:.3g}", compute_optimal)),
        *((f"{kind} batch", (*_spread(found, "batch_tokens", quantity), "tokens")) for kind, found in by_kind),
        ("weight decay", decay),
        ("peak lr", (*_spread(own, "lr", scientific), "tune at small scale")),
    )


def _losses(own: Sequence[LawRow], experts: float) -> list[Fact]:
    """Return the predicted loss, in two lines if ``experts``, (all experts) / (experts of a token), is not 1."""
    unit = "nats per token of each law's own training text"
    if experts == 1:
        return [("loss", (*_spread(own, "loss", _loss), unit))]
    mixtures = [law for law in own if law.of_experts]
    dense = [law for law in own if not law.of_experts]
    return [
        (f"loss, {experts:g} experts", (*(f"{_loss(law.loss)} by {law.law}" for law in mixtures), unit)),
        ("loss, dense", (*_spread(dense, "loss", _loss), unit)),
    ]


def _spread(rows: Sequence[LawRow | OptimumRow], key: str, show: Callable[[float], str]) -> list[str]:
    """Return texts: median and range of ``key`` over all laws, and the range over laws that do not extrapolate."""
    found = [value for row in rows if (value := getattr(row, key))]
    inside = [value for row in rows if row.in_range and (value := getattr(row, key))]
    parts = [
        f"median {show(median(found))} of {len(found)} laws",
        f"{show(min(found))} .. {show(max(found))}, a spread of {max(found) / min(found):.3g}x",
    ]
    if not inside:
        parts.append("all extrapolated")
    elif len(inside) < len(found):
        ends = dict.fromkeys(map(show, (min(inside), max(inside))))
        parts.append(f"{len(inside)} not extrapolated: {' .. '.join(ends)}")
    return parts
