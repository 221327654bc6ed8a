"""leaven: tune a little model, train the big one.

``load`` reads a recipe, ``train`` trains it, and ``parametrize`` puts somebody else's torch model under a rule.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaven.interop.torch_models import parametrize
    from leaven.recipe.files import read_recipe as load
    from leaven.recipe.hyperparameters import Hyperparameters
    from leaven.scaling.cells import Ratios
    from leaven.training.trainer import train

__version__ = "0.1.0"
__all__ = ["Hyperparameters", "Ratios", "load", "parametrize", "train"]

# Imported when first asked for, so that `import leaven` stays light and needs no torch.
_WHERE = {
    "Hyperparameters": ("leaven.recipe.hyperparameters", "Hyperparameters"),
    "Ratios": ("leaven.scaling.cells", "Ratios"),
    "load": ("leaven.recipe.files", "read_recipe"),
    "parametrize": ("leaven.interop.torch_models", "parametrize"),
    "train": ("leaven.training.trainer", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(import_module(module), attribute)
