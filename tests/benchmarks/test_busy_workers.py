"""The benchmark of busy workers runs, and its shares are shares."""

import re
import sys

import pytest

from benchmarks import busy_workers


def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["busy_workers.py", "--tiny"])
    busy_workers.main()
    *_, whole = capsys.readouterr().out.splitlines()
    assert whole.split()[:3] == ["11", "to", "30"]  # ten are in the store at the beginning
    assert 0 < float(re.findall(r"([0-9.]+)%", whole)[0]) <= 100
