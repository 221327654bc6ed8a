"""How a run is laid out over accelerators. Not part of the model: it may change without changing a loss."""

from typing import Literal

from pydantic import Field

from leaven.recipe.base import Part

Recompute = Literal["none", "selective", "full"]


class Layout(Part):
    """Data, tensor and pipeline degree in ranks, the ZeRO stage, what is recomputed in the backward pass, and whether
    each block is compiled (by torch.compile: a minute at the start for faster steps, and other last bits)."""

    dp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    pp: int = Field(default=1, gt=0)
    zero: int = Field(default=0, ge=0, le=3)
    recompute: Recompute = "none"
    compile: bool = False

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp
