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


def states(params: float, code: Implementation, matrices: float = 0.0) -> tuple[State, ...]:
    """What a training code keeps from one step to the next, before anything is shared out over ranks; ``matrices`` of
    the parameters are in the blocks' matrices, of which some optimisers keep less.

    7B parameters in fp32 with Adam are 4 + 4 + 8 = 16 bytes each, 112 GB; in bf16 with fp32 master weights it is 16
    again, 2 + 2 + 4 + 8. The 140 GB of a rule that is often copied ("the optimiser is three times the weights") are
    20 bytes each: there must be a master copy beside weights that are in fp32 already.
    """
    moments = code.optimizer - code.master
    lean = 0.0 if code.optimizer_of_matrices is None else matrices
    found = (
        ("weights", params, code.weights, f"what the model is, {_NAMES.get(code.weights, 'bytes')}"),
        ("gradients", params, code.grads, "one for every weight, until the update"),
        ("accumulation", params, code.accumulation, "the gradients' sum over micro-batches, kept beside them"),
        (
            "master weights",
            params,
            code.master,
            "a copy in fp32 that the updates are added to: small ones would be rounded off",
        ),
        ("momentum of matrices", lean, (code.optimizer_of_matrices or 0) - code.master, "one mean of the gradient"),
        (
            "moments",
            params - lean,
            moments,
            f"Adam's means of the gradient and of its square, {moments / 2:g} bytes each",
        ),
    )
    return tuple(State(name, each, each * count, why) for name, count, each, why in found if each and count)


def with_moments(code: Implementation, moments: Moments) -> Implementation:
    """The same code with another optimiser.

    ``adam``: two moments in fp32. ``adam-8bit``: two of a byte (Dettmers 2021, arXiv 2110.02861; its scales, one for
    2,048 values, are not counted). ``muon``: one in fp32 for matrices, Adam for everything else.
    """
    if moments == "adam-8bit":
        return replace(code, optimizer=code.master + 2, optimizer_of_matrices=None)
    matrices = code.master + 4 if moments == "muon" else None
    return replace(code, optimizer=code.master + 8, optimizer_of_matrices=matrices)
