"""Fixtures for all tests: small recipes, a small corpus, and a cache of their own."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# With two pytest workers on two cores, more threads would make the tests ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe

# Containers often turn .pyc files off. Then every process that a test starts would compile leaven again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The time of an example depends on how busy the machine is, so it has no limit.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

TINY = """\
name = "tiny"            # as small as a transformer gets

[model]
n_layers = 2
d_model = 16
n_heads = 2
n_kv_heads = 1
d_head = 8
d_ff = 32
vocab_size = 320
seq_len = 32
qk_norm = true

[data]
source = "SOURCE"
tokens = 10_240

[batch]
tokens = 256             # eight sequences

[schedule]
warmup_tokens = 1_024

[hyperparameters]
lr = 0.01
init_std = 0.1

[evaluation]
tokens = 256
"""


def pytest_collection_finish() -> None:
    """Let the garbage collector look rarely, and not at the half a million objects of the imported packages."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty small files with some structure to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(80):
        lines = [f"def function_{number}_{i}(x):\n    return x * {i} + {number}\n" for i in range(20)]
        (folder / f"file{number:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEAVEN_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore the handlers of signals, which a command that was stopped leaves as they are."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:  # nohup ignores SIGHUP
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Let os.fsync return at once: a test cannot lose power. Tests of when it is called patch it themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def tiny_text(corpus: Path) -> str:
    return TINY.replace("SOURCE", f"{corpus}/*.txt")


@pytest.fixture
def tiny(tiny_text: str) -> Recipe:
    return parse_recipe(tiny_text, "tiny.toml")


@pytest.fixture(scope="session")
def scaled_run(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in bf16 with two checkpoints, at twice the width and depth of its base. Do not change it."""
    from leaven.data.tokens import prepare
    from leaven.training.trainer import train

    recipe = parse_recipe(TINY.replace("SOURCE", f"{corpus}/*.txt"), "tiny.toml").replace(
        {
            "scaling.base": {"width": 8, "depth": 1, "batch_tokens": 256, "tokens": 10_240, "d_head": 4},
            "hyperparameters.residual": 0.7,
            "stability.checkpoint_every_tokens": 5_120,
            "precision.compute": "bf16",
        }
    )
    folder = tmp_path_factory.mktemp("runs") / "scaled"
    train(recipe, prepare(recipe.data, recipe.model.vocab_size), folder)
    return folder


@pytest.fixture
def tiny_file(tiny_text: str, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(tiny_text)
    return path


def train_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train trials in this process, because starting a process takes seconds. Only one trains at a time, because the
    names of temporary files contain the process id."""
    one_at_a_time = Lock()

    class Pool(nullcontext[Any]):
        def __init__(self, workers: int, device: str | None = None) -> None: ...

        def __enter__(self) -> "Pool":
            return self

        def submit(self, function: Callable[..., Any], *arguments: object, **named: object) -> "Future[Any]":
            future: Future[Any] = Future()
            with one_at_a_time:
                future.set_result(function(*arguments, **named))
            return future

    for user in ("leaven.tuning.service.recipe_study", "leaven.verification.runs"):
        monkeypatch.setattr(f"{user}.WorkerPool", Pool)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_this_process(monkeypatch)
