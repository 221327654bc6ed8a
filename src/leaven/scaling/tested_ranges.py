"""Warn if a recipe leaves the range in which its scaling rule was tested, or has other risky values."""

import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

from leaven.catalogue.findings import CHECKS
from leaven.catalogue.findings.case import farthest
from leaven.catalogue.laws import batches, critical_batch, main_laws, power_lines_tau
from leaven.catalogue.messages import sentence
from leaven.documents.runs import CautionRow
from leaven.recipe.base import Part
from leaven.recipe.init_std import usual_std
from leaven.recipe.recipe import Recipe, differing
from leaven.recipe.shape import Role
from leaven.recipe.units import listed
from leaven.scaling.apply import factors
from leaven.scaling.cells import LETTERS, TensorRatios
from leaven.scaling.rules import RULES
from leaven.scaling.table import ParameterTable, parameter_table
from leaven.scaling.transfer import searched_paths

TESTED: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("tested_ranges.toml").read_text(encoding="utf-8")
)
"""For each scaling rule: the tested ranges of width, depth, batch and tokens as ratios to the base, and a source."""
# Warn if the tokens per parameter change by more than this factor. At this factor, the best weight decay is about
# twice or half as large (Power Lines: the best timescale is proportional to (tokens per parameter)^-0.527).
TOKENS_PER_PARAMETER_FACTOR = 4.0
# With Muon, warn beyond this ratio of batch or tokens to the base: arXiv 2512.05620 tests only width and depth.
MUON_FACTOR = 4.0
# With norms on the outputs of branches, warn above this ratio of width or depth to the base: the best lr was measured
# to change with the ratio to these powers (docs/log.md, 29 November 2026: width 32 to 256, 2 to 16 layers, alpha 1).
OUTPUT_NORM_FACTOR = 2.0
OUTPUT_NORM_EXPONENTS = {"width": -0.22, "depth": -0.34}
_MOST_SHOWN = 6  # values that a warning lists
MEAN_LR_FACTOR = 1.1  # warn if the mean lr of two runs, as a share of the peak, differs by more than this factor
EPS_SHARE = 0.1  # warn above this eps / sqrt(v): Adam's update m / (sqrt(v) + eps) is then about a tenth smaller
# Warn above this init std, in units of sqrt(1 / (3 d_model)). Runs at 2.5 trained (std 0.02 at width 5,120: OLMo 2
# 13B, Pythia 12B); BigScience's 104B run at 3.7 did not.
LARGE_INIT = 3.0
# Warn above this RMS of the initial logits, which raises the first loss above ln V by half its square. The runs that
# LARGE_INIT names had 1.43 (trained) and 2.15 (did not).
LARGE_LOGITS = 1.5


def warnings(recipe: Recipe) -> list[CautionRow]:
    table = parameter_table(recipe)
    return [
        *_ratios(recipe, table),
        *_muon(recipe, table),
        *_output_norms(recipe, table),
        *_critical_batch(recipe),
        *_tokens_per_parameter(recipe),
        *_token_exponent(recipe, table),
        *_eps(recipe, table),
        *_betas(table),
        *_coupled_decay(recipe, table),
        *_large_init(recipe, table),
        *without_effect(recipe),
    ]


def without_effect(recipe: Recipe) -> list[CautionRow]:
    """Return a warning if a number of [scaling] or [schedule] is not its default, and the default would give the same
    factors at every scale, and the same schedule."""
    used, values = _effects(recipe), []
    for table, part in (("scaling", recipe.scaling), ("schedule", recipe.schedule)):
        for name, value in part:
            default = type(part).model_fields[name].default
            if isinstance(value, int | float) and value != default:
                # A copy, because the default may be invalid here, such as no warm-up before inverse_sqrt.
                other = recipe.model_copy(update={table: part.model_copy(update={name: default})})
                if _effects(other) == used:
                    values.append(f"{table}.{name} = {value}")
    facts: dict[str, Any] = {"values": values, "rule": recipe.scaling.rule, "decay": recipe.schedule.decay}
    return [_caution("without effect", len(values), 0, **facts)] if values else []


