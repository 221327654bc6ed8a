"""All benchmarks can be imported: they use functions of leaven and of the tests, which may be renamed."""

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # logits.py is a script
    for file in BENCHMARKS.rglob("*.py"):
        import_module(".".join(file.relative_to(BENCHMARKS.parent).with_suffix("").parts))
