"""The Trainer of transformers with the lr, weight decay, eps and init of every parameter: python hf_trainer.py"""

import torch
from llama import llama
from transformers import Trainer, TrainingArguments

import leaven


def trainer(folder: str, steps: int = 20) -> Trainer:
    model = llama(width=128, depth=4)
    groups = leaven.parametrize(
        model,
        base=llama(width=64, depth=2),  # the small model that was tuned, with its best values
        hyperparameters={"lr": 4e-3, "init_std": 0.125, "modules": {"embedding": {"lr": 2.0}}},
        ratios=leaven.Ratios(batch=2, tokens=8),  # batch and tokens of this run, relative to the small model's
        rule="complete-d-p",
    )
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        warmup_steps=4,
        lr_scheduler_type="cosine_with_min_lr",  # multiplies the lr of every group
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        save_strategy="no",
        report_to="none",
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(512, (64, 128))]  # your tokens
    return Trainer(model, arguments, train_dataset=data, optimizers=(torch.optim.AdamW(groups), None))


if __name__ == "__main__":
    run = trainer("runs/hf_trainer")
    run.train()
    # for from_pretrained; run.save_model() lacks the multipliers
    leaven.save_folded(run.model, "runs/hf_trainer/model", overwrite=True)
