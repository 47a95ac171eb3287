"""Accelerators by name: how many floating-point operations they do a second at most, and how much memory they have.

Peaks are those of dense bfloat16 matrix products, without sparsity, from their makers' data sheets. What torch sees of
an MI250X is one of its two dies.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind.

    Attributes:
        name: Part of the name that torch gives it.
        bf16_tflops: Peak of dense bfloat16 products, in 10^12 operations a second.
        memory_gb: Memory, in 10^9 bytes.
    """

    name: str
    bf16_tflops: float
    memory_gb: float


# The first one whose name is part of the device's is taken: longer names before those that they begin with.
KNOWN = (
    Accelerator("B200", 2250.0, 180.0),
    Accelerator("H200", 989.4, 141.0),
    Accelerator("H100 PCIe", 756.5, 80.0),
    Accelerator("H100 NVL", 835.0, 94.0),
    Accelerator("H100", 989.4, 80.0),
    Accelerator("H800", 989.4, 80.0),
    Accelerator("H20", 148.0, 96.0),
    Accelerator("A100-SXM4-40GB", 312.0, 40.0),
    Accelerator("A100-PCIE-40GB", 312.0, 40.0),
    Accelerator("A100", 312.0, 80.0),
    Accelerator("A800", 312.0, 80.0),
    Accelerator("A10G", 70.0, 24.0),
    Accelerator("L40S", 362.05, 48.0),
    Accelerator("L4", 121.0, 24.0),
    Accelerator("RTX 4090", 165.2, 24.0),
    Accelerator("MI325X", 1307.4, 256.0),
    Accelerator("MI300X", 1307.4, 192.0),
    Accelerator("MI250X", 191.5, 64.0),
)


def accelerator_named(name: str) -> Accelerator | None:
    """Return what is known of a device, by the name that torch gives it; None if nothing is."""
    folded = name.casefold()
    return next((each for each in KNOWN if each.name.casefold() in folded), None)
