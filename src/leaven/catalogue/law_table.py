"""Empirical laws for learning rate, batch, weight decay and loss: constants, units, range, source and trust as data.

The laws disagree by an order of magnitude at 7B, and in sign: lr rises with tokens in Step Law (its batch grows with
them) and falls in Bjorck's (its batch is fixed). Read the spread, not one of them.
"""

from leaven.catalogue.law_forms import (
    Fitted,
    Law,
    LogLinear,
    LossLaw,
    Power,
)

_LOSS_FROM = "loss taken from Chinchilla's approach 3"
CHINCHILLA_LOSS = LossLaw(irreducible=1.69, a=406.4, alpha=0.34, b=410.7, beta=0.28)
REPLICATION_LOSS = LossLaw(irreducible=1.8172, a=482.0, alpha=0.3478, b=2085.4, beta=0.3658)
TAU = Power(1.084, params=0.527, tokens=-0.527)
_KAPLAN_RUNS = Fitted(params=(768, 1.5e9))  # the lower end is from memory
_CHINCHILLA_RUNS = Fitted(params=(70e6, 16e9), tokens=(5e9, 500e9))

KAPLAN_LR = Law(
    "Kaplan 2020 learning rate",
    "non-embedding",
    "batch 0.5M tokens, cosine, pre-norm transformers of 2019, s 1024",
    "arXiv 2001.08361, appendix D.6",
    "verified",
    lr=LogLinear(3.239e-3, -1.395e-4),
    lr_batch=2**19,
    fitted=_KAPLAN_RUNS,
)
KAPLAN_BATCH = Law(
    "Kaplan 2020 critical batch",
    "non-embedding",
    f"WebText2, definition of McCandlish 2018; {_LOSS_FROM}",
    "arXiv 2001.08361, section 5.1",
    "verified",
    doubt="the loss of another text and tokenizer than WebText2's goes in to the power -4.8",
    batch=Power(2e8, loss=-1 / 0.21),
    batch_kind="critical",
    fitted=_KAPLAN_RUNS,
)
DEEPSEEK = Law(
    "DeepSeek LLM 2024",
    "non-embedding",
    "multi-step schedule, compute-optimal; C taken as 6 N D, in the paper non-embedding FLOPs with attention",
    "arXiv 2401.02954, section 3.1",
    "verified",
    lr=Power(0.3118, compute=-0.1250),
    batch=Power(0.2920, compute=0.3271),
    batch_kind="optimal",
    fitted=Fitted(compute=(1e17, 2e19)),
)
MINICPM = Law(
    "MiniCPM 2024",
    "non-embedding",
    f"WSD, C4; {_LOSS_FROM}; its lr 0.01 is a muP base and says nothing of yours",
    "arXiv 2404.06395, section 3",
    "verified",
    doubt="the loss of another text and tokenizer than C4's goes in to the power -6.2",
    batch=Power(1.21e9, loss=-6.24),
    batch_kind="optimal",
    fitted=Fitted(params=(9e6, 170e6)),
)
STEP_LAW = Law(
    "Step Law 2025",
    "non-embedding",
    "AdamW, weight decay 0.1, s 2048, cosine to a fixed 1e-5; dense and MoE; the lr is that of its own batch",
    "arXiv 2503.04715, equation 1",
    "verified",
    doubt="95% of its bootstraps: N^-0.82 .. -0.63, D^0.25 .. 0.36, batch D^0.52 .. 0.63",
    lr=Power(1.79, params=-0.713, tokens=0.307),
    # A fit to its 1,911 open dense runs at fixed batch: lr ~ N^-0.61 D^0.01 B^0.31.
    lr_batch_exponent=0.31,
    batch=Power(0.58, tokens=0.571),
    batch_kind="optimal",
    fitted=Fitted(params=(60e6, 1e9), tokens=(2e9, 100e9)),
)
PORIAN = Law(
    "Porian 2024",
    "without input embedding",
    "compute-optimal tokens, beta2 tuned at small batch (0.99, 0.999), s 2048",
    "arXiv 2406.19146",
    "verified",
    doubt="that N has the head and not the input embedding is from memory",
    lr=Power(3.7, params=-0.36),
    batch=Power(0.7576, params=0.703),
    batch_kind="optimal",
    # Our reading of "compute-optimal": half to twice 20.
    fitted=Fitted(params=(5e6, 901e6), tokens_per_param=(10, 40)),
)
PORIAN_ROUNDED = Law(
    "Porian 2024, rounded",
    "without input embedding",
    "the paper's rule of thumb: exponents -1/3 and 2/3 through lr 0.0047 and 160 sequences of 2048 at 108M",
    "arXiv 2406.19146",
    "verified",
    lr=Power(0.0047, params=-1 / 3, per=108e6),
    batch=Power(160, params=2 / 3, unit=2048, per=108e6),
    batch_kind="optimal",
    fitted=PORIAN.fitted,
    form_of=PORIAN.name,
)
POWER_LINES = Law(
    "Power Lines 2025",
    "all",
    "CompleteP or muP models, SlimPajama, s 2048; its lr follows from tau and your weight decay",
    "arXiv 2505.13738",
    "memory",
    doubt="the exponent is verified, the coefficient is from memory; on Step Law's cells, with lr tuned again, this "
    "batch costs 1.26 per mille of loss on average; it is 25% above Step Law's own at 1B and 20B (553k, 442k)",
    batch=Power(0.0306, tokens=0.383, unit=2048),
    batch_kind="optimal",
    fitted=Fitted(params=(111e6, 3.3e9)),
)
POWER_LINES_CRITICAL = Law(
    "Power Lines 2025 critical batch",
    "all",
    "CompleteP or muP models, SlimPajama, s 2048",
    "arXiv 2505.13738",
    "memory",
    doubt="the exponent is verified, the coefficient is from memory",
    batch=Power(0.0471, tokens=0.462, unit=2048),
    batch_kind="critical",
    fitted=Fitted(params=(111e6, 3.3e9)),
)
POWER_LINES_TAU = Law(
    "Power Lines 2025 timescale",
    "all",
    "CompleteP or muP models, SlimPajama; tau = B / (lr x weight decay x D), so lr x decay = B / (tau D)",
    "arXiv 2505.13738",
    "memory",
    doubt="the exponent is verified, the coefficient is from memory",
    tau=TAU,
    fitted=Fitted(params=(111e6, 3.3e9)),
)
ZHANG = Law(
    "Zhang 2024 critical batch",
    "all",
    "20% overhead over the steps of small batches, constant lr with weight averaging, s 512; the form in D",
    "arXiv 2410.21676",
    "read",
    batch=Power(22.91, tokens=0.47, unit=512, per=1e6),
    batch_kind="critical",
    fitted=Fitted(params=(85e6, 1.2e9)),
)
ZHANG_BY_SIZE = Law(
    "Zhang 2024, by size",
    "all",
    "as above with 20 tokens a parameter: the form in N",
    "arXiv 2410.21676",
    "read",
    batch=Power(93.20, params=0.47, unit=512, per=1e6),
    batch_kind="critical",
    fitted=Fitted(params=(85e6, 1.2e9), tokens_per_param=(10, 40)),
    form_of=ZHANG.name,
)
ZHANG_ONE_DURATION = Law(
    "Zhang 2024, one duration",
    "all",
    "as above at one duration for all sizes: the form in N says that size alone hardly matters",
    "arXiv 2410.21676",
    "read",
    doubt="which duration is not known here; the range is where it meets the form in D, at 3B to 4B tokens",
    batch=Power(621.3, params=0.087, unit=512, per=1e6),
    batch_kind="critical",
    fitted=Fitted(params=(85e6, 1.2e9), tokens=(3e9, 4e9)),
    form_of=ZHANG.name,
)
CHINCHILLA = Law(
    "Chinchilla 2022 loss",
    "all",
    "approach 3 as printed; MassiveText, cosine of the run's length; another text has another loss",
    "arXiv 2203.15556, equation 10",
    "verified",
    doubt="exponents rounded to two digits: for sizes at a budget take leaven laws --flops",
    loss=CHINCHILLA_LOSS,
    fitted=_CHINCHILLA_RUNS,
)
REPLICATION = Law(
    "Besiroglu 2024 loss",
    "all",
    "approach 3 fitted again, to 240 of Chinchilla's runs read off its figure",
    "arXiv 2404.10102",
    "verified",
    doubt="standard errors: A 124.5, B 1293, E 0.026, alpha 0.015, beta 0.021",
    loss=REPLICATION_LOSS,
    fitted=_CHINCHILLA_RUNS,
)
BJORCK = Law(
    "Bjorck 2024",
    "all",
    "batch fixed at 0.5M tokens; D^-0.70 at 50M, -0.65 at 125M, -0.38 at 350M, -0.32 at 760M and 1.3B, -0.42 at 2.7B",
    "arXiv 2409.19913",
    "verified",
    doubt="exponents are verified; the constant is not recoverable, so there is no value",
    says="lr ~ N^-0.23 D^-0.32",
    fitted=Fitted(params=(50e6, 2.7e9), tokens=(0, 800e9)),
)
CEREBRAS = Law(
    "Cerebras-GPT 2023 muP",
    "all",
    "muP of base width 256, init std 0.08, embeddings x10, decay 0.1, betas 0.9 and 0.95; Pile, s 2048; batches of "
    "120, 264, 264, 528 and 528 sequences for 111M, 256M, 590M, 1.3B and 2.7B",
    "Cerebras/modelzoo configurations; arXiv 2304.03208",
    "verified",
    says="lr 6e-3 x 256 / width",
    fitted=Fitted(params=(111e6, 2.7e9), tokens_per_param=(10, 40)),
)
HAGELE = Law(
    "Hagele 2024 WSD",
    "all",
    "constant lr, then a cooldown 1 - sqrt over the last 20%",
    "arXiv 2405.18392",
    "read",
    says="lr about half of cosine's",
    fitted=Fitted(params=(0, 1e9)),
)
WANG_AITCHISON = Law(
    "AdamW timescale 2024",
    "all",
    "small models; Power Lines finds that it falls with tokens a parameter",
    "arXiv 2405.13698",
    "read",
    says="B / (lr decay D) is constant",
)
COMPLETE_D = Law(
    "Complete(d)P 2025",
    "all",
    "for AdamW, of k times the batch at the same tokens and of k times the tokens at the same batch: "
    "leaven show --rule complete-d-p",
    "arXiv 2512.22382",
    "read",
    says="lr ~ B^0.5 D^-0.5",
    fitted=Fitted(params=(50e6, 7.2e9)),
)
MUON_HYPERP = Law(
    "Muon HyperP",
    "all",
    "Muon on a sphere of fixed norm (HyperP), not AdamW; the abstract has the exponent of D, that of B is secondary",
    "arXiv 2603.28743",
    "secondary",
    says="lr ~ D^-0.32 B^0.56",
)
MOONLIGHT = Law(
    "Moonlight Muon 2025",
    "all",
    "Muon with the lr and decay of AdamW: each update is scaled to AdamW's RMS",
    "arXiv 2502.16982",
    "verified",
    says="Muon x 0.2 sqrt(max(rows, cols))",
)
LAWS = (
    KAPLAN_LR,
    KAPLAN_BATCH,
    DEEPSEEK,
    MINICPM,
    STEP_LAW,
    PORIAN,
    PORIAN_ROUNDED,
    POWER_LINES,
    POWER_LINES_CRITICAL,
    ZHANG,
    ZHANG_BY_SIZE,
    ZHANG_ONE_DURATION,
    POWER_LINES_TAU,
    CHINCHILLA,
    REPLICATION,
    BJORCK,
    CEREBRAS,
    HAGELE,
    WANG_AITCHISON,
    COMPLETE_D,
    MUON_HYPERP,
    MOONLIGHT,
)
