"""Foreign models: a factory is a family; its outputs are found by hooks, its parameters by their names."""

import sys
from pathlib import Path

import pytest

from leaven.cli import main
from leaven.recipe.errors import InputError
from leaven.verification.family import foreign

FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.norm, self.up, self.scale = nn.RMSNorm(width), nn.Linear(width, width, bias=False), scale
    def forward(self, x):
        return x + self.scale * torch.relu(self.up(self.norm(x)))

def factory(width, depth, right=True):
    blocks = nn.Sequential(*(Block(width, 2 / depth if right else 1.0) for _ in range(depth)))
    model = nn.Sequential(nn.Embedding(64, width), blocks, nn.RMSNorm(width), nn.Linear(width, 64, bias=False))
    nn.init.normal_(model[3].weight, std=1 / width)
    for block in blocks:
        nn.init.normal_(block.up.weight, std=width ** -0.5)
    lr = 0.004
    hidden = [block.up.weight for block in blocks] + [model[3].weight]
    rest = [p for p in model.parameters() if not any(p is h for h in hidden)]
    return model, [{"params": rest, "lr": lr}, {"params": hidden, "lr": lr * 32 / width if right else lr}]

def wrong(width, depth):
    return factory(width, depth, right=False)

def nothing(width, depth):
    return None
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "their_model.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("their_model", None)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["leaven", "check", "coordinates", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


SIZES = ("--widths", "32,64,128", "--depths", "2,4", "--seeds", "1")


def test_a_foreign_model_passes_or_fails_by_its_factory(here: Path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    page = here / "check.html"
    assert run(monkeypatch, "their_model:factory", *SIZES, "-o", str(page)) == 0
    assert "passed: " in capsys.readouterr().out
    assert "their_model:factory" in page.read_text()
    assert run(monkeypatch, "their_model:wrong", *SIZES, "-o", str(page)) == 1
    assert "FAILED: " in capsys.readouterr().out
    assert "GROWS with" in page.read_text()


def test_what_is_wrong_with_an_entry_is_said(here: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    assert run(monkeypatch, "no_such_module:factory", *SIZES) == 2
    assert run(monkeypatch, "their_model:factory", "--widths", "32", "--depths", "2") == 2
    assert run(monkeypatch, "their_model:factory", "--widths", "32,x") == 2
    with pytest.raises(InputError, match="has no factori"):
        foreign("their_model:factori")
    with pytest.raises(InputError, match="should return"):
        foreign("their_model:nothing").build(32, 2, 0)
