import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leaven.data.tokens import prepare
from leaven.distributed.process_group import ProcessGroup, join_process_group
from leaven.errors import InputError
from leaven.model import kernels, transformer
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.training import device as devices
from leaven.training import optimizer
from leaven.training.device import (
    DTYPES,
    best_matmul,
    default_device,
    device_peak,
    free_memory,
    known_peak,
    mfu_convention,
    peak_memory,
    plain_torch,
    require_device,
    reset_peak_memory,
)
from leaven.training.engine import Training
from leaven.training.run_folder import RunFolder
from leaven.training.trainer import train

CPU = torch.device("cpu")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac whose torch has mps and no CUDA."""
    monkeypatch.delenv("LEAVEN_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.usefixtures("mac")
def test_the_best_device_is_chosen_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_device().type == "mps"
    monkeypatch.setenv("LEAVEN_DEVICE", "cpu")
    assert default_device().type == "cpu"
    monkeypatch.setenv("LEAVEN_DEVICE", "cuda")
    with pytest.raises(InputError, match="^device cuda: torch .* is built without cuda; use --device mps or cpu$"):
        default_device()
    monkeypatch.setenv("LEAVEN_DEVICE", "tpu")
    with pytest.raises(InputError, match="^there is no device 'tpu'; use --device mps or cpu$"):
        default_device()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("LEAVEN_DEVICE")
    assert default_device().type == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_device().type == "cuda"


@pytest.mark.usefixtures("mac")
def test_what_mps_lacks_is_refused_by_name(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    mps = torch.device("mps")
    tokens = prepare(tiny.data, tiny.model.vocab_size)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 3))
    with pytest.raises(InputError, match=r"^\[precision\] compute bf16 needs macOS 14"):
        Training(tiny.replace({"precision.compute": "bf16"}), tokens, "mps")
    with pytest.raises(InputError, match=r"^\[layout\] compile"):
        Training(tiny.replace({"layout.compile": True}), tokens, "mps")
    with pytest.raises(InputError, match=r"^\[layout\] 2 processes cannot use mps"):
        join_process_group(Layout(dp=2), mps).__enter__()
    require_device(tiny, mps)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True)
    require_device(tiny.replace({"precision.compute": "bf16"}), mps)


class NoFloat64(TorchDispatchMode):
    """Raises TypeError if an operation makes a float64 tensor, as mps does. While ``on_the_host`` is true, it does
    nothing."""

    on_the_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.on_the_host:
            for value in tree_leaves(result):
                if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                    raise TypeError(f"{func} makes a float64 tensor")
        return result


@pytest.mark.long
@pytest.mark.parametrize(("compute", "positions"), [("fp32", "alibi"), ("fp16", "rope")])
def test_a_run_on_mps_makes_no_float64_tensor(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: str, positions: str
) -> None:
    recipe = tiny.replace(
        {
            "data.tokens": 1_024,
            "precision.compute": compute,
            "model.positions": positions,
            "stability.noise_scale_every_tokens": 512,
            "hyperparameters.grad_clip": {"mode": "running", "limit": 2.0},
        }
    )
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    for module in (kernels, optimizer):
        monkeypatch.setattr(module, "wide", lambda device: torch.float32)
    mode = NoFloat64()

    def on_the_host(owner: type, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            mode.on_the_host = True
            made = plain(*arguments)
            mode.on_the_host = False
            return made

        monkeypatch.setattr(owner, name, call)

    on_the_host(transformer.Positions, "__init__")
    on_the_host(ProcessGroup, "all_gather")
    with mode:
        assert train(recipe, tokens, tmp_path / "run").loss < 7


@pytest.mark.parametrize(
    ("device", "compute", "peak"),
    [("NVIDIA H100 80GB HBM3", "bf16", 989e12), ("NVIDIA H100 80GB HBM3", "fp32", None), ("cpu", "bf16", None)],
)
def test_peaks_by_device_name(device: str, compute: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_name", lambda _: device)
    found = known_peak(CPU, compute)
    assert (found and found.flops) == peak


def test_an_unknown_device_is_measured_once() -> None:
    """No matmul is much faster than the measured peak. The tolerance is wide, because the machine may be busy."""
    peak = device_peak(CPU, "fp32")
    a = torch.ones(256, 256)
    began = time.perf_counter()
    a @ a
    assert peak.flops > 0.01 * 2 * 256**3 / (time.perf_counter() - began)
    assert device_peak(CPU, "fp32") == peak  # bit-identical, so it was not measured again
    assert best_matmul.cache_info().hits >= 1
    assert "measured on this device" in mfu_convention(peak)


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_an_emulated_dtype_is_measured_against_fp32(
    compute: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The speed of an emulated fp16 matmul is not the peak: fp32 is faster, and computes the same. Which dtype is
    faster is measured once, even if a later measurement would differ."""
    speeds = {torch.float32: 1e11}
    monkeypatch.setattr(devices, "best_matmul", lambda device, dtype, threads: speeds[dtype])
    for folder, speed, peak, emulated in (
        ("slow", 4e9, 1e11, 25.0),
        ("slow", 2e11, 1e11, 25.0),
        ("equal", 0.9e11, 1e11, None),
        ("fast", 2e11, 2e11, None),
    ):
        monkeypatch.setenv("LEAVEN_CACHE", str(tmp_path / folder))
        speeds[DTYPES[compute]] = speed
        found = device_peak(CPU, compute)
        assert (found.flops, found.emulated) == (peak, emulated)
        assert (f"{compute} is slower" in found.source) == (peak == 1e11)
        assert ("emulated" in found.source) == (emulated is not None)
    (tmp_path / "slow" / devices.TIMES_FP32).write_text("[")
    monkeypatch.setenv("LEAVEN_CACHE", str(tmp_path / "slow"))
    assert device_peak(CPU, compute).emulated is None  # a damaged file is measured again


