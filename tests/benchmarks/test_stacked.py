"""The benchmark of stacked trials runs, with the same tokens a trial in all arms."""

import sys

import pytest
import torch

from benchmarks import stacked


def test_a_table_of_the_smallest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--device cpu --widths 16 --layers 1 --sequences 2 --seq-len 16 --stacks 1,3 --repeats 2 --seconds 0"
    monkeypatch.setattr(sys, "argv", ["stacked", *small.split()])
    monkeypatch.setattr(stacked, "STEPS", 100)
    threads = torch.get_num_threads()
    stacked.main()
    torch.set_num_threads(threads)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| 16")]
    assert [row[2].strip() for row in rows] == ["one by itself", "a stack of 1", "a stack of 3"]
    assert rows[0][5].strip() == "1.00"
    assert rows[1][7] == rows[2][7]  # as many operations for three trials as for one: nothing is a loop over them
    assert float(rows[2][6]) == pytest.approx(3 / float(rows[2][5]), rel=0.05)
