"""``leaven demo`` measures the loss over the learning rate at several widths.

The demo trains a grid of learning rates at the base width. It trains the same grid twice at every wider width: once
with the recipe's values copied unchanged (rule ``standard``), and once with the values moved by the scaling rule
``complete-d-p``. Then it takes the learning rate with the lowest mean loss at the base width, and trains it at the
widest width with more seeds, both copied and moved. The losses depend only on the recipe and the seeds. They do not
depend on the machine's speed or on the order in which runs end.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from leaven.data.tokens import TokenSet, prepare
from leaven.documents.runs import DemoCorpus, DemoDocument, DemoModel, DemoResult, DemoRun
from leaven.recipe.errors import InputError
from leaven.recipe.files import parse_recipe, write_recipe, write_text
from leaven.recipe.recipe import Recipe
from leaven.training.device import machine
from leaven.training.engine import Training
from leaven.training.run_folder import LOCK, locked_folder
from leaven.tuning.algorithm.noise import t95
from leaven.verification.model_instance import RunScale, RunSetting
from leaven.verification.recipe_family import RecipeTrial, recipe_models
from leaven.verification.runs import ChecksStopped, RunStore
from leaven.views.folders import read_demo
from leaven.views.page import folder_page
from leaven.views.terminal.demo import DemoScreen

COPIED, MOVED = "standard", "complete-d-p"  # rules
START_SECONDS = 8.0  # to start the processes and write the page
MOST_SECONDS = 600.0  # above this estimate the size is quick, unless one is given


@dataclass(frozen=True)
class Size:
    """A preset of the demo, such as ``quick``. It sets which widths, learning rates and seeds are trained."""

    widths: tuple[int, ...]  # the base first
    lrs: tuple[float, ...]
    seeds: int

    @property
    def grid(self) -> list["DemoPoint"]:
        """Return the runs of the grid.

        The base width runs every lr with all seeds, because the mean over these seeds chooses the best lr. The wider
        widths run every lr with one seed.
        """
        base, *wider = self.widths
        return [
            *(DemoPoint(MOVED, base, lr, seed) for lr in self.lrs for seed in range(self.seeds)),
            *(DemoPoint(rule, width, lr, 0) for width in wider for rule in (COPIED, MOVED) for lr in self.lrs),
        ]

    def again(self, lr: float) -> list["DemoPoint"]:
        """Return the runs at the widest width that train ``lr`` with all seeds except seed 0, both copied and
        moved."""
        return [
            DemoPoint(rule, self.widths[-1], lr, seed) for rule in (COPIED, MOVED) for seed in range(1, self.seeds)
        ]


@dataclass(frozen=True)
class DemoPoint:
    """One training run of a demo."""

    rule: str
    width: int
    lr: float  # base value
    seed: int


SIZES = {
    "full": Size((48, 96, 192, 384), (0.002, 0.004, 0.008, 0.016, 0.032), seeds=3),
    "quick": Size((48, 192), (0.004, 0.008, 0.016, 0.032), seeds=3),
}


class DemoStopped(Exception):
    """The error raised if the user stopped the demo. Finished runs are saved, and the same call resumes the demo."""


@dataclass
class Demo:
    """A demo and its folder. The folder has the demo's document in demo.json and the finished runs in runs/."""

    folder: Path
    size: str | None  # a key of `SIZES`; None: as in an earlier call, or what this machine can do
    source: str | None  # the text, as ``data.source`` in a recipe; None: as in an earlier call, or the recipe's
    workers: int  # processes
    stop: Callable[[], bool]  # true once the user asked to stop

    def run(self) -> DemoDocument:
        """Run or resume the demo, and return its document.

        Raises:
            InputError: if the folder contains something else or is in use, or the source has no text.
            DemoStopped: if ``stop`` returned true.
        """
        began, before = time.monotonic(), self._before()
        source = self.source or (before.source if before else None)
        base = base_recipe() if source is None else base_recipe().replace({"data.source": source})
        with DemoScreen() as screen, on_the_cpu():
            tokens = prepare(base.data, base.model.vocab_size, progress=screen.text)
            document = before or self._begin(base, tokens, screen)
            size = SIZES[document.size]
            spent = document.seconds
            with locked_folder(self.folder, "demo folder"):
                self._save(document)  # first, so that a demo killed in its first run is recognised
                try:
                    document = self._train(document, base, size, screen)
                except ChecksStopped:
                    raise DemoStopped from None
                finally:
                    if before is None or before.result is None:
                        elapsed = spent + time.monotonic() - began
                        document = document.model_copy(update={"seconds": round(elapsed, 1)})
                    self._save(document)
                report = self.folder / "report.html"
                write_text(report, folder_page(self.folder))
        return document.model_copy(update={"report": str(report)})

    def _before(self) -> DemoDocument | None:
        """Return the document that an earlier call wrote into this folder, or None if there is none.

        Raises:
            InputError: if the folder contains something else, or a demo with other options.
        """
        if (self.folder / "demo.json").exists():
            before = read_demo(self.folder)
            for option, mine, theirs in (("size", self.size, before.size), ("source", self.source, before.source)):
                if mine not in {None, theirs}:
                    raise InputError(f"{self.folder} contains a demo with {option} {theirs}; use another --run")
            return before
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"--run {self.folder} is a file; give a folder")
        if self.folder.exists() and any(not _is_left_over(entry.name) for entry in self.folder.iterdir()):
            raise InputError(f"{self.folder} is not empty and does not contain a demo; use another --run")
        return None

    def _begin(self, base: Recipe, tokens: TokenSet, screen: DemoScreen) -> DemoDocument:
        """Choose the size. Announce what the demo will train, and how long this takes on this machine."""
        seconds = {name: self._seconds(size, base, tokens) for name, size in SIZES.items()}
        chosen = self.size or ("full" if seconds["full"] <= MOST_SECONDS else "quick")
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
            processes=self.workers,
        )
        screen.announce(document, _count(size), seconds, MOST_SECONDS if self.size is None else None)
        return document

    def _seconds(self, size: Size, base: Recipe, tokens: TokenSet) -> float:
        """Estimate how many seconds a size takes. To do so, train a few steps at each width and measure the speed."""
        points = size.grid + size.again(size.lrs[0])
        each = {width: run_seconds(recipe_at(base, width), tokens) for width in size.widths}
        return START_SECONDS + sum(each[point.width] for point in points) / self.workers

    def _save(self, document: DemoDocument) -> None:
        write_text(self.folder / "demo.json", json.dumps(document.dump(), indent=2) + "\n")

    def _train(self, document: DemoDocument, base: Recipe, size: Size, screen: DemoScreen) -> DemoDocument:
        """Train the runs that have not finished yet. Return the document with all runs and the result."""
        done, total = 0, _count(size)

        def progress(now: int, _: int) -> None:
            screen.runs(done + now, total)

        with RunStore(self.folder / "runs", self.workers, progress, self.stop) as store:
            grid = _train(store, base, size.grid)
            done = len(grid)
            at_base = _losses(grid, size.widths[0])
            lr = min(at_base, key=lambda value: statistics.fmean(at_base[value]))
            again = _train(store, base, size.again(lr))
        runs = [*grid, *again]
        copied, moved = (_losses(runs, size.widths[-1], rule)[lr] for rule in (COPIED, MOVED))
        for rule, name in ((COPIED, "copied"), (MOVED, "moved")):
            wide = recipe_at(base.replace({"hyperparameters.lr": lr, "scaling.rule": rule}), size.widths[-1])
            write_recipe(wide.replace({"name": name}), self.folder / f"{name}.toml")
        write_recipe(base.replace({"hyperparameters.lr": lr, "name": "base"}), self.folder / "base.toml")
        difference, half = paired(copied, moved)
        result = DemoResult(
            lr=lr,
            width=size.widths[-1],
            base=at_base[lr],
            copied=copied,
            moved=moved,
            difference=difference,
            low=difference - half,
            high=difference + half,
        )
        return document.model_copy(update={"runs": runs, "result": result, "next": _next(self.folder)})


