"""Shared by the tests of training: one thread, the tokens of the tiny recipe, and made-up steps."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import TINY

from leaven.data.tokens import TokenSet, prepare
from leaven.model.transformer import Stage
from leaven.recipe.files import parse_recipe
from leaven.training.metrics import Step
from leaven.training.run_folder import RunFolder

# Settings with which a run has more state than its weights, so that a test notices a value that is not restored.
KEPT_STATE: dict[str, Any] = {
    "model.dropout": 0.1,
    "hyperparameters.grad_clip": {"mode": "running", "limit": 0.8},  # clips nearly always
    "batch.micro_batch": 4,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokens(corpus: Path) -> TokenSet:
    recipe = parse_recipe(TINY.replace("SOURCE", f"{corpus}/*.txt"), "tiny.toml")
    return prepare(recipe.data, recipe.model.vocab_size)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(folder).metrics()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of a run, read with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return {tag: [(point.step, point.value) for point in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size, such as 1m, in ``folder``, or skip the test if this user may not."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def made_up(number: int, **values: Any) -> Step:
    """Return the metrics of a step of 256 tokens that no model has trained."""
    usual: dict[str, Any] = {
        **dict.fromkeys(("loss", "lr", "grad_norm", "update_norm", "tokens_per_second", "tflops", "memory_gib"), 1.0),
        **dict.fromkeys(("mfu", "loss_scale")),
        "skipped": False,
        "modules": {},
    }
    return Step(step=number, tokens=256 * number, batch_tokens=256, **usual | values)


def room_for(monkeypatch: pytest.MonkeyPatch, sequences: int) -> None:
    """Let every forward pass of more than this number of sequences run out of memory, at its end."""
    forward = Stage.forward

    def limited(self: Stage, *arguments: Any) -> torch.Tensor:
        made = forward(self, *arguments)
        if len(arguments[0]) > sequences:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return made

    monkeypatch.setattr(Stage, "forward", limited)
