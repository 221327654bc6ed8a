"""The example, a Hugging Face Llama, passes under complete-d-p and fails under standard."""

import sys
from pathlib import Path

import pytest

from leaven.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("rule", "code", "verdict"), [("complete_d_p", 0, "passed:"), ("standard", 1, "FAILED:")])
@pytest.mark.parametrize("check", ["coordinates", "gradients"])
def test_checks_of_the_llama_example(
    check: str,
    rule: str,
    code: int,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(EXAMPLES)
    depths = "2,4,8" if code == 0 else "2"  # three widths show that standard fails
    sizes = ["--widths", "64,128,256", "--depths", depths, "--seeds", "1", "--source", "made-up"]
    if check == "gradients":
        sizes += ["--seeds", "2", "--steps", "1"]  # the last value of an option counts
    monkeypatch.setattr(sys, "argv", ["leaven", "check", check, f"llama:{rule}", *sizes])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert int(stopped.value.code or 0) == code
    assert verdict in capsys.readouterr().out