def test_peak_memory_counts_freed_tensors_until_it_is_reset() -> None:
    reset_peak_memory(CPU)
    before, size = peak_memory(CPU), 2**28
    # Neither a tensor nor one long text: malloc keeps what was freed, before the test and in it.
    held = mmap(-1, size)
    for _ in range(2**8):
        held.write(b"1" * 2**20)
    assert peak_memory(CPU) >= before + 0.9 * size
    held.close()
    reset_peak_memory(CPU)
    assert peak_memory(CPU) < before + 0.5 * size


def test_free_memory_is_within_the_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_memory(CPU) < 2**50
    monkeypatch.setattr(devices.psutil, "virtual_memory", lambda: SimpleNamespace(available=4000 * 1024))
    monkeypatch.setattr(devices, "_CGROUP", tmp_path)
    assert free_memory(CPU) == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert free_memory(CPU) == 4000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    assert free_memory(CPU) == 800_000  # cached files count as free


def test_step_time_on_a_cpu_excludes_validation_and_checkpoints(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations, checkpoints and the next step happen between the work of a step and the reading of its result. The
    clock of this test adds a second at each look, ten seconds for the work of a step or validation, and a thousand
    for a checkpoint."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    def during(name: str, seconds: float) -> None:
        plain: Callable[..., Any] = getattr(Training, name)

        def slow(training: Training, *arguments: Any) -> Any:
            nonlocal now
            now += seconds
            return plain(training, *arguments)

        monkeypatch.setattr(Training, name, slow)

    monkeypatch.setattr("leaven.training.metrics.time", SimpleNamespace(perf_counter=clock))
    during("_batch", 10.0)  # each step asks once, and each validation
    during("checkpoint", 1_000.0)
    every = {"evaluation.every_tokens": 512, "stability.checkpoint_every_tokens": 768, "batch.micro_batch": 8}
    recipe = tiny.replace(every | {"data.tokens": 2_048})
    train(recipe, prepare(tiny.data, tiny.model.vocab_size), tmp_path / "run")
    lines = RunFolder(tmp_path / "run").metrics()
    assert [line["tokens_per_second"] for line in lines] == [256 / 11] * 8


FAULTS = """
import resource, torch
from leaven.training.device import keep_freed_memory
def faults():
    for step in range(8):
        if step == 5:  # the first steps allocate
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10_000_000).relu().relu()  # 40 MB: larger than what the C library keeps by default
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
default = faults()
keep_freed_memory()
print(default, faults())
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="another C library, or one with a lower limit")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    output = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    default, kept = map(int, output.split())
    assert kept < 100 < default


def test_torch_stays_plain_until_the_last_of_the_runs_in_two_threads_has_ended() -> None:
    matmul, began, end = torch.backends.mkldnn.matmul, Event(), Event()

    def run() -> None:
        with plain_torch():
            began.set()
            end.wait(60)

    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(run)
            assert began.wait(60)
            with plain_torch():
                end.set()
                first.result(60)
                assert (torch.get_default_dtype(), matmul.fp32_precision) == (torch.float32, "ieee")
            assert (torch.get_default_dtype(), matmul.fp32_precision) == (torch.float64, "bf16")
    finally:
        end.set()
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
