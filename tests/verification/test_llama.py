"""The example, a Hugging Face Llama, passes under complete-d-p and fails under standard."""

from pathlib import Path

import pytest
from tests.cli.conftest import Verb

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("rule", "code", "verdict"), [("complete_d_p", 0, "passed:"), ("standard", 1, "FAILED:")])
@pytest.mark.parametrize("check", ["coordinates", "gradients"])
def test_checks_of_the_llama_example(
    check: str, rule: str, code: int, verdict: str, monkeypatch: pytest.MonkeyPatch, leaven: Verb
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(EXAMPLES)
    depths = "2,4,8" if code == 0 else "2"  # three widths show that standard fails
    sizes = ["--widths", "64,128,256", "--depths", depths, "--seeds", "1", "--source", "made-up"]
    if check == "gradients":
        sizes += ["--seeds", "2", "--steps", "1"]  # the last value of an option counts
    found, out, _ = leaven("check", check, f"llama:{rule}", *sizes)
    assert (found, verdict in out) == (code, True)