def base_recipe() -> Recipe:
    """Return the recipe of the base width."""
    return parse_recipe(files("leaven.demo").joinpath("base.toml").read_text(encoding="utf-8"), "base.toml")


def recipe_at(base: Recipe, width: int) -> Recipe:
    """Return the recipe transferred to a width by the scaling rule that it names."""
    return trial_of(base, DemoPoint(base.scaling.rule, width, base.hyperparameters.lr, 0)).recipe


def trial_of(base: Recipe, point: DemoPoint) -> RecipeTrial:
    """Return the training run of a point."""
    family = recipe_models(base.replace({"scaling.rule": point.rule}), prepare)
    return family.trial(RunSetting(RunScale(point.width, base.model.n_layers), point.lr, point.seed))


def run_seconds(recipe: Recipe, tokens: TokenSet) -> float:
    """Estimate how many seconds a run takes in a worker process.

    A worker has one thread, so the speed of a few steps is measured with one thread. A validation token is assumed to
    take a third of the time of a training token.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        training = Training(recipe, tokens)
        speeds = sorted(training.step().tokens_per_second for _ in range(4))
    finally:
        torch.set_num_threads(threads)
    return (recipe.data.tokens + recipe.evaluation.tokens / 3) / speeds[2]


def paired(first: list[float], second: list[float]) -> tuple[float, float]:
    """Compare two lists of losses seed by seed.

    Return the mean of ``first`` - ``second``, and half the width of its 95% interval (Student's t).
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), t95(len(differences) - 1) * spread


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Train on the CPU inside this context, so that the losses are the same on every machine.

    If the user has chosen a device, use that device instead.
    """
    chosen = "LEAVEN_DEVICE" in os.environ
    os.environ.setdefault("LEAVEN_DEVICE", "cpu")  # for the processes of the runs, too
    try:
        yield
    finally:
        if not chosen:
            del os.environ["LEAVEN_DEVICE"]


def _train(store: RunStore, base: Recipe, points: list[DemoPoint]) -> list[DemoRun]:
    trials = {point: trial_of(base, point) for point in points}
    outcome = store.run(trials.values())
    ended = {point: outcome(trial) for point, trial in trials.items()}
    return [
        DemoRun(rule=p.rule, width=p.width, lr=p.lr, seed=p.seed, loss=o.loss, seconds=round(o.seconds, 2))
        for p, o in ended.items()
    ]


def _losses(runs: list[DemoRun], width: int, rule: str = MOVED) -> dict[float, list[float]]:
    """Return a mapping from each lr to its losses at this width. The losses of one lr are in the order of their
    seeds."""
    found: dict[float, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        if (run.width, run.rule) == (width, rule):
            found.setdefault(run.lr, []).append(run.loss)
    return found


def _count(size: Size) -> int:
    return len(size.grid) + len(size.again(size.lrs[0]))


def _next(folder: Path) -> list[str]:
    return [
        f"leaven show {folder / 'moved.toml'}",
        "leaven new mine.toml --params 1B --tokens 20B",
    ]


def _is_left_over(name: str) -> bool:
    """Return whether a file was left over by a demo that was killed before it wrote demo.json."""
    return name == LOCK or name.startswith(".demo.json.")