def _effects(recipe: Recipe) -> tuple[list[Any], list[float]]:
    """Return the factors of the scaling rule, where all ratios to the base are 2, and the schedule."""
    rule, at, tokens = RULES[recipe.scaling.rule], TensorRatios(*[2.0] * len(LETTERS)), recipe.data.tokens
    optimizers = {False, recipe.hyperparameters.muon is not None}
    moved = [factors(rule, role, at, recipe.scaling, muon) for role in Role for muon in optimizers]
    return moved, [
        recipe.schedule.multiplier(at, tokens) for at in (1, *(share * tokens / 100 for share in range(1, 101)))
    ]


def dropped(before: Recipe, after: Recipe) -> list[CautionRow]:
    """Return warnings if the transfer from ``before`` to ``after`` dropped the batch ramp or [start] weights."""
    found = []
    if before.batch.ramp is not None and after.batch.ramp is None:
        found.append(_caution("ramp", after.batch.tokens / after.model.seq_len, 2.0))
    if before.start.weights is not None and after.start.weights is None:
        found.append(_caution("start", 0, 1))
    return found


def untuned(tuned: Recipe) -> list[CautionRow]:
    """Return a warning if no study is named in the table [why] of ``tuned``. Then nobody knows what was searched."""
    return [] if searched_paths(tuned) else [_caution("searched values", 0, 1)]


def unlike(source: Mapping[str, Any], recipe: Recipe) -> list[CautionRow]:
    """Return warnings if vocab_size or seq_len of the recipe differs from ``source``, the [model] of the run or
    recipe that its hyperparameters come from."""
    sizes = {"vocab_size": recipe.model.vocab_size, "seq_len": recipe.model.seq_len}
    pairs = [(name, value, source.get(name)) for name, value in sizes.items()]
    return [_caution(name, value, there) for name, value, there in pairs if there and value != there]


def replaced(target: Recipe, tuned: Recipe, after: Recipe) -> list[CautionRow]:
    """Return a warning if the transfer of ``tuned`` to ``target`` gave ``after`` values that no study searched."""
    searched = {path.partition("[")[0] for path in searched_paths(tuned)}
    if not searched:  # `untuned` warns of it
        return []
    before, now = target.hyperparameters, after.hyperparameters
    if before.optimizer == "muon" != now.optimizer:  # no study searches this
        searched -= {"hyperparameters.optimizer"}
    if before.optimizer != now.optimizer:
        searched |= {"hyperparameters.muon"}
    values = [
        f"{path} {_written(theirs)} by {_written(now)}"
        for path, theirs, now in differing(_stated(target), _stated(after))
        if not (path.startswith("scaling.base.") and target.scaling.base is None)
        and not any(path == each or path.startswith(f"{each}.") for each in searched)
    ]
    if "hyperparameters.grad_clip" in searched and before.grad_clip.mode != now.grad_clip.mode:
        values += [f"hyperparameters.grad_clip.mode {before.grad_clip.mode} by {now.grad_clip.mode}"]
    if not values:
        return []
    if more := len(values[_MOST_SHOWN:]):
        values[_MOST_SHOWN:] = [f"and {more} more"]
    return [_caution("replaced values", len(values), 0, name=target.name, values=values)]


def _stated(recipe: Recipe) -> dict[str, Any]:
    """Return the values of [hyperparameters] and [scaling] by path, except multipliers and depth profiles of 1."""
    own, scaling = recipe.hyperparameters, recipe.scaling
    tables: dict[str, Any] = {"hyperparameters": own, "hyperparameters.muon": own.muon, "scaling": scaling}
    tables |= {f"hyperparameters.modules.{name}": multipliers for name, multipliers in own.modules.items()}
    found = {
        f"{table}.{name}": value
        for table, part in tables.items()
        for name, value in part or ()
        if not isinstance(value, dict | Part) and not (".modules." in table and value == 1)
    }
    found |= {f"scaling.base.{name}": value for name, value in scaling.base or () if value is not None}
    found["hyperparameters.grad_clip"] = own.grad_clip.written()
    profiles = {name: profile for name, profile in own.depth if set(profile) != {1.0}}
    return found | {f"hyperparameters.depth.{name}": profile for name, profile in profiles.items()}


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)


def unlike_training(before: Recipe, after: Recipe) -> list[CautionRow]:
    """Return a warning for each difference between two recipes that may change the best values."""
    found = _unlike_schedule(before, after)
    if before.data.documents != after.data.documents:
        found.append(_caution("documents", 1, 0, there=before.data.documents, here=after.data.documents))
    if before.model.dropout != after.model.dropout:
        found.append(_caution("dropout", after.model.dropout, before.model.dropout))
    if _text(before) != _text(after):
        texts = [listed([source.source for source in recipe.data.sources], "and") for recipe in (before, after)]
        found.append(_caution("text", 1, 0, there=texts[0], here=texts[1]))
    given = [recipe.start.weights is not None for recipe in (before, after)]
    if given[0] != given[1]:
        found.append(_caution("start weights", int(given[1]), int(given[0])))
    return found


