"""The benchmark of search methods, and that its landscapes are what they say.

The table: `python -m benchmarks.search`.
"""

from pathlib import Path

import numpy as np
import pytest
from benchmarks._landscapes import EXCESS, FLOOR, JITTER, NOISE, landscape

from benchmarks import search


@pytest.mark.parametrize("dimensions", [6, 30, 90])
def test_the_optimum_is_known(dimensions: int) -> None:
    made, rng = landscape(dimensions, 1), np.random.default_rng(0)
    assert made.loss(made.optimum) == pytest.approx(FLOOR)
    assert made.loss(np.zeros(dimensions)) == pytest.approx(FLOOR + EXCESS)
    assert max(made.strain(np.zeros(dimensions)), made.strain(made.optimum)) <= -3 * JITTER + 1e-9
    for _ in range(100):
        assert made.loss(made.optimum + rng.normal(0, 0.3, dimensions)) > FLOOR
    runs = [made.trial(np.zeros(dimensions), rng) for _ in range(400)]
    assert np.std(np.array(runs)[np.isfinite(runs)]) == pytest.approx(NOISE, rel=0.15)
    over = np.zeros(dimensions)
    over[0] = made.cliffs[0] + 1
    assert made.loss(over) == np.inf


def test_the_table_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["search", "--quick", "--results", str(tmp_path / "runs.jsonl")])
    search.main()
    table = capsys.readouterr().out
    rows = {line.split(" | ")[2]: line.split(" | ") for line in table.splitlines()[2:]}
    assert set(rows) == {"trust-region", "random", "random, narrow", "tpe", "tpe, narrow"}
    assert float(rows["trust-region"][3]) < float(rows["random"][3])
    monkeypatch.setattr(search, "run", None)  # nothing is left to run
    search.main()
    assert capsys.readouterr().out == table
