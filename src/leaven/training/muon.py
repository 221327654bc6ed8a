"""A torch optimizer that applies Muon to the matrices inside the blocks, and AdamW to all other parameters.

torch.optim.Muon takes the same steps (a test compares them bit by bit), but it needs whole matrices, always computes
in bf16, and cannot skip a step without synchronising with the device.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients a, b and c of the polynomial a s + b s^3 + c s^5 (Jordan et al. 2024). Each iteration applies it
to the singular values s of a matrix. After five iterations, nearly all of them are between 0.7 and 1.2."""
SMALLEST_NORM = 1e-7  # a matrix is divided by its Frobenius norm or, if that is smaller, by this
OnWhole = Callable[[Callable[[Tensor], Tensor], Iterable[str], Iterable[Tensor]], Iterator[Tensor]]
"""A callable with the arguments (function, names, blocks), where each block is this process's part of a matrix. It
applies the function to the whole matrices, and yields this process's block of each result."""


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Return approximately U V^T from the singular value decomposition U S V^T of ``matrix``, which is (out, in) or
    (experts, out, in). Its dtype is used."""
    a, b, c = COEFFICIENTS
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    multiply_add = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def on_one_process(
    function: Callable[[Tensor], Tensor], names: Iterable[str], matrices: Iterable[Tensor]
) -> Iterator[Tensor]:
    """Yield ``function`` of each matrix. This is the :data:`OnWhole` for a process that stores whole matrices."""
    return map(function, matrices)


def _where(marks: Sequence[bool]) -> str:
    return ", ".join(str(number) for number, mark in enumerate(marks) if mark) or "none"


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW, with Muon for groups that have the keys ``momentum`` and ``match``. ``match`` is a factor on
    Muon's update (:meth:`leaven.recipe.hyperparameters.Muon.matching`). Muon's state is ``momentum_buffer``,
    in the shape of the parameter. A step with ``found_inf`` = 1 changes neither parameters nor state."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        dtype: torch.dtype | None = None,
        on_whole: OnWhole = on_one_process,
        **how: Any,
    ) -> None:
        """Build the optimizer. It orthogonalises matrices in ``dtype``, by default the dtype of the parameters. A
        group's own ``nesterov`` and ``ns_steps`` override these arguments."""
        self.dtype, self.on_whole = dtype, on_whole
        super().__init__(groups, **how)
        for group in self._of_muon:  # torch has added the defaults of AdamW
            del group["betas"], group["eps"]
        self.nesterov, self.ns_steps = nesterov, ns_steps

    def __getstate__(self) -> dict[str, Any]:
        added = ("dtype", "on_whole", "nesterov", "ns_steps")
        return super().__getstate__() | {name: getattr(self, name) for name in added}

    def __setstate__(self, state: dict[str, Any]) -> None:
        everything = state["param_groups"]
        of_adam = [group for group in everything if "match" not in group]
        super().__setstate__(state | {"param_groups": of_adam})  # type: ignore[no-untyped-call]
        self.param_groups = everything

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of this optimizer. Raise ValueError if the state and this optimizer use Muon for different
        groups."""
        given, own = (
            ["match" in group for group in groups] for groups in (state_dict["param_groups"], self.param_groups)
        )
        if len(given) == len(own) and given != own:
            raise ValueError(
                f"the state has Muon in the groups {_where(given)}, this optimizer in {_where(own)}; load a state of "
                "leaven.MuonWithAdamW for the same model"
            )
        super().load_state_dict(state_dict)

    @property
    def _of_muon(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if "match" in group]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:  # before groups are taken out, because it calls zero_grad
            with torch.enable_grad():
                loss = closure()
        everything, of_adam = self.param_groups, torch.optim.AdamW.step
        if getattr(of_adam, "hooked", False):  # torch's wrapper, which would call the hooks a second time
            of_adam = vars(of_adam)["__wrapped__"]
        self.param_groups = [group for group in everything if "match" not in group]
        try:
            of_adam(self)
        finally:
            self.param_groups = everything
        self._step_matrices()
        return loss

    def _step_matrices(self) -> None:
        skip: Tensor | None = getattr(self, "found_inf", None)
        matrices = [
            (name, parameter, group)
            for group in self._of_muon
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if parameter.grad is not None
        ]

        def unless_skipped(new: Tensor, old: Tensor) -> Tensor:
            return new if skip is None else torch.where(skip.bool(), old, new)

        def directions() -> Iterator[Tensor]:
            """Update the momentum of each matrix, and yield the direction of its step."""
            for _, parameter, group in matrices:
                grad, state = -parameter.grad if group["maximize"] else parameter.grad, self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                average = state["momentum_buffer"]
                new = average.lerp(grad, 1 - group["momentum"])
                nesterov = group.get("nesterov", self.nesterov)
                direction = grad.lerp(new, group["momentum"]) if nesterov else new
                average.copy_(unless_skipped(new, average))
                yield direction.to(self.dtype or direction.dtype)

        of_groups = {group.get("ns_steps", self.ns_steps) for group in self._of_muon} or {self.ns_steps}
        if len(of_groups) > 1:
            raise ValueError(
                f"the groups have different ns_steps, {sorted(of_groups)}; give all groups of Muon the same value"
            )
        (ns_steps,) = of_groups
        steps = self.on_whole(lambda matrix: orthogonal(matrix, ns_steps), [m[0] for m in matrices], directions())
        for (_, parameter, group), step in zip(matrices, steps, strict=True):
            new = parameter * (1 - group["lr"] * group["weight_decay"])
            new.add_(step, alpha=-group["lr"] * group["match"])
            parameter.copy_(unless_skipped(new, parameter))
