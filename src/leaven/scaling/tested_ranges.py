"""Warnings about a transferred recipe that leaves the range in which its rule was tested.

They are not errors, since larger ratios have to be tried before they can be known. Each says what to watch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from leaven.catalogue.laws import batches, critical_batch, evaluate, power_lines_tau
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import Role
from leaven.recipe.units import format_quantity
from leaven.scaling.apply import factors
from leaven.scaling.starts import matrices, usual_std
from leaven.scaling.table import ParameterTable, exponents, resolve
from leaven.scaling.transfer import NO_RAMP


@dataclass(frozen=True)
class Caution:
    """A warning: a value beyond a limit."""

    about: str
    value: float
    limit: float
    message: str  # what it is, why it matters and what to do


@dataclass(frozen=True)
class Tested:
    """Ratios target / base for which a rule is known to transfer; (1, 1) if the rule does not cover the axis."""

    width: tuple[float, float]
    depth: tuple[float, float]
    batch: tuple[float, float]
    tokens: tuple[float, float]
    source: str


_NOT = (1.0, 1.0)
TESTED = {
    "standard": Tested(_NOT, _NOT, _NOT, _NOT, "it scales nothing, but the best values change with scale"),
    "mup": Tested((1 / 16, 16), _NOT, _NOT, _NOT, "arXiv 2203.03466, section 7, from memory: width 256 to 4096"),
    "completep": Tested(
        (1 / 16, 16), (1 / 32, 32), _NOT, _NOT, "code of arXiv 2505.01618: width 256 to 4096, depth 2 to 64"
    ),
    "complete-d-p": Tested(
        width=(1 / 16, 16),
        depth=(1 / 32, 32),
        batch=(1 / 8, 4),
        tokens=(1 / 100, 100),
        source="arXiv 2512.22382 as its readers report: width 128 to 2048, depth 4 to 128; tokens derived from "
        "compute",
    ),
}
# At 4 times the tokens per parameter the best weight decay is about twice off (Power Lines' tau ~ TPP^-0.527).
TOKENS_PER_PARAMETER_FACTOR = 4.0
# Adam's update is g / (sqrt(v) + eps): at 0.1 eps takes a tenth of it.
EPS_SHARE = 0.1
# beta2 as marin clips it (too low at large batches); beta1 to where 1 - beta is a tenth or five times 0.1.
BETA_RANGES = {"beta1": (0.5, 0.99), "beta2": (0.9, 0.9999)}
# Times sqrt(1 / (3 d)): runs with 2.5 (0.02 at width 5,120: OLMo 2 13B, Pythia 12B) trained, one with 3.7 did not.
LARGE_INIT = 3.0
# RMS of the logits at the start: the first loss is half its square above ln V. Runs with 1.43 (0.02 at width 5,120)
# trained, one with 2.15 (0.02 at 11,600) did not.
LARGE_LOGITS = 1.5


def warnings(recipe: Recipe) -> list[Caution]:
    """Return warnings about a recipe's distance from its base."""
    table = resolve(recipe)
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
    sequences = after.batch.tokens / after.model.seq_len
    return [Caution("ramp", sequences, 2.0, f"the batch ramp is {NO_RAMP}; transfers from here on have none either")]


