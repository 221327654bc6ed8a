"""The learning-rate schedule as a function of the tokens consumed, independent of the batch size."""

import math
from typing import Literal

from pydantic import Field, model_validator

from leaven.recipe.base import Part

Decay = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]


class Schedule(Part):
    """The factor on the peak lr of all parameters: a linear warm-up, then a decay."""

    warmup_tokens: int = Field(default=0, ge=0)
    decay: Decay = "cosine"
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)  # final lr / peak lr
    # Only for wsd: the share of the run that the final cooldown takes. In the cooldown, the lr falls to the final lr
    # as 1 - sqrt(p), where p goes from 0 to 1 (Hägele et al. 2024, arXiv 2405.18392).
    decay_ratio: float = Field(default=0.2, gt=0, le=1)

    @model_validator(mode="after")
    def _require_warmup(self) -> "Schedule":
        if self.decay == "inverse_sqrt" and self.warmup_tokens == 0:
            raise ValueError('decay = "inverse_sqrt" starts after a warm-up; set warmup_tokens above 0')
        return self

    def multiplier(self, tokens: float, horizon: int) -> float:
        """Return the factor on the peak lr after ``tokens`` tokens of a run that has ``horizon`` tokens."""
        if tokens < self.warmup_tokens:
            return max(tokens, 0) / self.warmup_tokens
        floor = self.min_lr_ratio
        left = horizon - self.warmup_tokens
        progress = min((tokens - self.warmup_tokens) / left, 1.0) if left > 0 else 1.0
        match self.decay:
            case "constant":
                return 1.0
            case "cosine":
                return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
            case "linear":
                return floor + (1 - floor) * (1 - progress)
            case "inverse_sqrt":
                return max(math.sqrt(self.warmup_tokens / max(tokens, 1)), floor)
            case "wsd":
                cooldown = min(self.decay_ratio * horizon, left)
                into = max(tokens - (horizon - cooldown), 0.0) / cooldown if cooldown > 0 else 1.0
                return floor + (1 - floor) * (1 - math.sqrt(min(into, 1.0)))
