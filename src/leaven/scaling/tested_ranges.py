"""Warn about a recipe that leaves the range in which its scaling rule was tested.

These are warnings and not errors, because larger ratios must be tried before anybody knows whether they work. Each
warning says what to watch.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leaven.catalogue.findings import CHECKS
from leaven.catalogue.findings.case import farthest
from leaven.catalogue.laws import batches, critical_batch, evaluate, power_lines_tau
from leaven.catalogue.messages import sentence
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.scaling.apply import factors
from leaven.scaling.describe import matrices, usual_std
from leaven.scaling.table import ParameterTable, exponents, parameter_table


@dataclass(frozen=True)
class Caution:
    """A warning that a value is beyond a limit."""

    about: str
    value: float
    limit: float
    message: str  # what is beyond the limit, why it matters and what to do


TESTED: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("tested_ranges.toml").read_text(encoding="utf-8")
)
"""The lowest and the highest tested ratio by rule and axis, and the source of each rule."""
# At 4 times the tokens per parameter the best weight decay is about twice off (Power Lines' tau ~ TPP^-0.527).
TOKENS_PER_PARAMETER_FACTOR = 4.0
# Adam's update is g / (sqrt(v) + eps): at 0.1 eps takes a tenth of it.
EPS_SHARE = 0.1
# Times sqrt(1 / (3 d)). Runs at 2.5 (0.02 at width 5,120: OLMo 2 13B, Pythia 12B) trained; a run at 3.7 did not.
LARGE_INIT = 3.0
# RMS of the logits at the start; the first loss is above ln V by half its square. Runs with 1.43 (0.02 at width
# 5,120) trained; a run with 2.15 (0.02 at width 11,600) did not.
LARGE_LOGITS = 1.5


def warnings(recipe: Recipe) -> list[Caution]:
    """Return warnings about a recipe that is far from its base."""
    table = parameter_table(recipe)
    return [
        *_ratios(recipe, table),
        *_critical_batch(recipe),
        *_tokens_per_parameter(recipe),
        *_token_exponent(recipe, table),
        *_eps(recipe, table),
        *_betas(table),
        *_coupled_decay(recipe, table),
        *_large_init(recipe, table),
    ]


def dropped(before: Recipe, after: Recipe) -> list[Caution]:
    """Return warnings about settings that a transfer dropped."""
    if before.batch.ramp is None or after.batch.ramp is not None:
        return []
    return [_caution("ramp", after.batch.tokens / after.model.seq_len, 2.0)]


def _caution(about: str, value: float, limit: float, message: str | None = None, **facts: Any) -> Caution:
    """Return a warning. ``message`` is the key of its text, by default ``about``."""
    facts |= {"value": value, "limit": limit}
    return Caution(about, value, limit, sentence("warnings", message or about, facts, Path(__file__).parent))


def _ratios(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """Warn about ratios to the base that are outside the tested range.

    The batch was tested at a fixed duration, at which it changes the number of steps. If the batch grows with the
    tokens, the number of steps stays the same and the rule's factors for batch and tokens cancel. In that case the
    ratio of steps is compared with the tested range of the batch.
    """
    tested, ratios = TESTED[table.rule.name], table.ratios
    for axis in ("width", "depth", "batch", "tokens"):
        ratio = getattr(ratios, axis)
        low, high = tested[axis]
        if low <= ratio <= high or (axis == "batch" and 1 / high <= ratios.tokens / ratios.batch <= 1 / low):
            continue
        facts: dict[str, Any] = {
            "axis": axis,
            "low": low,
            "high": high,
            "covered": low < high,
            "rule": table.rule.name,
        }
        yield _caution(f"{axis} ratio", ratio, high if ratio > high else low, "ratio", tested=tested, **facts)


def _critical_batch(recipe: Recipe) -> Iterator[Caution]:
    model, batch = recipe.model, recipe.batch.tokens
    laws = evaluate(model.params, recipe.data.tokens, params_non_embedding=model.params_non_embedding)
    if batch > (limit := critical_batch(laws)):
        yield _caution("critical batch", batch, limit, laws=batches(laws, "critical"))


def _tokens_per_parameter(recipe: Recipe) -> Iterator[Caution]:
    base, shape = recipe.base, recipe.base_shape
    before, after = base.tokens / shape.params, recipe.data.tokens / recipe.model.params
    factor, far = after / before, TOKENS_PER_PARAMETER_FACTOR
    if not 1 / far <= factor <= far:
        decay = power_lines_tau(shape.params, base.tokens) / power_lines_tau(recipe.model.params, recipe.data.tokens)
        limit = before * (far if factor > 1 else 1 / far)
        yield _caution("tokens per parameter", after, limit, before=before, factor=factor, decay=decay)


def _token_exponent(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """Warn about a token exponent outside the interval that ``leaven check duration`` measured."""
    interval, used = recipe.scaling.token_exponent_interval, recipe.scaling.token_exponent
    if interval is None or table.ratios.tokens == 1 or "lr" not in table.rule.columns:
        return
    low, high = interval
    if not low <= used <= high:
        nearest = max(min(max(low, min(high, used)), 1.0), 0.0)
        facts: dict[str, Any] = {"ratio": table.ratios.tokens, "low": low, "high": high, "nearest": nearest}
        yield _caution("token exponent", used, high if used > high else low, **facts)


def _eps(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """Warn if eps / sqrt(v) of a matrix in a block is too large, as estimated from below.

    The estimate assumes a gradient of norm 1 (or the clipping limit) that is spread evenly over all parameters. Real
    gradients in blocks are smaller, because most of the norm belongs to the unembedding and most runs have a norm
    below 1 after the warm-up. So the real ratio is higher.
    """
    clip = recipe.hyperparameters.grad_clip
    norm = clip.limit if clip.mode == "global" and clip.limit else 1.0
    typical = norm / math.sqrt(recipe.model.params)
    worst = max((row for row in table.rows if row.role is Role.HIDDEN_WEIGHT), key=lambda row: row.eps)
    if (share := worst.eps / typical) > EPS_SHARE:
        facts: dict[str, Any] = {"row": worst, "typical": typical, "norm": norm, "params": recipe.model.params}
        yield _caution("eps", share, EPS_SHARE, **facts)


def _betas(table: ParameterTable) -> Iterator[Caution]:
    """Warn about betas beyond the range in which runs have trained well, which `leaven recipes check` reports too."""
    for check in CHECKS:
        if check.trained and check.hidden and (row := farthest(table.rows, check.hidden, check.trained)):
            (low, high), name, beta = check.trained, check.hidden, getattr(row, check.hidden)
            where = row.module if len({getattr(each, name) for each in table.rows}) > 1 else "all modules"
            facts: dict[str, Any] = {"name": name, "where": where, "low": low, "high": high}
            yield _caution(name, beta, high if beta > high else low, "beta", **facts)


def _coupled_decay(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """Warn about weight decay with Adam (L2 in the loss), because the rules for weight decay are for AdamW.

    A check of activations does not find this fault (microsoft/mup, PR 73). It is a warning and not an error, because
    the run itself is sound, and only its decay does not correspond to the decay at the base. Measured over width 64
    to 512, the L2 term divided by the gradient grows as width^1.5, because the rule multiplies the decay by the width
    and the gradient falls.
    """
    if recipe.hyperparameters.optimizer != "adam":
        return
    free = exponents(recipe.scaling)
    decayed = [row for row in table.rows if row.weight_decay]
    moved = {row.module: factors(table.rule, row.role, row.ratios, free).weight_decay for row in decayed}
    module = max(moved, key=lambda module: abs(math.log(moved[module])), default=None)
    if module is not None and moved[module] != 1:
        yield _caution("optimizer", moved[module], 1.0, rule=table.rule.name, module=module)


def _large_init(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """Warn about a block's matrix whose initial std is far above sqrt(1 / (3 d)), and about large initial logits.

    The std is multiplied by the multiplier of the matrix's branch. The final norm gives activations of RMS 1, so the
    RMS of the logits is the std of the unembedding x sqrt(d) x the forward multiplier.
    """
    readout = next(row for row in table.rows if row.role in {Role.UNEMBEDDING, Role.TIED_EMBEDDING})
    logits = readout.init_std * math.sqrt(recipe.model.d_model) * readout.multiplier
    if logits > LARGE_LOGITS:
        yield _caution("init of the logits", logits, LARGE_LOGITS, readout=readout, above=logits**2 / 2)
    blocks = [row for row in matrices(table) if row.role is Role.HIDDEN_WEIGHT]
    worst = max(blocks, key=lambda row: row.init_std * row.multiplier)
    std, usual = worst.init_std * worst.multiplier, usual_std(recipe.model.d_model)
    if std > LARGE_INIT * usual:
        named = recipe.hyperparameters.init != "rule"
        facts: dict[str, Any] = {"module": worst.module, "times": std / usual, "usual": usual, "named": named}
        yield _caution("init", std, LARGE_INIT * usual, **facts)