def _ratios(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """Warn about ratios beyond the tested ones.

    The batch was tested at a fixed duration, where it changes the number of steps. If the batch grows with the
    tokens, the number of steps stays and the rule's columns for batch and tokens cancel; then the number of steps is
    judged.
    """
    tested, ratios = TESTED[table.rule.name], table.ratios
    for axis in ("width", "depth", "batch", "tokens"):
        ratio = getattr(ratios, axis)
        low, high = getattr(tested, axis)
        if low <= ratio <= high or (axis == "batch" and 1 / high <= ratios.tokens / ratios.batch <= 1 / low):
            continue
        limit = high if ratio > high else low
        if low == high:
            told = f"{axis} x{_plain(ratio)}: {table.rule.name} has no rule for {axis} ({tested.source})"
        else:
            told = f"{axis} x{_plain(ratio)} of the base, tested from x{low:.3g} to x{high:.3g} ({tested.source})"
        yield Caution(f"{axis} ratio", ratio, limit, f"{told}; a base nearer to the target would be safer")


def _critical_batch(recipe: Recipe) -> Iterator[Caution]:
    model, batch = recipe.model, recipe.batch.tokens
    laws = evaluate(model.params, recipe.data.tokens, params_non_embedding=model.params_non_embedding)
    critical, middle = batches(laws, "critical"), critical_batch(laws)
    if batch > middle:
        listed = ", ".join(f"{law} {format_quantity(tokens)}" for law, tokens in critical.items())
        yield Caution(
            "critical batch",
            batch,
            middle,
            f"batch {format_quantity(batch)} tokens is beyond the critical batch ({listed}): the batch rule holds "
            "where gradient noise dominates; a smaller batch reaches the same loss with fewer tokens",
        )


def _tokens_per_parameter(recipe: Recipe) -> Iterator[Caution]:
    base, shape = recipe.base, recipe.base_shape
    before, after = base.tokens / shape.params, recipe.data.tokens / recipe.model.params
    factor, far = after / before, TOKENS_PER_PARAMETER_FACTOR
    if not 1 / far <= factor <= far:
        decay = power_lines_tau(shape.params, base.tokens) / power_lines_tau(recipe.model.params, recipe.data.tokens)
        yield Caution(
            "tokens per parameter",
            after,
            before * (far if factor > 1 else 1 / far),
            f"{_plain(after)} tokens per parameter, the base had {_plain(before)} (x{_plain(factor)}): the rule "
            f"keeps lr x decay x steps, Power Lines 2025 would multiply weight decay by {decay:.2g}; a base with as "
            "many tokens per parameter as the target would be safer",
        )


def _token_exponent(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """Warn about a token exponent outside the interval that ``leaven check duration`` measured."""
    interval, used = recipe.scaling.token_exponent_interval, recipe.scaling.token_exponent
    if interval is None or table.ratios.tokens == 1 or "lr" not in table.rule.columns:
        return
    low, high = interval
    if not low <= used <= high:
        nearest = min(max(low, min(high, used)), 1.0)
        yield Caution(
            "token exponent",
            used,
            high if used > high else low,
            f"tokens x{_plain(table.ratios.tokens)} with token_exponent {used:.3g}, outside of the {low:.3g} to "
            f"{high:.3g} that leaven check duration measured for this base; type "
            f"--set scaling.token_exponent={max(nearest, 0.0):.3g}",
        )


def _eps(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """A lower bound on eps / sqrt(v) of a block's matrix: a gradient of norm 1 spread evenly over all parameters.

    Most of the norm is the unembedding's and most runs have less than 1 once they have warmed up, so the blocks have
    less, and their ratio is higher.
    """
    clip = recipe.hyperparameters.grad_clip
    norm = clip.limit if clip.mode == "global" and clip.limit else 1.0
    typical = norm / math.sqrt(recipe.model.params)
    worst = max((row for row in table.rows if row.role is Role.HIDDEN_WEIGHT), key=lambda row: row.eps)
    share = worst.eps / typical
    if share > EPS_SHARE:
        yield Caution(
            "eps",
            share,
            EPS_SHARE,
            f"eps {worst.eps:.2g} of {worst.name} against gradient entries of at most {typical:.2g} (norm {norm:g} "
            f"over {format_quantity(recipe.model.params)} parameters): eps / sqrt(v) is at least {share:.2g}, above "
            f"{EPS_SHARE}; lower hyperparameters.eps, Adam is turning into momentum",
        )


def _betas(table: ParameterTable) -> Iterator[Caution]:
    for name, (low, high) in BETA_RANGES.items():
        betas = {getattr(row, name): row.module for row in table.rows}
        outside = [beta for beta in betas if not low <= beta <= high]
        if outside:
            beta = max(outside, key=lambda beta: max(low - beta, beta - high))
            whose = betas[beta] if len(betas) > 1 else "all modules"
            yield Caution(
                name,
                beta,
                high if beta > high else low,
                f"{name} {beta:.5g} of {whose} is outside {low:g} to {high:g}, where runs have been seen to train "
                f"well; set hyperparameters.{name} at the base so that it comes out inside",
            )


def _coupled_decay(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """Warn about weight decay with Adam (L2 in the loss): the rules for weight decay are for AdamW.

    A check of activations does not find this (microsoft/mup, PR 73). It is a warning, not an error, since the run
    itself is sound; only its decay does not match the base's. Measured over width 64 to 512: the L2 term over the
    gradient grows as width^1.5, since the rule multiplies the decay by the width and the gradient falls.
    """
    if recipe.hyperparameters.optimizer != "adam":
        return
    free = exponents(recipe.scaling)
    decayed = [row for row in table.rows if row.weight_decay]
    moved = {row.module: factors(table.rule, row.role, row.ratios, free).weight_decay for row in decayed}
    module = max(moved, key=lambda module: abs(math.log(moved[module])), default=None)
    if module is not None and moved[module] != 1:
        yield Caution(
            "optimizer",
            moved[module],
            1.0,
            f"{table.rule.name} multiplies the weight decay of {module} by {moved[module]:.3g} to keep AdamW's pace, "
            "lr x decay x steps; optimizer adam has L2 in the loss, whose part in the gradient then grows as about "
            'width^1.5 (measured); set hyperparameters.optimizer = "adamw", or weight_decay = 0',
        )


def _large_init(recipe: Recipe, table: ParameterTable) -> Iterator[Caution]:
    """Warn if a block's matrix, times its branch's multiplier, starts far above sqrt(1 / (3 d)), or if the logits are
    large.

    The final norm gives activations of RMS 1, so the RMS of the logits is the std of a row x sqrt(d) x the forward
    multiplier.
    """
    readout = next(row for row in table.rows if row.role in {Role.UNEMBEDDING, Role.TIED_EMBEDDING})
    logits = readout.init_std * math.sqrt(recipe.model.d_model) * readout.multiplier
    if logits > LARGE_LOGITS:
        yield Caution(
            "init of the logits",
            logits,
            LARGE_LOGITS,
            f"init std {readout.init_std:.3g} of {readout.module} gives logits of RMS {logits:.2g}, a first loss "
            f"{logits**2 / 2:.2g} above ln V; 0.02 at width 5,120 (OLMo 2 13B, Pythia 12B), RMS 1.43, has trained; "
            f"BigScience's 104B run, RMS 2.15, failed; lower hyperparameters.modules.{readout.module}.init_std",
        )
    blocks = [row for row in matrices(table) if row.role is Role.HIDDEN_WEIGHT]
    worst = max(blocks, key=lambda row: row.init_std * row.multiplier)
    std, usual = worst.init_std * worst.multiplier, usual_std(recipe.model.d_model)
    if std > LARGE_INIT * usual:
        lower = "lower hyperparameters.init_std" if recipe.hyperparameters.init == "rule" else 'try init = "mt-nlg"'
        yield Caution(
            "init",
            std,
            LARGE_INIT * usual,
            f"init std {std:.3g} of {worst.module} is {std / usual:.2g} x sqrt(1 / (3 d)) = {usual:.3g}, where "
            "MT-NLG and BLOOM-176B started: BigScience's 104B run failed with 0.02 at width 11,600, which is 3.7 x; "
            f"2.5 x has trained; {lower}",
        )


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
