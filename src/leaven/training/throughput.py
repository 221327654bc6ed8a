"""The peak that MFU is measured against."""

import re

from leaven.planning.hardware import ACCELERATORS


def peak_flops(device_name: str, compute: str) -> float | None:
    """Dense peak FLOP/s of a device by the name its driver gives, or None where it is not known.

    The table of accelerators holds bf16 peaks; for another dtype, as for a CPU, there is no number rather than a
    wrong one (a trainer that took unknown devices for an A100 printed an MFU three times too high).
    """
    if compute != "bf16":
        return None
    words = set(re.split(r"[\s\-_/]+", device_name.upper()))
    for known in ACCELERATORS.values():
        model, *form = known.name.upper().split("-")
        pcie = "PCIE" in form
        if model in words and pcie == ("PCIE" in words):
            return known.peak_tflops * 1e12
    return None
