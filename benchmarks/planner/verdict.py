"""The results of a table, and the limits of their errors."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.planner.cases import PlannerCase
from benchmarks.planner.tables import Table

BARS = {
    "params_err_max": 0.0,
    "flops_err_max": 1e-3,
    "mfu_err_max_points": 0.2,
    "memory_err_mean": 0.08,
    "memory_worst_low": -0.20,
    "time_err_mean": 0.15,
    "days_err_max": 0.02,
    "oom_called_fit": 0,
    "best_in_top3": True,
}
BUBBLE_BAR = 0.005


@dataclass(frozen=True)
class Comparison:
    """One comparison; ``error`` is predicted / measured - 1."""

    where: str
    kind: Literal["memory", "time"]
    predicted: float
    measured: float
    case: PlannerCase | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def tokens(self) -> int:
        return self.case.tokens if self.case else 0


@dataclass
class TableVerdict:
    """The results of a table. Errors of exact quantities are counted beyond the rounding of the printed number."""

    table: Table
    points: list[Comparison] = field(default_factory=list)
    params: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    mfu: list[float] = field(default_factory=list)
    days: list[float] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)
    identities: int = 0
    broken: list[str] = field(default_factory=list)
    oom: int = 0
    oom_called_fit: list[str] = field(default_factory=list)
    ran_called_too_large: list[str] = field(default_factory=list)
    ran: int = 0
    chosen: int = 0
    groups: list[bool] = field(default_factory=list)
    anomalies: list[str] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)

    def errors(self, kind: str) -> list[float]:
        return [point.error for point in self.points if point.kind == kind]

    def to_json(self) -> dict[str, Any]:
        memory, time = self.errors("memory"), self.errors("time")
        return {
            "rows": len(self.table.rows),
            "params_err_max": max(self.params, default=None),
            "flops_err_max": max(self.flops, default=None),
            "mfu_err_max_points": max(self.mfu, default=None),
            "memory_rows": len(memory),
            "memory_err_mean": _mean(list(map(abs, memory))),
            "memory_bias": _mean(memory),
            "memory_worst_low": min(memory, default=None),
            "time_rows": len(time),
            "time_err_mean": _mean(list(map(abs, time))),
            "days_err_max": max(self.days, default=None),
            "oom_called_fit": len(self.oom_called_fit) if self.oom else None,
            "best_in_top3": all(self.groups) if self.groups else None,
        }

    def missed(self) -> list[str]:
        """The limits that are exceeded, as text."""
        found, values = [], self.to_json()
        for name, bar in BARS.items():
            value = values[name]
            if value is None:
                continue
            above = value < bar if name in {"memory_worst_low", "best_in_top3"} else value > bar
            if above:
                found.append(f"{name} {value if isinstance(value, int) else f'{value:.4g}'}, bar {bar}")
        if self.broken:
            found.append(f"identities broken: {', '.join(self.broken)}")
        if max(self.bubbles, default=0) > BUBBLE_BAR:
            found.append(f"bubble {max(self.bubbles):.4g}, bar {BUBBLE_BAR}")
        return found


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
