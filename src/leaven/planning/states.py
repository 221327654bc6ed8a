"""What training keeps for every parameter, by part, and why: the arithmetic behind "16 bytes a parameter"."""

from dataclasses import dataclass, replace
from typing import Literal

from leaven.planning.implementations import Implementation

Moments = Literal["adam", "adam-8bit", "muon"]

_NAMES = {4: "fp32", 2: "16 bits"}


@dataclass(frozen=True)
class State:
    """One copy of something for every parameter: bytes of one parameter, of all of them, and what it is for."""

    name: str
    bytes_each: int
    bytes: float
    why: str

    @property
    def gb(self) -> float:
        """In 10^9 bytes."""
        return self.bytes / 1e9


def states(params: float, code: Implementation) -> tuple[State, ...]:
    """What a training code keeps from one step to the next, before anything is shared out over ranks.

    7B parameters in fp32 with Adam are 4 + 4 + 8 = 16 bytes each, 112 GB; in bf16 with fp32 master weights it is 16
    again, 2 + 2 + 4 + 8. The 140 GB of a rule that is often copied ("the optimiser is three times the weights") are
    20 bytes each: there must be a master copy beside weights that are in fp32 already.
    """
    moments = code.optimizer - code.master
    found = (
        ("weights", code.weights, f"what the model is, {_NAMES.get(code.weights, 'bytes')}"),
        ("gradients", code.grads, "one for every weight, until the update"),
        ("accumulation", code.accumulation, "the gradients' sum over micro-batches, kept beside them"),
        (
            "master weights",
            code.master,
            "a copy in fp32 that the updates are added to: small ones would be rounded off",
        ),
        ("moments", moments, "Adam's means of the gradient and of its square" + _two(moments)),
    )
    return tuple(State(name, each, each * params, why) for name, each, why in found if each)


def _two(each: int) -> str:
    return f", {each / 2:g} bytes each"


def with_moments(code: Implementation, moments: Moments) -> Implementation:
    """The same code with another optimiser.

    ``adam``: two moments in fp32. ``adam-8bit``: two of a byte (Dettmers 2021, arXiv 2110.02861; its scales, one for
    2,048 values, are not counted). ``muon``: one in fp32 for matrices, Adam for everything else.
    """
    if moments == "adam-8bit":
        return replace(code, optimizer=code.master + 2, optimizer_of_matrices=None)
    matrices = code.master + 4 if moments == "muon" else None
    return replace(code, optimizer=code.master + 8, optimizer_of_matrices=matrices)
