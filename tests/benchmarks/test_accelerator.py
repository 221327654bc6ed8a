"""Every part runs without an accelerator, and time in which kernels overlap counts once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.accelerator import MFU_ARMS, PARTS, by_kernel

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "accelerator.py"


@pytest.mark.slow
def test_tiny(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    subprocess.run([sys.executable, str(BENCHMARK), "--tiny", "--device", "cpu", "--out", str(out)], check=True)
    parts: dict[str, Any] = json.loads(out.read_text())["parts"]
    assert [(name, part["error"]) for name, part in parts.items()] == [(name, None) for name in PARTS]
    rows = {name: {row["arm"]: row for row in part["rows"]} for name, part in parts.items()}
    assert all("error" not in row for part in rows.values() for row in part.values())
    assert rows["mfu"].keys() >= MFU_ARMS.keys()
    assert all(rows["plan"][arm]["measured_over_step_ms"] > 0 for arm in MFU_ARMS)
    assert all((row["waits"], row["control"]) == (0, 1) for row in rows["waits"].values())
    # One rank is trained without a group, and sharding over it changes nothing but the last bits.
    losses = [row["loss"] for row in rows["layouts"].values()]
    assert losses == pytest.approx(losses[:1] * 5, rel=1e-3)
    assert not any(row.get("trainer_has_group") for row in rows["layouts"].values())


def test_time_in_which_kernels_overlap_counts_once() -> None:
    kernels = [("nvjet_tst", 0.0, 400.0), ("Memcpy DtoD", 300.0, 200.0), ("flash_fwd", 600.0, 300.0)]
    found = by_kernel([*kernels, ("nvjet_tst", 900.0, 100.0)], [0.0005, 0.0005], plain=0.0005)
    assert found["busy_ms"] == pytest.approx(0.45)  # 0 to 500 and 600 to 1,000 microseconds, over two steps
    assert found["idle_share"] == pytest.approx(0.1)
    assert found["kernels"][0]["name"] == "nvjet_tst"
    assert found["kernels"][0]["count"] == 1
    assert {kind: of["ms"] for kind, of in found["categories"].items()} == pytest.approx(
        {"matmul": 0.25, "attention": 0.15, "copies and casts": 0.1}
    )
