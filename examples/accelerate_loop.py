"""accelerate with the lr, weight decay, eps and init of every parameter: accelerate launch accelerate_loop.py"""

import torch
from accelerate import Accelerator
from llama import llama
from transformers import get_cosine_schedule_with_warmup

import leaven


def train(steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = llama(width=128, depth=4)
    groups = leaven.parametrize(  # before prepare, which wraps the model
        model,
        base=llama(width=64, depth=2),  # the small model that was tuned, with its best values
        hyperparameters={"lr": 4e-3, "init_std": 0.125, "modules": {"embedding": {"lr": 2.0}}},
        ratios=leaven.Ratios(batch=2, tokens=8),  # batch and tokens of this run, relative to the small model's
        rule="complete-d-p",
    )
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(groups)
    processes = accelerator.num_processes  # accelerate advances the schedule by one step for each process
    scheduler = get_cosine_schedule_with_warmup(optimizer, 4 * processes, steps * processes)
    data = torch.utils.data.DataLoader(torch.randint(512, (8 * steps * processes, 128)), batch_size=8)  # your tokens
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    for tokens in data:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model), optimizer


if __name__ == "__main__":
    # for from_pretrained; a state dict lacks the multipliers
    leaven.save_folded(train()[0], "runs/accelerate_loop", overwrite=True)
