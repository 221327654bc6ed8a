"""leaven: tune a small model, train the big one.

``read_recipe`` reads a recipe, ``train`` trains it and ``load`` returns the model and tokenizer of a run.
``parametrize`` applies a scaling rule to any torch model. ``fold`` and ``save_folded`` fold the rule's multipliers
into the weights, so that the model works without leaven.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaven.interop.multipliers import fold, save_folded
    from leaven.interop.parametrize import parametrize
    from leaven.recipe.files import read_recipe
    from leaven.recipe.hyperparameters import Hyperparameters
    from leaven.scaling.cells import Ratios
    from leaven.training.load import load
    from leaven.training.muon import MuonWithAdamW
    from leaven.training.trainer import train

if sys.version_info < (3, 11):  # noqa: UP036 - pip checks this, but a checkout works without pip
    sys.stderr.write("error: leaven needs Python 3.11 or newer; this is {}.{}\n".format(*sys.version_info[:2]))
    sys.exit(2)

__version__ = "0.1.0"
__all__ = [
    "Hyperparameters",
    "MuonWithAdamW",
    "Ratios",
    "fold",
    "load",
    "parametrize",
    "read_recipe",
    "save_folded",
    "train",
]

# The module that defines each name. It is imported on first use, so that `import leaven` is fast and needs no torch.
_MODULES = {
    "Hyperparameters": "leaven.recipe.hyperparameters",
    "MuonWithAdamW": "leaven.training.muon",
    "Ratios": "leaven.scaling.cells",
    "fold": "leaven.interop.multipliers",
    "load": "leaven.training.load",
    "parametrize": "leaven.interop.parametrize",
    "read_recipe": "leaven.recipe.files",
    "save_folded": "leaven.interop.multipliers",
    "train": "leaven.training.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
