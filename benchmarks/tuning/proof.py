"""Measure on a GPU whether tuning by module pays and transfers: `python -m benchmarks.tuning.proof FOLDER`.

Two methods with the same FLOPs, and several searches of each, all at once in one stack of trials:

- ``global``: all trials over the global values;
- ``per-module``: a third over the global values, then from their best the rest over the values by module, which know
  the trials of the first third (``from_study``).

Each answer is trained with fresh seeds: at the proxy, and after `leaven transfer` at 4 times the width, twice the
depth and more tokens. There the global answer has a short sweep of its own: several learning rates at several
durations, of which the best at each duration is what the answers by module are compared with. ``alone`` trains the
answers by module with one group of values back at the start, at the proxy and at the target, which says what of the
gain of each group carries over.

Every run is a line of FOLDER/runs.jsonl, and the searches are studies in FOLDER: run the command again to resume.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import queue
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from benchmarks.tuning.__main__ import PROXY, unpinned, whole
from benchmarks.tuning.__main__ import mean as mean_of

from leaven.data.tokens import TokenSet, prepare
from leaven.planning.flops import flops_per_token
from leaven.recipe.files import read_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.scaling.transfer import transfer
from leaven.storage import write_text
from leaven.training.outcome import Outcome
from leaven.training.stack import TrialStack
from leaven.tuning.point import BATCH, recipe_at
from leaven.tuning.service.recipe_study import Study
from leaven.tuning.service.search_loop import Objectives, Proposal
from leaven.tuning.space import space

SEEDS = tuple(range(1001, 1006))  # the searches' own are below
FIRST = 1 / 3  # of the trials of ``per-module`` are over the global values
WIDER, DEEPER = 4, 2
CURVE = SEEDS[:3]  # for the equal-loss speed-up
SWEPT = (2**-0.5, 1.0, 2**0.5)  # times the global answer's lr, at the target
LONGER = (1.0, 1.41, 2.0)  # times the target's tokens, for the equal-loss speed-up
WORKERS = 8  # trials at a time of each search
QUIET = 1.0  # seconds without a new trial after which a stack that is not full is trained
PARTS = ("searches", "proxy", "target", "alone")
GROUPS = {
    "lr by module": ("hyperparameters.modules.*.lr",),
    "lr over depth": ("hyperparameters.depth.lr*",),
    "init_std by module": ("hyperparameters.modules.*.init_std",),
    "residual by module": ("hyperparameters.modules.*.residual",),
    "weight_decay": ("hyperparameters.weight_decay",),
    "betas and eps": ("hyperparameters.beta1", "hyperparameters.beta2", "hyperparameters.eps"),
}


# ---- the searches: studies in processes of their own, whose trials come here


class RemoteStudy(Study):
    """A study whose trials are trained by another process."""

    server: Connection

    @contextmanager
    def _trainer(self, devices: Sequence[str | None]) -> Iterator[Objectives]:
        waiting: dict[int, queue.Queue[float]] = {}
        sending = threading.Lock()

        def receive() -> None:
            while (answer := self.server.recv()) is not None:
                waiting.pop(answer[0]).put(answer[1])

        def train(proposal: Proposal) -> Outcome:
            try:
                recipe = self.space.recipe_at(proposal, self.space.seed + proposal.seed)
            except ValueError:  # not a recipe
                return Outcome(math.inf)
            waiting[proposal.number] = answer = queue.Queue()
            with sending:
                self.server.send((proposal.number, recipe.model_dump(mode="json")))
            tokens, began = recipe.data.tokens, time.monotonic()
            loss = answer.get()
            seconds = time.monotonic() - began
            return Outcome(loss, tokens, tokens * flops_per_token(recipe.model), seconds)

        receiver = threading.Thread(target=receive, daemon=True)
        receiver.start()
        yield lambda proposals: [train(proposal) for proposal in proposals]
        self.server.send(None)
        receiver.join()


def search(server: Connection, folder: Path, start: Recipe, *, trials: int, arm: str) -> None:
    """One process: the searches of one arm, one after the other."""
    torch.set_num_threads(1)
    seed = start.data.seed
    if arm == "global":
        study(server, folder / f"global-{seed}", start, "global", trials=trials)
    else:
        first = folder / f"first-{seed}"
        some = study(server, first, start, "global", trials=trials * FIRST)
        study(
            server,
            folder / f"per-module-{seed}",
            unpinned(some),
            "per-module",
            trials=trials * (1 - FIRST),
            earlier=first,
        )
    server.send("done")


def study(
    server: Connection, folder: Path, recipe: Recipe, which: str, *, trials: float, earlier: Path | None = None
) -> Recipe:
    if not (folder / "best.toml").exists():
        tokens = prepare(recipe.data, recipe.model.vocab_size)
        flops = round(trials) * recipe.data.tokens * flops_per_token(recipe.model)
        values = space(recipe, which).without(BATCH, "of equal FLOPs the smallest batch makes most")
        with RemoteStudy(folder, recipe, values, "trust-region", tokens, from_study=earlier) as searcher:
            searcher.server = server
            state = searcher.run(None, WORKERS, flops=flops, stop_at_noise=False)
        assert state.best is not None, f"every trial of {folder.name} diverged"
        ends = ", ".join(each.path for each in state.coordinates if each.at_end) or "none"
        print(
            f"{folder.name}: {len(state.dimensions)} values, {len(state.trials)} trials, best {state.best.loss:.4f} "
            f"({state.best.interval[0]:.4f} to {state.best.interval[1]:.4f}), noise "
            f"{state.noise_floor or math.nan:.4f}, at an "
            f"end of the box: {ends}",
            flush=True,
        )
    return read_recipe(folder / "best.toml")


def serve(folder: Path, tokens: TokenSet, proxy: Recipe, asked: argparse.Namespace) -> None:
    """Start the searches and train what they propose, until all are done."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for seed, arm in itertools.product(asked.searches, ("global", "per-module")):
        here, there = context.Pipe()
        start = proxy.replace({"data.seed": seed})
        process = context.Process(
            target=search, args=(there, folder, start), kwargs={"trials": asked.trials, "arm": arm}
        )
        process.start()
        there.close()  # so that the death of a process ends its pipe
        ends.append(here)
        processes.append(process)
    stack: TrialStack | None = None
    pending: list[tuple[Connection, int, Recipe]] = []
    waited, full, rounds, seconds, trained = 0.0, WORKERS * len(ends), 0, 0.0, 0
    while ends or pending:
        began = time.monotonic()
        # Until the first trials the processes import and tokenise.
        ready = wait(ends, QUIET if pending else None) if ends and len(pending) < full else []
        waited += time.monotonic() - began
        for end in ready:
            assert isinstance(end, Connection)
            try:
                message = end.recv()
            except EOFError:
                message = "done"
            if message == "done":
                ends.remove(end)
            elif message is None:
                end.send(None)  # a study has ended: its receiver, too
            else:
                pending.append((end, message[0], Recipe.model_validate(message[1])))
        if pending and (not ready or len(pending) >= full):
            some, pending = pending[:full], pending[full:]
            stack = stack or TrialStack(some[0][2], full, tokens, asked.device)
            for (end, number, _), loss in zip(some, stack.train([recipe for *_, recipe in some]), strict=True):
                end.send((number, loss if math.isfinite(loss) else math.inf))
            rounds += 1
            seconds += stack.progress.seconds
            trained += len(some) * stack.progress.tokens
            if rounds % 5 == 1:
                print(
                    f"  round {rounds}: {len(some)} of {full} trials; {trained / seconds / 1e6:.1f} M tokens/s in "
                    f"{seconds:.0f} s, {waited:.0f} s waited",
                    flush=True,
                )
    for process in processes:
        process.join()
        assert process.exitcode == 0


# ---- the answers, trained with fresh seeds


@dataclass(frozen=True)
class Run:
    scale: str  # proxy | target
    arm: str  # start | global | per-module | the name of a group that is back at the start
    search: int  # seed of the search
    seed: int
    longer: float = 1.0
    times_lr: float = 1.0


def answers(folder: Path, search: int) -> dict[str, Recipe]:
    """The answers of the searches of one seed, their common start, and the answer by module without each group."""
    start = read_recipe(folder / f"global-{search}" / "centre.toml")
    by_module = folder / f"per-module-{search}"
    centre, octaves = (
        read_recipe(by_module / "centre.toml"),
        json.loads((by_module / "study.json").read_text())["octaves"],
    )
    found = {
        "start": start,
        "global": read_recipe(folder / f"global-{search}" / "best.toml"),
        "per-module": read_recipe(by_module / "best.toml"),
    }
    for group, patterns in GROUPS.items():
        moved = {path for path in octaves if any(fnmatchcase(path, pattern) for pattern in patterns)}
        if moved:
            there = recipe_at(centre, {path: 0.0 if path in moved else by for path, by in octaves.items()})
            found[group] = there.replace({"scaling.base": centre.base.model_dump()})
    return found


def recipe_of(run: Run, answer: Recipe, more_tokens: float) -> Recipe:
    tokens = whole(answer, run.longer * (more_tokens if run.scale == "target" else 1))
    model, larger = answer.model, run.scale == "target"
    size = {"width": WIDER * model.d_model, "depth": DEEPER * model.n_layers} if larger else {}
    recipe = transfer(answer, tokens=tokens, **size)
    return recipe.replace({"data.seed": run.seed, "hyperparameters.lr": recipe.hyperparameters.lr * run.times_lr})


