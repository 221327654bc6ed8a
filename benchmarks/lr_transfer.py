"""Measure how the best lr changes with width, depth, batch and tokens: `python benchmarks/lr_transfer.py`.

For each case (a kind of model and optimizer under a scaling rule) and axis, the tables have the best lr of each size,
its shift from the base in octaves (factors of two), the regret (how many nats the base's best lr costs at this size),
the verdict of `leaven check transfer` and the exponent of the best lr over the axis, with 95% intervals. All sizes of
a case share one base.

For each size, one run at each of three lrs or more, an octave apart, finds the octave of the best lr. Then the three
lrs around it are trained with 5 seeds, and with 10, 20, 40 and 80 as long as the verdict is undecided. The base has
as many seeds as the size with the most, and all sizes are judged again when it gets more. Seeds are the same at all
lrs. A closer grid would be worse: the best lr is the minimum of a parabola through three points, and its error is
inversely proportional to their distance.

No number of seeds decides a size whose true shift or regret is a limit of the check. So if the verdict is undecided
after all rounds, and the interval of the shift is narrower than its limit, the table says "at the limit".

Runs are saved as they end: run the command again to resume. To add seeds to earlier runs, copy lr_transfer.jsonl,
which has the losses of runs on 2 cores of an AMD EPYC or a Xeon, to runs.jsonl in the folder of the runs. Tables
(table.md), documents and pages are in that folder, too. `--tiny` tests the benchmark in seconds.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

# One thread per process: more threads than cores are up to ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from leaven import storage
from leaven.data.tokens import prepare
from leaven.documents.checks import CheckDocument, VerdictRow
from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.early_stopping import divergence_limit
from leaven.training.outcome import Outcome
from leaven.training.stack import refusal, train_stack
from leaven.verification.foreign import CheckTrial
from leaven.verification.model_instance import RunScale
from leaven.verification.optimum import LossGrid, estimate
from leaven.verification.recipe_family import RecipeFamily, RecipeTrial, recipe_models
from leaven.verification.runs import LINES, RunStore
from leaven.verification.sweep import AXES, SWEPT, compare, extended, labels
from leaven.views.check_page import check_page

RECIPE = """\
name = "lr-transfer"

[model]
n_layers = 2
d_model = 32
n_heads = 2
n_kv_heads = 2
d_head = 16
d_ff = 64
vocab_size = 512
seq_len = 64
qk_norm = true

[data]
source = "python-stdlib"
tokens = 212_992

[batch]
tokens = 1_024

[schedule]
warmup_tokens = 13_312
decay = "linear"

[hyperparameters]
lr = 0.016
init_std = 0.1

