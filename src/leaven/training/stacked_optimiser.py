"""Clipping and Adam for K trials at once: every number of the parameter tables is a column of a tensor.

Parameters of one shape lie in one tensor [n, K, ...], whatever layer they are of, so that a step is some ten
operations for each of the few shapes of a model, and the numbers of each parameter and trial [n, K, 1, ...] are
broadcast. Shapes: R rows of the parameter table, in the order of the shapes; K trials.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leaven.model.initialise import fill
from leaven.model.stacked import StackedTransformer
from leaven.recipe.hyperparameters import Clip
from leaven.scaling.apply import AT_BASE, Factors
from leaven.scaling.table import ParameterTable


@dataclass
class Shape:
    """All parameters of one shape [n, K, ...]: rows ``first`` to before ``last``, with what Adam knows of them."""

    first: int
    last: int
    values: Tensor
    grads: Tensor = field(init=False)
    mean: Tensor = field(init=False)
    square: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.grads, self.mean, self.square = (torch.zeros_like(self.values) for _ in range(3))

    def keep(self, index: Tensor) -> None:
        self.values, self.grads, self.mean, self.square = (
            tensor.index_select(1, index) for tensor in (self.values, self.grads, self.mean, self.square)
        )

    def of(self, tables_CRK: Tensor) -> tuple[Tensor, ...]:
        """The numbers of its rows by table, to be broadcast over the entries."""
        own_CnK = tables_CRK[:, self.first : self.last].to(self.values.dtype)
        return own_CnK[(..., *(None,) * (self.values.dim() - 2))].unbind()


class StackedParameters:
    """The parameters of a stacked model, their gradients and the numbers that each has in each trial.

    Initial values are those of the trials by themselves.
    """

    def __init__(
        self, model: StackedTransformer, tables: Sequence[ParameterTable], seeds: Sequence[int], device: torch.device
    ) -> None:
        self.tables, self.device = tables, device
        order = sorted(range(len(tables[0].rows)), key=lambda i: tables[0].rows[i].shape)
        self.rows = [[table.rows[i] for table in tables] for i in order]  # [R][K]
        self.shapes: list[Shape] = []
        for first, trials in enumerate(self.rows):
            if not self.shapes or trials[0].shape != self.rows[self.shapes[-1].first][0].shape:
                last = first + sum(other[0].shape == trials[0].shape for other in self.rows)
                self.shapes.append(
                    Shape(first, last, torch.zeros(last - first, len(tables), *trials[0].shape, device=device))
                )
            shape = self.shapes[-1]
            for trial, (row, seed) in enumerate(zip(trials, seeds, strict=True)):
                fill(shape.values[first - shape.first, trial], row.name, row.init_mean, row.init_std, seed)
        self.hand_to(model)

    def hand_to(self, model: StackedTransformer) -> None:
        """Gradients are added up in place, where the optimiser looks for them."""
        for shape in self.shapes:
            for number, row in enumerate(range(shape.first, shape.last)):
                model.hold(self.rows[row][0].name, shape.values[number]).grad = shape.grads[number]

    def keep(self, index: Tensor) -> None:
        for shape in self.shapes:
            shape.keep(index)

    def table(self, name: str) -> Tensor:
        """One number of every parameter in every trial, (R, K)."""
        numbers = [[getattr(row, name) for row in trials] for trials in self.rows]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def owners(self) -> list[tuple[str, int | None]]:
        return [(trials[0].module, trials[0].layer) for trials in self.rows]

    def zero_grad(self) -> None:
        for shape in self.shapes:
            shape.grads.zero_()

    def grad_norms(self) -> Tensor:
        """(R, K)."""
        return torch.cat([torch.linalg.vector_norm(s.grads.flatten(2), dim=2) for s in self.shapes])


class StackedClipper:
    """:class:`leaven.training.clipping.Clipper`, with a mode and a limit for each trial."""

    def __init__(self, clips: Sequence[Clip], parameters: StackedParameters) -> None:
        owners, device = parameters.owners(), parameters.device
        # A norm is over the rows of one number: of one module in one block, or of all.
        parts = [[owners.index(owner) if clip.mode == "per-module" else 0 for clip in clips] for owner in owners]
        self._parts_RK = torch.tensor(parts, device=device)
        self._limits_K = torch.tensor([clip.limit or torch.inf for clip in clips], dtype=torch.float64, device=device)
        self._running_K = torch.tensor([clip.mode == "running" for clip in clips], device=device)
        self._betas_K = torch.tensor([t.beta2 for t in parameters.tables], dtype=torch.float64, device=device)
        self._mean_square_K = torch.zeros_like(self._limits_K)
        self._steps_K = torch.zeros_like(self._limits_K)

    def keep(self, index: Tensor) -> None:
        for name, values in vars(self).items():
            setattr(self, name, values[..., index])

    def recount(self, factor: float) -> None:
        self._steps_K = self._steps_K * factor

    def __call__(self, sizes_RK: Tensor, ramp: Factors = AT_BASE) -> tuple[Tensor, Tensor]:
        """What gradients of these norms are to be multiplied by (R, K), and their global norms (K,)."""
        betas_K = self._betas_K ** (1 / ramp.half_life)
        sizes_RK = sizes_RK.double()
        squares_RK = torch.zeros_like(sizes_RK).scatter_add_(0, self._parts_RK, sizes_RK.square())
        norms_K = torch.linalg.vector_norm(sizes_RK, dim=0)
        mean_K = (self._mean_square_K / (1 - betas_K**self._steps_K)).sqrt()
        mean_K = mean_K.masked_fill(self._mean_square_K == 0, torch.inf)  # nothing is known yet
        limits_K = self._limits_K * mean_K.masked_fill(~self._running_K, 1)
        factors_RK = (limits_K / (squares_RK.sqrt().gather(0, self._parts_RK) + 1e-6)).clamp(max=1.0)
        seen_K, finite_K = torch.minimum(norms_K, limits_K), norms_K.isfinite()
        added_K = torch.lerp(seen_K.square(), self._mean_square_K, betas_K)
        self._mean_square_K = torch.where(finite_K, added_K, self._mean_square_K)
        self._steps_K = self._steps_K + finite_K
        return factors_RK, norms_K


class StackedAdam:
    """Adam, or AdamW where the decay is decoupled, as torch has them."""

    def __init__(self, parameters: StackedParameters, kind: str) -> None:
        self._parameters, self._decoupled = parameters, kind == "adamw"
        self._lr, self._decay, self._beta1, self._beta2, self._eps = (
            parameters.table(name) for name in ("lr", "weight_decay", "beta1", "beta2", "eps")
        )
        self._steps_K = torch.zeros(self._lr.shape[1], dtype=torch.float64, device=parameters.device)

    def keep(self, index: Tensor) -> None:
        for name in ("_lr", "_decay", "_beta1", "_beta2", "_eps", "_steps_K"):
            setattr(self, name, getattr(self, name)[..., index])

    def recount(self, factor: float) -> None:
        self._steps_K = self._steps_K * factor

    @torch.no_grad()
    def step(self, schedule_K: Tensor, factors_RK: Tensor, applied_K: Tensor, ramp: Factors = AT_BASE) -> None:
        """One update at ``schedule`` times the peak lr with gradients times ``factors``; none at all of trials that
        it is not ``applied`` to, whatever their gradients are. ``ramp`` multiplies the values of the full batch."""
        beta1, beta2 = (beta ** (1 / ramp.half_life) for beta in (self._beta1, self._beta2))
        decay = self._decay * ramp.weight_decay
        self._steps_K = self._steps_K + applied_K
        steps_K, off_K = self._steps_K.clamp(min=1), ~applied_K
        lr_RK = (self._lr * schedule_K * ramp.lr).masked_fill(off_K, 0)
        root_RK = (1 - beta2**steps_K).sqrt()
        # lr / (1 - b1^t) mean / (sqrt(square / (1 - b2^t)) + eps), with the root of 1 - b2^t on both sides
        numbers_CRK = torch.stack(
            (
                factors_RK,
                1 - lr_RK * decay if self._decoupled else decay,
                (1 - beta1).masked_fill(off_K, 0),
                beta2.masked_fill(off_K, 1),
                (1 - beta2).masked_fill(off_K, 0),
                self._eps * ramp.eps * root_RK,
                -lr_RK * root_RK / (1 - beta1**steps_K),
            )
        )
        for shape in self._parameters.shapes:
            values, grads, mean, square = shape.values, shape.grads, shape.mean, shape.square
            factor, decay, new1, old2, new2, eps, size = shape.of(numbers_CRK)
            grads.mul_(factor)
            if self._decoupled:
                values.mul_(decay)
            else:
                grads.addcmul_(values, decay)
            grads.masked_fill_(off_K[(..., *(None,) * (grads.dim() - 2))], 0)
            mean.lerp_(grads, new1)
            square.mul_(old2).addcmul_(grads, grads * new2)
            update = square.sqrt().add_(eps)
            values.addcmul_(torch.div(mean, update, out=update), size)
