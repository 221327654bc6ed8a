"""How a run is laid out over accelerators. Not part of the model: it may change without changing a loss."""

from typing import Literal

from pydantic import Field

from leaven.recipe.base import Part

Recompute = Literal["none", "selective", "full"]
Pipeline = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


class Layout(Part):
    """Data, tensor and pipeline degree in ranks, the ZeRO stage, what is recomputed in the backward pass, and whether
    each block is compiled (by torch.compile: a minute at the start for faster steps, and other last bits).

    ``dp_replicate`` of the dp ranks hold the same pieces, so that ZeRO shards over dp / dp_replicate ranks only (one
    node's, where the wires between nodes are slow). ``schedule`` is the pipeline's; ``stages_per_rank`` the stretches
    of layers that a rank of it holds, 1 but for interleaved and zero-bubble.
    """

    dp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    pp: int = Field(default=1, gt=0)
    zero: int = Field(default=0, ge=0, le=3)
    dp_replicate: int = Field(default=1, gt=0)
    schedule: Pipeline = "1f1b"
    stages_per_rank: int = Field(default=1, gt=0)
    recompute: Recompute = "none"
    compile: bool = False

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp
