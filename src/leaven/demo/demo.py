"""``leaven demo``: tune, transfer, train, report. Each part saves its result, so a killed demo can resume."""

import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from leaven.catalogue.starter.starter import untuned
from leaven.data.tokens import TokenSet, prepare
from leaven.documents.runs import DemoDocument
from leaven.planning.flops import flops_per_token
from leaven.recipe.errors import InputError
from leaven.recipe.files import parse_recipe, read_recipe, read_text, write_recipe, write_text
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity, format_seconds
from leaven.scaling.transfer import transfer
from leaven.training.device import machine
from leaven.training.engine import Training
from leaven.training.run_folder import LOCK, locked_folder
from leaven.training.worker import Pool, run_in
from leaven.tuning.service.study import Study
from leaven.tuning.space import space
from leaven.views.page import folder_page
from leaven.views.terminal.console import errors
from leaven.views.terminal.live import LiveScreen
from leaven.views.terminal.study import TuneScreen
from leaven.views.terminal.training import RunsScreen

PARTS = ("text", "tune", "transfer", "train", "report")


@dataclass(frozen=True)
class Size:
    """The size of a demo."""

    trials: int
    wider: int = 2  # width of the target / width of the proxy
    deeper: int = 2
    longer: int = 4  # in tokens
    changes: dict[str, Any] = field(default_factory=dict)  # to the proxy recipe, by path


SIZES = {
    # About ten minutes on two cores.
    "full": Size(trials=32),
    # One minute, for tests: the numbers mean nothing.
    "tiny": Size(
        trials=6,
        changes={
            "model": {
                "n_layers": 1,
                "d_model": 16,
                "n_heads": 2,
                "n_kv_heads": 2,
                "d_head": 8,
                "d_ff": 48,
                "vocab_size": 320,
                "seq_len": 32,
                "qk_norm": True,
            },
            "batch": {
                "tokens": 256,
                "ramp": {"start_tokens": 128, "increment_tokens": 64, "over_tokens": 1_024},
            },
            "data.tokens": 8_192,
            "schedule.warmup_tokens": 1_024,
            "evaluation.tokens": 2_048,
        },
    ),
}

SEARCHED = (
    "hyperparameters.lr",
    "hyperparameters.init_std",
    "hyperparameters.weight_decay",
    "hyperparameters.modules.embedding.lr",
    "hyperparameters.modules.unembedding.lr",
)


ARMS = ("transferred", "copied", "untuned")


@dataclass(frozen=True)
class Arm:
    """One of the compared runs. All have the same model, tokens, batch and seed; they differ in the other values."""

    key: str  # name of the run folder
    title: str
    why: str  # where its hyperparameters come from
    recipe: Recipe


def arms(target: Recipe) -> tuple[Arm, ...]:
    """Return the compared runs: tuned values moved by the rule, tuned values copied, untuned values of leaven new."""
    return (
        Arm(
            "transferred",
            "transferred (complete-d-p)",
            "the tuned values, moved over width, depth and duration by the rule",
            target.replace({"name": "transferred"}),
        ),
        Arm(
            "copied",
            "copied unchanged (standard)",
            "the tuned values as they are, in the standard parametrisation",
            target.replace({"name": "copied", "scaling.rule": "standard"}),
        ),
        Arm(
            "untuned",
            "untuned (leaven new)",
            "lr, init, decay, betas, eps, clip and schedule of leaven new for this size, batch and length: "
            "from published runs and laws, moved to this scale",
            untuned(target).replace({"name": "untuned"}),
        ),
    )


class DemoStopped(Exception):
    """The demo was asked to stop. Finished parts are on disk, and the same call resumes."""


