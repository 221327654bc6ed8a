"""Landscapes: synthetic losses with a known optimum, as functions of per-module multipliers, to compare searches.

All values are log2 of a multiplier; 1.0 is an octave, a factor of two. The shape follows measured training runs:

- Along a multiplier, the loss is quadratic near the optimum and linear far away. In the 1,911 published runs of Step
  Law, the range of lr whose loss is within 1, 2, 5 and 10 per mille of the minimum is 0.93, 1.25, 2.3 and 3.9 octaves
  wide. For the function used here, k (sqrt(1 + u^2) - 1) with u in octaves, it is 0.93, 1.35, 2.27 and 3.53.
- Curvatures differ by up to a factor of 100: a few multipliers matter, most hardly do.
- The optimum is about an octave from the start in every multiplier. Moving all multipliers of one kind (such as lr)
  together gains nothing.
- Some pairs of multipliers interact.
- A third of the multipliers act like learning rates: too large values diverge. Several large values diverge together,
  and the boundary moves with the seed.
- The start is 0.15 nats above the optimum, and the noise between seeds is 0.005 nats.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FLOOR, EXCESS, NOISE = 2.5, 0.15, 0.005  # nats: loss of the optimum, start minus optimum, std between seeds
REACH = 3.0  # octaves from the start to either end of the search space
KINDS = 3  # kinds of multipliers, such as lr, init and weight decay; only the first kind diverges
COUPLING = 3.0  # sharpness of the soft maximum over multipliers that decides divergence
JITTER = 0.1  # std in octaves by which a seed moves the divergence boundary


@dataclass(frozen=True)
class Landscape:
    """A loss as a function of D multipliers, P pairs of which interact."""

    optimum: NDArray[np.float64]  # octaves from the start, (D,)
    curvature: NDArray[np.float64]  # nats per octave squared, (D,)
    pairs: NDArray[np.int64]  # (P, 2)
    coupling: NDArray[np.float64]  # strength of the interactions, (P,), in -1 to 1
    cliffs: NDArray[np.float64]  # divergence boundaries in octaves from the start, (D,); infinite if none

    def loss(self, x: NDArray[np.float64]) -> float:
        """Return the loss without noise, in nats; infinite beyond the divergence boundary."""
        return float("inf") if self.strain(x) > 0 else FLOOR + self._excess(x)

    def trial(
        self, x: NDArray[np.float64], rng: np.random.Generator, common: float = 0.0, share: float = 0.0
    ) -> float:
        """Return the loss of one run with noise, in nats; infinite if the run diverges.

        ``common`` is noise that all runs with a seed share, in standard deviations; ``share`` is its share of the
        variance.
        """
        jitter, own = rng.normal(0.0, [JITTER, NOISE])
        noise = np.sqrt(share) * NOISE * common + np.sqrt(1 - share) * own
        return float("inf") if self.strain(x) > jitter else FLOOR + self._excess(x) + float(noise)

    def strain(self, x: NDArray[np.float64]) -> float:
        """Return octaves beyond the divergence boundary (negative: before), a soft maximum over multipliers."""
        return float(np.log2(np.sum(2.0 ** (COUPLING * (x - self.cliffs)))) / COUPLING)

    def _excess(self, x: NDArray[np.float64]) -> float:
        # Interactions mix the distances u from the optimum, so that the optimum stays the minimum.
        u = np.sqrt(self.curvature) * (x - self.optimum)
        first, second = u[self.pairs[:, 0]], u[self.pairs[:, 1]]
        u = u.copy()
        u[self.pairs[:, 0]] = first + self.coupling * second
        scale = np.sqrt(self.curvature)
        return float(np.sum(2 * self.curvature * (np.sqrt(1 + (u / scale) ** 2) - 1)))


def landscape(dimensions: int, seed: int, offset: float = 1.0, far: float = 0.0) -> Landscape:
    """Return a random landscape. Its start, at 0, is ``EXCESS`` nats above the optimum and does not diverge.

    ``offset`` is the std of the optimum's distance from the start along each multiplier, in octaves. ``far`` replaces
    this distance for one multiplier that cannot diverge.
    """
    rng = np.random.default_rng([dimensions, seed])
    curvature = 10 ** rng.uniform(-2, 0, dimensions)
    farthest = min(2 * offset, REACH - 0.5)
    optimum = np.clip(rng.normal(0.0, offset, dimensions), -farthest, farthest)
    kind = np.arange(dimensions) % KINDS
    for k in range(KINDS):
        optimum[kind == k] -= np.average(optimum[kind == k], weights=curvature[kind == k])
    if far:
        optimum[1], curvature[1] = far, 1.0
    pairs = rng.permutation(dimensions)[: 2 * (dimensions // 5)].reshape(-1, 2)
    cliffs = np.where(kind == 0, np.maximum(optimum, 0) + rng.uniform(0.5, 2.0, dimensions), np.inf)
    made = Landscape(optimum, curvature, pairs, rng.uniform(-0.7, 0.7, len(pairs)), cliffs)
    # Keep start and optimum away from the divergence boundary, and scale the start to EXCESS above the optimum.
    worst = max(made.strain(np.zeros(dimensions)), made.strain(optimum))
    cliffs = cliffs + max(0.0, worst + 3 * JITTER)
    scaled = curvature * EXCESS / made._excess(np.zeros(dimensions))
    return Landscape(optimum, scaled, pairs, made.coupling, cliffs)
