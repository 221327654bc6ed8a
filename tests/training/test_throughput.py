"""What speed is measured against, and memory."""

import time
from pathlib import Path

import pytest
import torch

from leaven.recipe.recipe import Recipe
from leaven.training import throughput
from leaven.training.throughput import (
    best_matmul,
    device_peak,
    free_memory,
    mfu_convention,
    peak_flops,
    peak_memory,
    reset_peak_memory,
    utilisation,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "compute", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("cpu", "bf16", None),
    ],
)
def test_peaks_by_device_name(device: str, compute: str, peak: float | None) -> None:
    assert peak_flops(device, compute) == peak


def test_an_unknown_device_is_measured_once_and_said_to_be() -> None:
    """No product of two matrices is faster than the peak by much; the slack is for a busy machine."""
    peak = device_peak(CPU, "fp32")
    a = torch.ones(256, 256)
    began = time.perf_counter()
    a @ a
    assert peak.flops > 0.01 * 2 * 256**3 / (time.perf_counter() - began)
    assert device_peak(CPU, "fp32") == peak  # to the last bit: it was not measured again
    assert best_matmul.cache_info().hits >= 1
    assert "measured here" in mfu_convention(peak)


def test_conventions_by_hand(tiny: Recipe) -> None:
    """L 2, d 16 (q 16, kv 8), d_ff 32, V 320, T 32: N without the embedding, and 12 L d s for attention."""
    n = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32) + 320 * 16
    attention = 12 * 2 * 16 * 32
    full = 6 * n + attention
    used = utilisation(tiny, 0.5)
    assert used.mfu == 0.5
    assert used.mfu_causal == pytest.approx(0.5 * (6 * n + attention / 2) / full)
    assert used.hfu == pytest.approx(0.5)
    again = utilisation(tiny.replace({"layout.recompute": "full"}), 0.5)
    assert again.hfu == pytest.approx(0.5 * (full + 2 * (n - 320 * 16) + attention / 3) / full)


def test_the_most_memory_that_was_held() -> None:
    reset_peak_memory(CPU)
    before = peak_memory(CPU)
    held = torch.ones(64 * 2**20)
    size = held.numel() * 4
    assert peak_memory(CPU) >= before + 0.9 * size
    del held
    reset_peak_memory(CPU)
    assert peak_memory(CPU) < before + 0.5 * size


def test_free_memory_is_within_the_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_memory(CPU) < 2**50
    monkeypatch.setattr(throughput, "_PROC", tmp_path)
    monkeypatch.setattr(throughput, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert free_memory(CPU) == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert free_memory(CPU) == 4000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    assert free_memory(CPU) == 800_000  # what files are cached can be had back
