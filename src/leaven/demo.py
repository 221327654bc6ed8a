"""``leaven demo`` shows how the best learning rate (lr) changes when a model gets wider.

The demo trains the smallest model, called the base, with each lr of a grid. Every wider model gets the same grid
twice: "copied" keeps all hyperparameters of the base, and "moved" scales them by a scaling rule. Finally, the widest
model is trained in both ways with the base's best lr and more seeds.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from leaven.data.tokens import TokenSet, prepare
from leaven.documents import sealed
from leaven.documents.runs import DemoCorpus, DemoDocument, DemoModel, DemoResult, DemoRun
from leaven.errors import InputError
from leaven.recipe.files import parse_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.storage import make_folder, require_page, require_writable, write_page, write_text
from leaven.training.device import machine
from leaven.training.run_folder import LOCK, LockedFolder
from leaven.tuning.algorithm.noise import t95
from leaven.verification.model_instance import RunScale, RunSetting
from leaven.verification.recipe_family import RecipeTrial, recipe_models
from leaven.verification.runs import LINES, RunStore
from leaven.views.demo import COMMANDS, RULES, best, curves, demo_plan
from leaven.views.folders import read_demo
from leaven.views.page import folder_page
from leaven.views.terminal.live import LiveScreen

COPIED, MOVED = RULES  # the scaling rules that copy and that move hyperparameters


@dataclass(frozen=True)
class Size:
    """The runs of a demo, for one value of ``--size``: widths, learning rates and seeds."""

    widths: tuple[int, ...]  # from the smallest (the base) to the largest
    lrs: tuple[float, ...]  # at the base
    seeds: int  # number of seeds at the smallest width, and of the final runs at the largest width

    @property
    def grid(self) -> list["DemoPoint"]:
        """The runs of the lr grid: the base with all seeds, each larger width with seed 0 and both scaling rules."""
        base, *wider = self.widths
        return [
            *(DemoPoint(MOVED, base, lr, seed) for lr in self.lrs for seed in range(self.seeds)),
            *(DemoPoint(rule, width, lr, 0) for width in wider for rule in (COPIED, MOVED) for lr in self.lrs),
        ]

    def again(self, lr: float) -> list["DemoPoint"]:
        """Return the runs with ``lr`` at the largest width, for both rules and the seeds that ``grid`` leaves out."""
        return [
            DemoPoint(rule, self.widths[-1], lr, seed) for rule in (COPIED, MOVED) for seed in range(1, self.seeds)
        ]

    @property
    def count(self) -> int:
        return len(self.grid) + len(self.again(self.lrs[0]))


@dataclass(frozen=True)
class DemoPoint:
    rule: str  # scaling rule: COPIED keeps the hyperparameters of the base width, MOVED scales them
    width: int
    lr: float  # lr at the base width
    seed: int


SIZES = {
    "full": Size((48, 96, 192, 384), (0.002, 0.004, 0.008, 0.016, 0.032), seeds=3),
    "quick": Size((48, 192), (0.004, 0.008, 0.016, 0.032), seeds=3),
}


def run_demo(
    folder: Path, size: str | None, source: str | None, workers: int, stop: Callable[[], bool] = lambda: False
) -> DemoDocument:
    """Run or resume the demo in a folder, and return its document.

    A ``size`` ("full" or "quick") or ``source`` of None is that of the resumed demo, or else "full" and the text of
    demo.toml. Raise InputError if the folder cannot be used or the source has no text, and ChecksStopped once
    ``stop`` returns true. The same call then resumes the demo.
    """
    require_writable(folder)
    require_page(folder / "report.html")  # before minutes of training
    began, before = time.monotonic(), _earlier(folder, size, source)
    base = base_recipe()
    base = base.replace({"data.source": source or (before.source if before else base.data.source)})
    with LiveScreen() as screen:
        tokens = prepare(base.data, base.model.vocab_size, progress=screen.text)
        document = before or _begin(base, size, tokens, workers, screen)
        with LockedFolder(folder, "demo folder") as locked:
            # Make the folder before any run: a demo without this folder is not resumed, because its runs are lost.
            make_folder(folder / "runs")
            _save(document, folder)
            try:
                count = SIZES[document.size].count

                def show(done: int, _: int) -> None:
                    screen.bar("runs", done, count)

                with RunStore(folder / "runs", workers, show, stop, note=screen.line) as store:
                    document = _train(folder, document, base, store)
            finally:
                if before is None or before.result is None:
                    seconds = document.seconds + time.monotonic() - began
                    document = document.model_copy(update={"seconds": round(seconds, 1)})
                locked.require()
                _save(document, folder)
            report = folder / "report.html"
            write_page(report, folder_page(folder))
    return document.model_copy(update={"report": str(report)})


def _earlier(folder: Path, size: str | None, source: str | None) -> DemoDocument | None:
    """Return the document of an earlier call, or None. Raise InputError if the folder has other files."""
    if (folder / "demo.json").exists():
        before = read_demo(folder)
        for option, given, earlier in (("size", size, before.size), ("source", source, before.source)):
            if given not in {None, earlier}:
                raise InputError(
                    f"{folder} contains a demo with --{option} {earlier}; leave out --{option} to resume it, or give "
                    "another folder with --run"
                )
        runs = folder / "runs"
        if (before.runs and not (runs / LINES).exists()) or not runs.is_dir():
            raise InputError(
                f"{folder} contains a demo, but not its runs; bring back {runs / LINES}, or start again in another "
                "folder with --run"
            )
        return before
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--run {folder} is a file; give a folder")
    # A demo that is killed before it writes demo.json leaves its lock, an empty folder and a temporary file.
    entries = list(folder.iterdir()) if folder.exists() else []
    ours = [entry for entry in entries if entry.name == LOCK or entry.name.startswith(".demo.json.")]
    ours += [entry for entry in entries if entry.name == "runs" and entry.is_dir() and not any(entry.iterdir())]
    if len(ours) < len(entries):
        raise InputError(f"{folder} is not empty and does not contain a demo; give another folder with --run")
    return None


def _begin(base: Recipe, given: str | None, tokens: TokenSet, workers: int, screen: LiveScreen) -> DemoDocument:
    """Print what the demo will train, and return the new document."""
    chosen = given or "full"
    size = SIZES[chosen]
    document = DemoDocument(
        name="leaven demo",
        size=chosen,
        source=str(base.data.source),
        tokens=base.data.tokens,
        models=[DemoModel(width=width, params=recipe_at(base, width).model.params) for width in size.widths],
        lrs=list(size.lrs),
        seeds=size.seeds,
        machine=machine(),
        corpus=DemoCorpus(
            source=str(base.data.source),
            bytes=tokens.train_bytes + tokens.validation_bytes,
            train_tokens=len(tokens.train),
            validation_tokens=len(tokens.validation),
            vocab_size=tokens.vocab_size,
        ),
        processes=workers,
    )
    for line in demo_plan(document, size.count):
        screen.line(line)
    return document


def _train(folder: Path, document: DemoDocument, base: Recipe, store: RunStore) -> DemoDocument:
    """Train the runs that have not finished, write missing recipes, and return the document with the results."""
    size = SIZES[document.size]
    document = document.model_copy(update={"runs": _runs(store, base, size.grid)})
    lr = best(curves(document)[MOVED, size.widths[0]])
    document = document.model_copy(update={"runs": _runs(store, base, size.grid + size.again(lr))})
    base = base.replace({"hyperparameters.lr": lr})
    recipes = {"base": base}
    for rule, name in ((COPIED, "copied"), (MOVED, "moved")):
        recipes[name] = recipe_at(base.replace({"scaling.rule": rule}), size.widths[-1])
    for name, recipe in recipes.items():
        if not (folder / f"{name}.toml").exists():  # the user may have edited it
            write_recipe(recipe.replace({"name": name}), folder / f"{name}.toml")
    following = [f"leaven show --rule {MOVED}", COMMANDS[0]]
    return document.model_copy(update={"result": result_of(document), "next": following})


def result_of(demo: DemoDocument) -> DemoResult:
    """Return the losses of the base and of the widest model at the lr that is best for the base."""
    base, widest = demo.models[0].width, demo.models[-1].width
    lr = best(curves(demo)[MOVED, base])
    copied, moved = (demo.losses(rule, widest)[lr] for rule in (COPIED, MOVED))
    difference, half = paired(copied, moved)
    return DemoResult(
        lr=lr,
        width=widest,
        base=demo.losses(MOVED, base)[lr],
        copied=copied,
        moved=moved,
        difference=difference,
        low=difference - half,
        high=difference + half,
    )


def _save(document: DemoDocument, folder: Path) -> None:
    write_text(folder / "demo.json", json.dumps(sealed(document.dump()), indent=2) + "\n")


def base_recipe() -> Recipe:
    return parse_recipe(files("leaven").joinpath("demo.toml").read_text(encoding="utf-8"), "demo.toml")


def recipe_at(base: Recipe, width: int) -> Recipe:
    return trial_of(base, DemoPoint(base.scaling.rule, width, base.hyperparameters.lr, 0)).recipe


def trial_of(base: Recipe, point: DemoPoint) -> RecipeTrial:
    family = recipe_models(base.replace({"scaling.rule": point.rule}), prepare)
    return family.trial(RunSetting(RunScale(point.width, base.model.n_layers), point.lr, point.seed))


def paired(first: list[float], second: list[float]) -> tuple[float, float]:
    """Return the mean of ``first`` - ``second``, and half the width of its 95% confidence interval (Student's t)."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), t95(len(differences) - 1) * spread


def _runs(store: RunStore, base: Recipe, points: list[DemoPoint]) -> list[DemoRun]:
    """Train the runs that have no result in the store yet, and return the results of all ``points``."""
    trials = {point: trial_of(base, point) for point in points}
    outcome = store.run(trials.values())
    ended = {point: outcome(trial) for point, trial in trials.items()}
    return [DemoRun(**asdict(point), loss=each.loss, seconds=round(each.seconds, 2)) for point, each in ended.items()]
