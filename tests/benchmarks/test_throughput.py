"""The benchmark runs, its arms are one shape, and it says which peer is not there."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "throughput.py"


def test_tiny(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--tiny", "--json", str(tmp_path / "table.json")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (table,) = json.loads((tmp_path / "table.json").read_text())
    peers = [name for name in ("transformers", "litgpt") if find_spec(name)]
    assert [row["arm"] for row in table["rows"]] == ["leaven", *peers]
    for name in ("transformers", "litgpt"):
        assert (f"{name} is not installed" in output) == (name not in peers)
    # d_ff 192, d 64, V 128: attention, MLP, two norms; both ends and the final norm. The same for all, it asserts.
    assert table["params"] == 4 * 64 * 64 + 3 * 192 * 64 + 2 * 64 + 2 * 128 * 64 + 64
    assert all(row["tokens_per_second"][1] > 0 and row["peak_mib"] > 0 for row in table["rows"])
