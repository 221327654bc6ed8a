"""The targets by name, and their files on disk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from leaven.interop.configs import deepspeed, litgpt, megatron, nanotron, torchtitan, transformers
from leaven.interop.configs.vocabulary import Export
from leaven.recipe.errors import InputError
from leaven.recipe.files import make_folder, write_text
from leaven.recipe.recipe import Recipe
from leaven.storage import new_folder


@dataclass(frozen=True)
class Target:
    """``path`` is the name of the file or folder for a recipe of a name."""

    export: Callable[[Recipe], Export]
    path: Callable[[str], str]


TARGETS: Mapping[str, Target] = {
    "megatron": Target(megatron.export, "{}.megatron.sh".format),
    "torchtitan": Target(torchtitan.export, lambda name: f"{torchtitan.identifier(name)}.py"),
    "deepspeed": Target(deepspeed.export, "{}.deepspeed.json".format),
    "nanotron": Target(nanotron.export, "{}.nanotron.yaml".format),
    "transformers": Target(transformers.export, "{}-transformers".format),
    "litgpt": Target(litgpt.export, "{}.litgpt.yaml".format),
}


def target(name: str) -> Target:
    """Raises:
    InputError: naming those that there are.
    """
    if name not in TARGETS:
        raise InputError(f"--to {name}: there are {', '.join(TARGETS)}")
    return TARGETS[name]


def require_free(path: Path) -> None:
    """That nothing is overwritten.

    Raises:
        InputError: if there is something at the path.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path}: there is something already; give another name with -o")


def write(export: Export, path: Path) -> None:
    """Write the file, or the folder, whole or not at all.

    Raises:
        InputError: if there is something already, or it cannot be written.
    """
    require_free(path)
    make_folder(path.absolute().parent)
    if list(export.files) == [""]:
        write_text(path, export.files[""])
        return
    try:
        with new_folder(path) as folder:
            for name, text in export.files.items():
                (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
