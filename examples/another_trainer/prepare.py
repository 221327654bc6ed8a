"""Write the modules of the standard library as token ids, one for each byte, in nanoGPT's train.bin and val.bin."""

import os
from pathlib import Path

import numpy as np

modules = sorted(Path(os.__file__).parent.glob("*.py"))
text = "".join(module.read_text(encoding="utf-8") for module in modules).encode("ascii", "ignore")
ids = np.frombuffer(text, np.uint8).astype(np.uint16)
val_tokens = 128 * 64 + 1
ids[:-val_tokens].tofile("train.bin")
ids[-val_tokens:].tofile("val.bin")
print(f"{len(ids) - val_tokens:,} tokens in train.bin, {val_tokens:,} in val.bin")
