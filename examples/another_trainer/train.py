"""Train a small GPT on train.bin, as nanoGPT does. This file knows nothing of leaven."""

import argparse
import itertools
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

block_size, vocab_size, n_embd, n_head, n_layer = 64, 128, 64, 4, 2
batch_size, warmup_iters = 16, 20
parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float, default=1e-3)
parser.add_argument("--weight_decay", type=float, default=0.1)
parser.add_argument("--beta2", type=float, default=0.95)
parser.add_argument("--init_std", type=float, default=0.02)
parser.add_argument("--max_iters", type=int, default=160)
parser.add_argument("--eval_interval", type=int, default=10)
parser.add_argument("--seed", type=int, default=1337)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.c_fc, self.c_out = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, init_std):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f = nn.LayerNorm(n_embd)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x, y):
        x = self.ln_f(self.blocks(self.wte(x) + self.wpe.weight))
        return F.cross_entropy(F.linear(x, self.wte.weight).flatten(0, 1), y.flatten())


def tokens(name):
    return torch.from_numpy(np.fromfile(name, np.uint16).astype(np.int64))


def windows(data, starts):
    rows = torch.stack([data[i : i + block_size + 1] for i in starts])
    return rows[:, :-1], rows[:, 1:]


def validation():
    data = tokens("val.bin")
    return windows(data, range(0, len(data) - block_size, block_size))


def train(model, batches, config):
    """Train on batches (x, y), and yield the training loss of each step."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, config.beta2))
    for step, batch in enumerate(itertools.islice(batches, config.max_iters), 1):
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        progress = max(step - warmup_iters, 0) / (config.max_iters - warmup_iters)
        decay = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(step / warmup_iters, decay)
        optimizer.step()
        yield loss.item()


def main():
    config = parser.parse_args()
    torch.manual_seed(config.seed)
    torch.set_num_threads(1)
    data, held_out, model = tokens("train.bin"), validation(), GPT(config.init_std)
    last = len(data) - block_size
    batches = (windows(data, torch.randint(last, (batch_size,))) for _ in itertools.count())
    for step, _ in enumerate(train(model, batches, config), 1):
        if step % config.eval_interval == 0:
            with torch.no_grad():
                print(f"step {step}: val loss {model(*held_out):.4f}")


if __name__ == "__main__":
    main()