def _text(recipe: Recipe) -> dict[str, Fraction]:
    """Return {data source: share}. Paths of sources are made absolute; other names stay as they are."""
    names = [source.source for source in recipe.data.sources]
    paths = [name if ":" in name or not ({*name} & {*"./"}) else os.path.abspath(name) for name in names]
    return dict(zip(paths, recipe.data.proportions, strict=True))


def _unlike_schedule(before: Recipe, after: Recipe) -> list[CautionRow]:
    there, here = (
        fmean(run.schedule.multiplier(share / 100 * run.data.tokens, run.data.tokens) for share in range(1, 100))
        for run in (before, after)
    )
    if 1 / MEAN_LR_FACTOR <= here / there <= MEAN_LR_FACTOR:
        return []
    return [_caution("schedule", here, there, before=before.schedule, after=after.schedule)]


def _caution(about: str, value: float, limit: float, message: str | None = None, **facts: Any) -> CautionRow:
    """Return a warning that ``value`` is beyond ``limit``. ``message`` is a key in messages.toml."""
    facts |= {"value": value, "limit": limit}
    text = sentence("warnings", message or about, facts, Path(__file__).parent)
    return CautionRow(about=about, value=value, limit=limit, message=text)


def _ratios(recipe: Recipe, table: ParameterTable) -> Iterator[CautionRow]:
    """Yield a warning for each ratio to the base (width, depth, batch, tokens) that is outside its tested range.

    The batch gives a warning only if the ratio of steps is outside, too. The tests kept the number of tokens, so a
    batch ratio of 4 was tested with a step ratio of 1/4.
    """
    tested, ratios = TESTED[table.rule.name], table.ratios
    for axis in ("width", "depth", "batch", "tokens"):
        ratio = getattr(ratios, axis)
        low, high = tested[axis]
        if low <= ratio <= high or (axis == "batch" and 1 / high <= ratios.tokens / ratios.batch <= 1 / low):
            continue
        facts: dict[str, Any] = {"axis": axis, "low": low, "high": high, "covered": low < high, "tested": tested}
        yield _caution(f"{axis} ratio", ratio, high if ratio > high else low, "ratio", rule=table.rule.name, **facts)


def _muon(recipe: Recipe, table: ParameterTable) -> Iterator[CautionRow]:
    for axis in ("batch", "tokens"):
        ratio = getattr(table.ratios, axis)
        if recipe.hyperparameters.muon and table.rule.columns and not 1 / MUON_FACTOR <= ratio <= MUON_FACTOR:
            yield _caution(f"muon {axis}", ratio, MUON_FACTOR if ratio > 1 else 1 / MUON_FACTOR, "muon", axis=axis)


def _output_norms(recipe: Recipe, table: ParameterTable) -> Iterator[CautionRow]:
    """Warn if width or depth is far above the base's. Depth was measured only at alpha = 1."""
    if recipe.model.norm_placement != "output" or table.rule.name != "complete-d-p":
        return
    for axis, exponent in OUTPUT_NORM_EXPONENTS.items():
        ratio = getattr(table.ratios, axis)
        if ratio > OUTPUT_NORM_FACTOR and (axis == "width" or recipe.scaling.alpha == 1):
            facts = {"axis": axis, "exponent": exponent, "factor": ratio**exponent}
            yield _caution(f"output norms {axis}", ratio, OUTPUT_NORM_FACTOR, "output norms", **facts)


def _critical_batch(recipe: Recipe) -> Iterator[CautionRow]:
    batch, laws = recipe.batch.tokens, main_laws(recipe.model, recipe.data.tokens)
    if batch > (limit := critical_batch(laws)):
        yield _caution("critical batch", batch, limit, laws=batches(laws, "critical"))