def runs_of(part: str, searches: Sequence[int]) -> list[Run]:
    """The runs of a part, those that decide first; all runs of a stack have one duration."""
    found = []
    for search, seed in itertools.product(searches, SEEDS):
        if part == "alone":
            found += [Run(s, arm, search, seed) for s in ("proxy", "target") for arm in GROUPS if seed in SEEDS[:2]]
            continue
        arms = ("start", "global", "per-module") if part == "proxy" else ("global", "per-module")
        found += [Run(part, arm, search, seed) for arm in arms]
        if seed in CURVE:  # at the proxy the search has found the best lr already
            factors = SWEPT if part == "target" else (1.0,)
            curve = [Run(part, "global", search, seed, longer, f) for longer in LONGER for f in factors]
            found += [run for run in curve if run not in found]
    return sorted(found, key=lambda run: (run.scale, run.longer))


def rows(folder: Path) -> dict[Run, float]:
    path = folder / "runs.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return {Run(**line["run"]): math.inf if line["loss"] is None else line["loss"] for line in lines}


def train(folder: Path, part: str, tokens: TokenSet, asked: argparse.Namespace) -> None:
    """Train the runs of a part that are missing, a stack at a time."""
    done, chosen = rows(folder), {search: answers(folder, search) for search in asked.searches}
    missing = [run for run in runs_of(part, asked.searches) if run not in done and run.arm in chosen[run.search]]
    for (scale, longer), some in itertools.groupby(missing, key=lambda run: (run.scale, run.longer)):
        group = list(some)
        size = -(-len(group) // -(-len(group) // asked.stack))  # stacks of equal size
        recipes = [recipe_of(run, chosen[run.search][run.arm], asked.more_tokens) for run in group]
        stack = TrialStack(recipes[0], size, tokens, asked.device)
        seconds = 0.0
        for first in range(0, len(group), size):
            losses = stack.train(recipes[first : first + size])
            seconds += stack.progress.seconds
            with (folder / "runs.jsonl").open("a") as file:
                for run, loss in zip(group[first : first + size], losses, strict=True):
                    known = loss if math.isfinite(loss) else None
                    file.write(
                        json.dumps({"run": asdict(run), "loss": known, "tokens": recipes[0].data.tokens}) + "\n"
                    )
        print(
            f"{part}: {scale} x{longer:g}, {len(group)} runs of {recipes[0].data.tokens:,} tokens in stacks of "
            f"{size}: {len(group) * recipes[0].data.tokens / seconds / 1e6:.2f} M tokens/s, {seconds:.0f} s",
            flush=True,
        )
        del stack


# ---- the table


def table(found: dict[Run, float], searches: Sequence[int]) -> list[str]:
    """Each search is one observation: its mean over the seeds of the training."""

    def mean(scale: str, arm: str, search: int, *how: float, seeds: Sequence[int] = SEEDS) -> float | None:
        losses = [loss for seed in seeds if (loss := found.get(Run(scale, arm, search, seed, *how))) is not None]
        return statistics.fmean(losses) if len(losses) == len(seeds) else None

    lines = ["| scale | arm | loss | against global | equal-loss speed-up by search |", "|---|---|---|---|---|"]
    for scale in ("proxy", "target"):
        for arm in ("start", "global", "per-module"):
            losses = {s: loss for s in searches if (loss := mean(scale, arm, s)) is not None}
            if not losses:
                continue
            base = {s: mean(scale, "global", s) for s in losses}
            paired = [loss - other for s, loss in losses.items() if (other := base[s]) is not None]
            ratios = []
            for s in losses if arm == "per-module" else ():
                # The best lr at each duration, as somebody would have found it who tuned there.
                curve = [
                    (longer, min(known))
                    for longer in LONGER
                    if (
                        known := [
                            loss
                            for factor in SWEPT
                            if (loss := mean(scale, "global", s, longer, factor, seeds=CURVE)) is not None
                        ]
                    )
                ]
                mine = mean(scale, arm, s, seeds=CURVE)
                assert mine is not None
                ratios.append(speed_up(curve, mine))
            against = "" if arm == "global" else mean_of(paired, "+.4f")
            lines.append(
                f"| {scale} | {arm} | {mean_of(list(losses.values()), '.4f')} | {against} | {', '.join(ratios)} |"
            )
    lines += ["", "| group back at the start | at the proxy | at the target |", "|---|---|---|"]
    for group in GROUPS:
        cells = []
        for scale in ("proxy", "target"):
            costs = []
            for s in searches:
                seeds = SEEDS[:2]
                pairs = [
                    (found.get(Run(scale, group, s, x)), found.get(Run(scale, "per-module", s, x))) for x in seeds
                ]
                known = [a - b for a, b in pairs if a is not None and b is not None]
                costs += [statistics.fmean(known)] if known else []
            cells.append(f"{mean_of(costs, '+.4f')} ({', '.join(f'{cost:+.3f}' for cost in costs)})" if costs else "")
        lines.append(f"| {group} | {cells[0]} | {cells[1]} |")
    return lines


def speed_up(curve: Sequence[tuple[float, float]], loss: float) -> str:
    """How many times the tokens the global answer needs for a loss, interpolated in log2 of the tokens."""
    if len(curve) < 2:
        return ""
    for (a, at_a), (b, at_b) in itertools.pairwise(curve):
        if at_b <= loss or (b == curve[0][0]):
            share = (at_a - loss) / (at_a - at_b) if at_a > at_b else 0.0
            return f"{2 ** (math.log2(a) + share * math.log2(b / a)):.2f}"
    return f"> {curve[-1][0]:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", default="python-stdlib", help="[data] source")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trials", type=int, default=288, help="of each search, in FLOPs of full trials")
    parser.add_argument("--searches", type=int, default=3)
    parser.add_argument("--stack", type=int, default=48, help="runs in a stack at most, for the answers")
    parser.add_argument("--more-tokens", type=float, default=4.0, help="of the target, times those of the proxy")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--set", nargs="*", default=[], help="KEY=JSON of the proxy's recipe")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    asked.searches = range(asked.searches)
    start = read_recipe(PROXY).replace({"data.source": asked.text})
    start = start.replace({key: json.loads(value) for key, _, value in (s.partition("=") for s in asked.set)})
    write_recipe(start, asked.folder / "proxy.toml")
    began = time.monotonic()
    tokens = prepare(start.data, start.model.vocab_size)
    print(f"{len(tokens.train):,} tokens of text in {time.monotonic() - began:.0f} s", flush=True)
    for part in asked.parts.split(","):
        began = time.monotonic()
        if part == "searches":
            serve(asked.folder, tokens, start, asked)
        else:
            train(asked.folder, part, tokens, asked)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
        lines = table(rows(asked.folder), asked.searches)
        write_text(asked.folder / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
