"""TensorBoard scalars, over tokens."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaven.training.trainer import Step


class Board:
    def __init__(self, folder: Path, tokens: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What was written beyond the checkpoint will be written again: let TensorBoard forget it.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=tokens or None)

    def step(self, step: "Step") -> None:
        for name, value in asdict(step).items():
            if name not in {"step", "tokens"} and value is not None:
                self._writer.add_scalar(f"train/{name}", value, step.tokens)

    def validation(self, tokens: int, loss: float) -> None:
        self._writer.add_scalar("validation/loss", loss, tokens)

    def close(self) -> None:
        self._writer.close()