def _tokens_per_parameter(recipe: Recipe) -> Iterator[CautionRow]:
    base, shape = recipe.base, recipe.base_shape
    before, after = base.tokens / shape.params_active, recipe.data.tokens / recipe.model.params_active
    factor, far = after / before, TOKENS_PER_PARAMETER_FACTOR
    if not 1 / far <= factor <= far:
        decay = power_lines_tau(shape.params_active, base.tokens) / power_lines_tau(
            recipe.model.params_active, recipe.data.tokens
        )
        limit, experts = before * (far if factor > 1 else 1 / far), recipe.model.experts
        yield _caution(
            "tokens per parameter", after, limit, before=before, factor=factor, decay=decay, experts=experts
        )


def _token_exponent(recipe: Recipe, table: ParameterTable) -> Iterator[CautionRow]:
    interval, used = recipe.scaling.token_exponent_interval, recipe.scaling.token_exponent
    if interval is None or table.ratios.tokens == 1 or "lr" not in table.rule.columns:
        return
    low, high = interval
    if not low <= used <= high:
        nearest = max(min(max(low, min(high, used)), 1.0), 0.0)
        limit, ratio = high if used > high else low, table.ratios.tokens
        yield _caution("token exponent", used, limit, ratio=ratio, low=low, high=high, nearest=nearest)


def _eps(recipe: Recipe, table: ParameterTable) -> Iterator[CautionRow]:
    """Yield a warning if Adam's eps for a matrix in a block is above `EPS_SHARE` of a typical gradient entry.

    A typical entry is estimated as (global clipping limit, or 1 without one) / sqrt(number of parameters). Real
    entries in blocks are mostly smaller, so eps is even larger compared with them.
    """
    clip = recipe.hyperparameters.grad_clip
    norm = clip.limit if clip.mode == "global" and clip.limit else 1.0
    typical = norm / math.sqrt(recipe.model.params)
    worst = max((row for row in table.rows if row.role is Role.HIDDEN_WEIGHT), key=lambda row: row.eps)
    if (share := worst.eps / typical) > EPS_SHARE:
        yield _caution("eps", share, EPS_SHARE, row=worst, typical=typical, norm=norm, params=recipe.model.params)


def _betas(table: ParameterTable) -> Iterator[CautionRow]:
    rows = [row for row in table.rows if not row.match]  # without the matrices that Muon updates
    for check in CHECKS:
        if check.trained and check.hidden and (row := farthest(rows, check.hidden, check.trained)):
            (low, high), name, beta = check.trained, check.hidden, getattr(row, check.hidden)
            where = row.module if len({getattr(each, name) for each in rows}) > 1 else "all modules"
            limit = high if beta > high else low
            yield _caution(name, beta, limit, "beta", name=name, where=where, low=low, high=high)


def _coupled_decay(recipe: Recipe, table: ParameterTable) -> Iterator[CautionRow]:
    """Warn if the rule changes a weight decay of the optimizer ``adam`` (L2 in the loss).

    With a changed decay, the ratio L2 gradient / loss gradient grows as width^1.5 (measured, widths 64 to 512). No
    coordinate check shows this (microsoft/mup, PR 73).
    """
    if recipe.hyperparameters.optimizer != "adam":
        return
    decayed = [row for row in table.rows if row.weight_decay]
    moved = {row.module: factors(table.rule, row.role, row.ratios, recipe.scaling).weight_decay for row in decayed}
    module = max(moved, key=lambda module: abs(math.log(moved[module])), default=None)
    if module is not None and moved[module] != 1:
        yield _caution("optimizer", moved[module], 1.0, rule=table.rule.name, module=module)


def _large_init(recipe: Recipe, table: ParameterTable) -> Iterator[CautionRow]:
    readout = next(row for row in table.rows if row.role in {Role.UNEMBEDDING, Role.TIED_EMBEDDING})
    # RMS of the logits: the final norm gives activations of RMS 1.
    logits = readout.init_std * math.sqrt(recipe.model.d_model) * readout.multiplier
    if logits > LARGE_LOGITS:
        yield _caution("init of the logits", logits, LARGE_LOGITS, readout=readout, above=logits**2 / 2)
    blocks = [row for row in table.rows if row.role is Role.HIDDEN_WEIGHT]
    worst = max(blocks, key=lambda row: row.init_std * row.multiplier)
    std, usual = worst.init_std * worst.multiplier, usual_std(recipe.model.d_model)
    if std > LARGE_INIT * usual:
        named = recipe.hyperparameters.init != "rule"
        limit, times = LARGE_INIT * usual, std / usual
        yield _caution("init", std, limit, module=worst.module, times=times, usual=usual, named=named)
