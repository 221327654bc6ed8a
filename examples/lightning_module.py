"""A LightningModule with the lr, weight decay, eps and init of every parameter: python lightning_module.py"""

import lightning
import torch
from llama import llama
from transformers import get_cosine_schedule_with_warmup

import leaven


class Llama(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama(width=128, depth=4)
        self.groups = leaven.parametrize(
            self.model,
            base=llama(width=64, depth=2),  # the small model that was tuned, with its best values
            hyperparameters={"lr": 4e-3, "init_std": 0.125, "modules": {"embedding": {"lr": 2.0}}},
            ratios=leaven.Ratios(batch=2, tokens=8),  # batch and tokens of this run, relative to the small model's
            rule="complete-d-p",
        )

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.groups)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 4, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    run = Llama()
    data = torch.utils.data.DataLoader(torch.randint(512, (64, 128)), batch_size=8)  # your tokens
    lightning.Trainer(max_steps=20, gradient_clip_val=1.0, logger=False).fit(run, data)
    # for from_pretrained; a checkpoint lacks the multipliers
    leaven.save_folded(run.model, "runs/lightning_module", overwrite=True)