[evaluation]
tokens = 32_768
"""
BASE = RunScale(32, 2)
SCALES = {
    "width": [BASE, *(RunScale(width, 2) for width in (64, 128, 256))],
    "depth": [BASE, *(RunScale(32, depth) for depth in (4, 8, 16))],
    "batch": [BASE, *(RunScale(32, 2, batch=ratio) for ratio in (1 / 8, 1 / 2, 2))],
    "tokens": [BASE, *(RunScale(32, 2, tokens=ratio) for ratio in (1 / 2, 2, 8))],
}
ROUNDS = (5, 10, 20, 40, 80)  # numbers of seeds after which a size is judged
STACK = 5  # trials; larger stacks are not faster on a processor

TINY = ["model.d_model=16", "model.d_head=8", "model.d_ff=32", "model.n_layers=1", "data.tokens=4096"]
TINY += ["schedule.warmup_tokens=1024", "evaluation.tokens=1024", "data.source=tiny-shakespeare"]
TINY_SCALES = {
    "width": [RunScale(16, 1), RunScale(32, 1)],
    "depth": [RunScale(16, 1), RunScale(16, 2)],
    "batch": [RunScale(16, 1), RunScale(16, 1, batch=2)],
    "tokens": [RunScale(16, 1), RunScale(16, 1, tokens=2)],
}

Item = TypeVar("Item")
Losses = dict[RunScale, LossGrid]


@dataclass(frozen=True)
class Case:
    """A kind of model and optimizer under a scaling rule."""

    overrides: Sequence[str] = ()  # of the recipe
    lr: float = 0.016  # about the best lr of the base
    axes: Sequence[str] = ("depth", "width")


CASES: Mapping[str, Case] = {
    "adamw": Case(axes=AXES),
    "muon": Case(["hyperparameters.optimizer=muon"], lr=0.032, axes=AXES),
    "post-norm": Case(["model.norm_placement=output", "model.qk_norm_whole=true"], axes=AXES),
    # An embedding that begins with the size of the branches.
    "post-norm-embedding": Case(
        [
            "model.norm_placement=output",
            "model.qk_norm_whole=true",
            "hyperparameters.modules={embedding={init_std=10.0}}",
        ],
        lr=0.032,
    ),
    "post-norm-alpha-half": Case(
        ["model.norm_placement=output", "model.qk_norm_whole=true", "scaling.alpha=0.5"], lr=0.128, axes=("depth",)
    ),
    # Ten times the default weight decay.
    "post-norm-decay": Case(
        ["model.norm_placement=output", "model.qk_norm_whole=true", "hyperparameters.weight_decay=1.0"], lr=0.016
    ),
    "experts": Case(["model.experts={number=4, active=2, d_expert=32}"], axes=AXES),
    # Branches are multiplied by depth^-1/2 and not by depth^-1, and the lr inside blocks falls as depth^-1/2.
    "alpha-half": Case(["scaling.alpha=0.5"], axes=("depth",)),
    "standard": Case(["scaling.rule=standard"]),  # the control, whose best lr must change
}


def batched(items: Iterable[Item], most: int) -> Iterator[list[Item]]:
    items = iter(items)
    while few := list(islice(items, most)):
        yield few


class StackedRuns(RunStore):
    """Trains trials of one small shape together, in a stack. On a processor, this takes 0.5 to 0.75 of the time of
    single trials at width 32, and more than their time at greater widths."""

    def run(self, trials: Iterable[CheckTrial]) -> Callable[[CheckTrial], Outcome]:
        trials, pool = list(trials), self._open()
        stacks: dict[str, dict[str, Recipe]] = {}
        for trial in trials:
            if trial.key not in self._ended and isinstance(trial, RecipeTrial) and stackable(trial.recipe):
                parts = [trial.recipe.model, trial.recipe.batch, trial.recipe.data.tokens]
                stacks.setdefault(repr(parts), {})[trial.key] = trial.recipe
        training = {
            pool.submit(train_stack, [recipe for _, recipe in few], len(few)): few
            for recipes in stacks.values()
            for few in batched(recipes.items(), STACK)
        }
        for future in as_completed(training):
            for (key, recipe), outcome in zip(training[future], future.result(), strict=True):
                # As RecipeTrial.run does.
                loss = min(outcome.loss, divergence_limit(recipe.model.vocab_size))
                self._ended[key] = replace(outcome, loss=loss)
                storage.append_json(self.folder / LINES, {"key": key} | asdict(self._ended[key]))
        return super().run(trials)


def stackable(recipe: Recipe) -> bool:
    return recipe.model.d_model <= 32 and refusal(recipe) is None


def around(lr: float) -> list[float]:
    return [lr / 2, lr, 2 * lr]


def measure(
    family: RecipeFamily, scales: Sequence[RunScale], lr: float, store: RunStore, rounds: Sequence[int]
) -> Losses:
    """Return the losses around the best lr of each scale, with as many seeds as its verdict needs.

    The first of the ``scales`` is the base, with which the others are compared. ``lr`` is about its best lr.
    """

    def lowest(scales: Sequence[RunScale], lr: float) -> dict[RunScale, float]:
        _, found = extended(family, "lr", {scale: around(lr) for scale in scales}, store, 1)
        return {scale: float(2 ** grid.octaves[grid.means.argmin()]) for scale, grid in found.items()}

    base, *others = scales
    best = lowest([base], lr)
    grids = {scale: around(lr) for scale, lr in (best | lowest(others, best[base])).items()}
    losses: Losses = {}
    had = dict.fromkeys(scales, 0)  # how many of the rounds each scale has had
    due = others
    while due:
        # A decided size may become undecided when the base gets more seeds; then it gets more, too.
        stage = min(had[scale] for scale in due)
        ready = [scale for scale in due if had[scale] == stage]
        now = {scale: grids[scale] for scale in ([base] if had[base] == stage else []) + ready}
        wider, found = extended(family, "lr", now, store, rounds[stage])
        grids, losses, had = grids | wider, losses | found, had | dict.fromkeys(now, stage + 1)
        losses = {scale: losses[scale] for scale in scales if scale in losses}
        rows = zip(others, judge(family, losses).rows, strict=True)
        due = [scale for scale, row in rows if row.undecided and had[scale] < len(rounds)]
    return losses


def judge(family: RecipeFamily, losses: Losses) -> CheckDocument:
    """Return the document that compares the first scale with the others."""
    names = labels(list(losses))
    return compare(
        "transfer",
        family.name,
        SWEPT["lr"],
        losses,
        names=names,
        ruled={axis: family.exponent("lr", axis) for axis in AXES},
        settings={
            "rule": family.rule,
            "unit": family.unit,
            "scales": list(names.values()),
            "seeds": max(seeds_of(grid) for grid in losses.values()),
            "tokens": family.tokens,
            "batch_tokens": family.batch_tokens,
        },
    )


def seeds_of(grid: LossGrid) -> int:
    return max(map(len, grid.runs), default=0)


def verdict(row: VerdictRow, last: bool) -> str:
    """Return a verdict for the table. ``last``: whether the size has all the seeds that the benchmark trains."""
    low, high = row.parts.get("low"), row.parts.get("high")
    if row.undecided and last and None not in (low, high) and high - low < SWEPT["lr"].shift_limit:
        return "at the limit"
    return "passed" if row.passed else "undecided" if row.undecided else "FAILED"


def interval(value: float | None, low: float | None, high: float | None, spec: str) -> str:
    if value is None:
        return ""
    return f"{value:{spec}}" if low is None or high is None else f"{value:{spec}} ({low:{spec}} to {high:{spec}})"


def size_rows(case: str, axis: str, losses: Losses, document: CheckDocument, most: int) -> Iterator[list[str]]:
    """Yield the rows of the table of sizes, the base's first."""
    names = labels(list(losses))
    for row, (scale, grid) in zip([None, *document.rows], losses.items(), strict=True):
        best = ""
        if grid.has_optimum:
            found = estimate(lambda grids: grids[0].optimum(), [grid], paired=True)
            best = interval(2**found.value, *(2**end for end in found.ends), ".3g")
        cells = ["", "", "base"]
        if row is not None:
            of = row.parts
            cells = [interval(of.get("shift"), of.get("low"), of.get("high"), "+.2f")]
            cells += [interval(of.get("regret"), of.get("regret, low"), of.get("regret, high"), ".3f")]
            cells += [verdict(row, last=seeds_of(grid) >= most)]
        yield [case, axis, names[scale], best, *cells, str(seeds_of(grid))]


def exponent_rows(case: str, axis: str, document: CheckDocument) -> Iterator[list[str]]:
    for row in document.measured:
        if f" over {axis}" in row.name:
            yield [case, axis, interval(row.value, row.low, row.high, "+.2f"), f"{row.expected:+.2f}"]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]) + "\n"


def tables(sizes: Sequence[Sequence[str]], exponents: Sequence[Sequence[str]], rounds: Sequence[int]) -> str:
    """Return the tables of the sizes and of the exponents in Markdown, and how seeds were added."""
    header = ["case", "axis", "size", "best lr, base value", "shift, octaves", "regret, nats", "verdict", "seeds"]
    looks = " and ".join(map(str, rounds))
    return "\n".join(
        [
            markdown(header, sizes),
            f"A size is judged after {looks} seeds, and gets more while undecided; the base has the most seeds. "
            "At the limit: undecided with all seeds, and the interval of the shift is narrower than "
            f"{SWEPT['lr'].shift_limit} octaves. "
            "Intervals are 95% at one number of seeds, not over all of them.\n",
            markdown(["case", "axis", "exponent of the best lr", "by the rule"], exponents),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/lr-transfer"))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--sizes", type=int, help="only so many sizes on each axis, besides the base")
    parser.add_argument("--most-seeds", type=int, default=ROUNDS[-1])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    several = slice(None if options.sizes is None else 1 + options.sizes)
    scales, overrides = (TINY_SCALES, TINY) if options.tiny else (SCALES, list[str]())
    rounds = [2] if options.tiny else [seeds for seeds in ROUNDS if seeds <= options.most_seeds]
    sizes, exponents = list[list[str]](), list[list[str]]()
    for name in options.cases:
        case = CASES[name]
        family = recipe_models(
            parse_recipe(RECIPE, "lr_transfer.py", [f"name={name}", *overrides, *case.overrides]), prepare
        )
        wanted = [axis for axis in case.axes if axis in options.axes]
        if not wanted:
            continue

        def progress(done: int, total: int, case: str = name) -> None:
            if done == total or done % 10 == 0:
                print(f"{case}: {done} of {total} runs", flush=True)

        every = dict.fromkeys(scale for axis in wanted for scale in scales[axis][several])  # the base is the first
        with StackedRuns(options.run, options.workers, progress) as store:
            found = measure(family, list(every), case.lr, store, rounds)
        for axis in wanted:
            losses = {scale: found[scale] for scale in scales[axis][several]}
            document = judge(family, losses)
            sizes += size_rows(name, axis, losses, document, rounds[-1])
            exponents += exponent_rows(name, axis, document)
            (options.run / f"{name}-{axis}.json").write_text(json.dumps(document.dump(), indent=2) + "\n")
            (options.run / f"{name}-{axis}.html").write_text(check_page(document))
        (options.run / "table.md").write_text(tables(sizes, exponents, rounds))
        print(tables(sizes, exponents, rounds), flush=True)


if __name__ == "__main__":
    main()
