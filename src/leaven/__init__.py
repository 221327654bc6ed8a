"""leaven: tune a little model, train the big one.

``read_recipe`` reads a recipe, ``train`` trains it, ``load`` gives model and tokenizer of a run, and ``parametrize``
puts somebody else's torch model under a rule; ``fold`` and ``save_folded`` make it a plain model again.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaven.interop.multipliers import fold, save_folded
    from leaven.interop.torch_models import parametrize
    from leaven.recipe.files import read_recipe
    from leaven.recipe.hyperparameters import Hyperparameters
    from leaven.scaling.cells import Ratios
    from leaven.training.load import load
    from leaven.training.trainer import train

__version__ = "0.1.0"
__all__ = ["Hyperparameters", "Ratios", "fold", "load", "parametrize", "read_recipe", "save_folded", "train"]

# Imported when first asked for, so that `import leaven` stays light and needs no torch.
_WHERE = {
    "Hyperparameters": ("leaven.recipe.hyperparameters", "Hyperparameters"),
    "Ratios": ("leaven.scaling.cells", "Ratios"),
    "fold": ("leaven.interop.multipliers", "fold"),
    "load": ("leaven.training.load", "load"),
    "parametrize": ("leaven.interop.torch_models", "parametrize"),
    "read_recipe": ("leaven.recipe.files", "read_recipe"),
    "save_folded": ("leaven.interop.multipliers", "save_folded"),
    "train": ("leaven.training.trainer", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(import_module(module), attribute)
