"""Landscapes of per-module multipliers with a known optimum, for benchmarks/search.py.

Each has the shape that measurements of training runs have:

- A basin that is quadratic near its bottom and linear far off. The lr basin of Step-Law's 1,911 open runs is 0.93,
  1.25, 2.3 and 3.9 octaves wide at 1, 2, 5 and 10 per mille of loss; that of k (sqrt(1 + u^2) - 1), with u in
  octaves, is 0.93, 1.35, 2.27 and 3.53 wide.
- Curvatures over two decades: a few multipliers matter, most hardly do.
- Optima about an octave from the start, which is the best *global* point: moving all multipliers of a kind together
  gains nothing.
- Pairs that interact, and cliffs of divergence above the lr-like third of the multipliers, which are coupled (many
  large learning rates diverge together) and as uncertain as a seed makes them.
- A noise of 0.005 nats between seeds, where the start is 0.15 nats above the optimum.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FLOOR, EXCESS, NOISE = 2.5, 0.15, 0.005  # nats: at the optimum, of the start above it, between seeds
REACH = 3.0  # octaves of the space to either side of the start
KINDS = 3  # lr, init and decay, say; the first has the cliffs
COUPLING = 3.0  # how sharply the worst learning rate decides the divergence: an exponent of 2**(x - cliff)
JITTER = 0.1  # octaves by which the seed moves a cliff


@dataclass(frozen=True)
class Landscape:
    optimum: NDArray[np.float64]  # octaves from the start, (D,)
    curvature: NDArray[np.float64]  # nats per octave squared, (D,)
    pairs: NDArray[np.int64]  # (P, 2)
    coupling: NDArray[np.float64]  # (P,), in -1 to 1
    cliffs: NDArray[np.float64]  # octaves from the start, (D,); infinite where there is none

    def loss(self, x: NDArray[np.float64]) -> float:
        """The loss without noise, in nats; infinite beyond the divergence boundary."""
        return float("inf") if self.strain(x) > 0 else FLOOR + self._excess(x)

    def trial(
        self, x: NDArray[np.float64], rng: np.random.Generator, common: float = 0.0, share: float = 0.0
    ) -> float:
        """The loss of one run with the noise of a seed; infinite if it diverges.

        ``common``: noise that all runs of the seed share, in standard deviations; ``share`` is its part of the
        variance.
        """
        jitter, own = rng.normal(0.0, [JITTER, NOISE])
        noise = np.sqrt(share) * NOISE * common + np.sqrt(1 - share) * own
        return float("inf") if self.strain(x) > jitter else FLOOR + self._excess(x) + float(noise)

    def strain(self, x: NDArray[np.float64]) -> float:
        """Distance beyond the divergence boundary in octaves: a soft maximum over the multipliers that have one."""
        return float(np.log2(np.sum(2.0 ** (COUPLING * (x - self.cliffs)))) / COUPLING)

    def _excess(self, x: NDArray[np.float64]) -> float:
        # In u the interactions are a rotation of pairs, so that the optimum stays the minimum.
        u = np.sqrt(self.curvature) * (x - self.optimum)
        first, second = u[self.pairs[:, 0]], u[self.pairs[:, 1]]
        u = u.copy()
        u[self.pairs[:, 0]] = first + self.coupling * second
        scale = np.sqrt(self.curvature)
        return float(np.sum(2 * self.curvature * (np.sqrt(1 + (u / scale) ** 2) - 1)))


def landscape(dimensions: int, seed: int, offset: float = 1.0, far: float = 0.0) -> Landscape:
    """The landscape of a seed. Its start, at 0, is ``EXCESS`` nats above the optimum and does not diverge.

    ``offset``: the typical distance of the optimum from the start, in octaves along each multiplier. ``far``: the
    distance along one multiplier that has no divergence boundary.
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
    # Neither the start nor the optimum is on the edge, and the start is EXCESS above.
    worst = max(made.strain(np.zeros(dimensions)), made.strain(optimum))
    cliffs = cliffs + max(0.0, worst + 3 * JITTER)
    scaled = curvature * EXCESS / made._excess(np.zeros(dimensions))
    return Landscape(optimum, scaled, pairs, made.coupling, cliffs)