@dataclass
class Demo:
    """A demo in a folder: demo.json lists the finished parts, the folders beside it are their results."""

    folder: Path
    size: str  # a key of `SIZES`
    source: str  # the text, as `data.source` in a recipe
    workers: int  # processes
    stop: Callable[[], bool]  # true once the user asked to stop
    state: dict[str, Any] = field(default_factory=dict)  # the content of demo.json
    _locked: bool = False  # whether this process holds the lock of the folder and may write

    def run(self) -> DemoDocument:
        """Run all parts in order and return the result.

        Raises:
            InputError: if the folder holds something else, or the source has no text.
            DemoStopped: if ``stop`` became true.
        """
        self._open()
        tokens = self._text()  # first, so that a wrong source leaves no folder behind
        with locked_folder(self.folder, "demo folder"):
            self._locked = True
            self._save()  # first, so that a demo killed during its study is recognised
            best = self._tune(tokens)
            target = self._transfer(best)
            self._train(target)
            return self._document(self._report(), best, target)

    @property
    def proxy(self) -> Recipe:
        text = files("leaven.demo").joinpath("proxy.toml").read_text(encoding="utf-8")
        recipe = parse_recipe(text, "proxy.toml")
        return recipe.replace(SIZES[self.size].changes | {"data.source": self.source})

    def _open(self) -> None:
        options = {"size": self.size, "source": self.source}
        if self._file.exists():
            self.state = json.loads(read_text(self._file))
            if {key: self.state.get(key) for key in options} != options:
                raise InputError(
                    f"{self.folder} holds a demo of size {self.state.get('size')} on {self.state.get('source')}; "
                    "use another --run"
                )
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"--run {self.folder} is a file; give a folder")
        if self.folder.exists() and any(not _is_left_over(entry.name) for entry in self.folder.iterdir()):
            raise InputError(f"{self.folder} is not empty and does not hold a demo; use another --run")
        self.state = {"name": "leaven demo", **options, "parts": [], "machine": machine()}

    @property
    def _file(self) -> Path:
        return self.folder / "demo.json"

    def _save(self) -> None:
        write_text(self._file, json.dumps(self.state, indent=2) + "\n")

    @contextmanager
    def _part(self, name: str, detail: str) -> Iterator[None]:
        """Announce a part and add its time to demo.json, also if it is interrupted."""
        left = f" · about {format_seconds(self._seconds_left(name))} left in all" if name in {"tune", "train"} else ""
        errors.print(f"{PARTS.index(name) + 1} of {len(PARTS)}  {name}: {detail}{left}")
        began = time.monotonic()
        try:
            yield
        finally:
            spent = self._seconds | {name: self._seconds.get(name, 0.0) + time.monotonic() - began}
            self.state["parts"] = [{"name": key, "seconds": round(value, 2)} for key, value in spent.items()]
            if self._locked:
                self._save()
        if self.stop():
            raise DemoStopped

    @property
    def _seconds(self) -> dict[str, float]:
        return {part["name"]: part["seconds"] for part in self.state["parts"]}

    def _seconds_left(self, part: str) -> float:
        """Estimate the time that tuning and training still take, from the proxy's speed on one thread."""
        proxy, size = self.proxy, SIZES[self.size]
        wider = proxy.model.scaled(proxy.model.d_model * size.wider, proxy.model.n_layers * size.deeper)
        trial = proxy.data.tokens / float(self.state["proxy_tokens_per_second"])
        arm = trial * size.longer * flops_per_token(wider) / flops_per_token(proxy.model)
        arms_left = len(ARMS) - sum(arm["loss"] is not None for arm in self.state.get("arms", []))
        trials = size.trials * trial / self.workers if part == "tune" else 0.0
        return trials + math.ceil(arms_left / self.workers) * arm

    def _text(self) -> TokenSet:
        data, vocab_size = self.proxy.data, self.proxy.model.vocab_size
        with (
            self._part("text", f"{data.source}, byte-level BPE of {vocab_size:,} tokens"),
            LiveScreen() as screen,
        ):
            tokens = prepare(data, vocab_size, progress=screen.text)
            self.state["proxy_tokens_per_second"] = measure_speed(self.proxy, tokens)
        self.state["corpus"] = {
            "source": data.source,
            "bytes": tokens.train_bytes + tokens.validation_bytes,
            "train_tokens": len(tokens.train),
            "validation_tokens": len(tokens.validation),
            "vocab_size": tokens.vocab_size,
        }
        return tokens

    def _tune(self, tokens: TokenSet) -> Recipe:
        proxy, trials = self.proxy, SIZES[self.size].trials
        detail = (
            f"{trials} trials of {format_quantity(proxy.model.params_non_embedding)} parameters without embeddings, "
            f"{format_quantity(proxy.data.tokens)} tokens, {self.workers} workers"
        )
        study = Study(self.folder / "study", proxy, space(proxy, ",".join(SEARCHED)), "trust-region", tokens)
        with self._part("tune", detail), study, TuneScreen(study.state(), trials, self.workers) as screen:
            state = study.run(trials, self.workers, screen=screen, stop=self.stop)
        if state.best is None:
            raise InputError("every trial of the demo diverged; there is nothing to transfer")
        self.state["proxy"] = {"study": "study"}
        return read_recipe(self.folder / "study" / "best.toml")

    def _transfer(self, best: Recipe) -> Recipe:
        size = SIZES[self.size]
        target = transfer(
            best,
            width=best.model.d_model * size.wider,
            depth=best.model.n_layers * size.deeper,
            tokens=best.data.tokens * size.longer,
            name="target",
        )
        detail = (
            f"width x{size.wider}, depth x{size.deeper}, tokens x{size.longer}: "
            f"{format_quantity(target.model.params_non_embedding)} parameters without embeddings"
        )
        with self._part("transfer", detail):
            write_recipe(target, self.folder / "target.toml")
        self.state["target"] = "target.toml"
        return target

    def _train(self, target: Recipe) -> None:
        compared = arms(target)
        folders = {arm.key: self.folder / "runs" / arm.key for arm in compared}
        with self._part("train", f"{len(compared)} runs of {format_quantity(target.data.tokens)} tokens"):
            for arm in compared:
                errors.print(f"        {arm.key}: {arm.why}")
            with Pool(min(self.workers, len(compared))) as pool, RunsScreen(folders, target.data.tokens) as screen:
                pending = {pool.submit(run_in, folders[arm.key], arm.recipe): arm for arm in compared}
                while pending and not self.stop():
                    for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                        self._record(pending.pop(future), self._result(future))
                    screen.look()

    def _result(self, future: "Future[float | None]") -> float | None:
        try:
            return future.result()
        except BrokenProcessPool:
            raise InputError(
                "a training process died (out of memory?); run the same command again to resume from its checkpoint"
            ) from None

    def _record(self, arm: Arm, loss: float | None) -> None:
        done = {"key": arm.key, "title": arm.title, "run": f"runs/{arm.key}", "loss": loss, "why": arm.why}
        known = {other["key"]: other for other in self.state.get("arms", [])} | {arm.key: done}
        self.state["arms"] = [known[key] for key in ARMS if key in known]
        self._save()

    def _report(self) -> Path:
        self.state["verdict"] = verdict(self.state["arms"])
        self._save()
        with self._part("report", "one self-contained page"):
            path = self.folder / "report.html"
            write_text(path, folder_page(self.folder))
        write_text(path, folder_page(self.folder))  # again, to include its own time
        return path

    def _document(self, report: Path, small: Recipe, large: Recipe) -> DemoDocument:
        sizes = ((recipe.model, recipe.batch.tokens, recipe.data.tokens) for recipe in (small, large))
        before, after = ((m.params, m.d_model, m.n_layers, batch, tokens) for m, batch, tokens in sizes)
        names = ("parameters", "width", "depth", "batch", "tokens")
        return DemoDocument(
            report=str(report),
            verdict=self.state["verdict"],
            arms=self.state["arms"],
            parts=self.state["parts"],
            text=self.state["corpus"],
            moved=dict(zip(names, zip(before, after, strict=True), strict=True)),
        )


def _is_left_over(name: str) -> bool:
    """Return whether a file was left by a demo that was killed before it had written demo.json."""
    return name == LOCK or name.startswith(".demo.json.")


def measure_speed(recipe: Recipe, tokens: TokenSet) -> float:
    """Return tokens per second of a recipe on one thread: the median over nine steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    training = Training(recipe, tokens)
    speeds = sorted(training.step().tokens_per_second for _ in range(9))
    torch.set_num_threads(before)
    return speeds[len(speeds) // 2]


def verdict(measured: list[dict[str, Any]]) -> str:
    """One sentence that compares the transferred run with the others. Each has one seed, so noise is not included."""
    first, *others = measured
    if first["loss"] is None:
        return "The transferred run diverged."
    compared = []
    for other in others:
        if other["loss"] is None:
            compared.append(f"{other['title']} diverged")
        else:
            gap = other["loss"] - first["loss"]
            compared.append(f"{abs(gap):.3f} {'lower' if gap > 0 else 'HIGHER'} than {other['title']}")
    return f"The transferred run ends at {first['loss']:.3f} nats per token: {', '.join(compared)} (one seed each)."
