"""Precision backends of exploring, by name. A new one is a row here and the file that it names.

Reading a configuration imports nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

BACKENDS: dict[str, str] = {
    "te_nvfp4": "policy.precision.te_nvfp4:EngineNVFP4",
    "torch_nvfp4": "policy.precision.torch_nvfp4:TorchNVFP4",
    "fp8": "policy.precision.fp8:FP8",
    "emulated_nvfp4": "policy.precision.emulated:EmulatedNVFP4",
    "bf16": "policy.precision.unquantized:BF16",
    "fp32": "policy.precision.unquantized:FP32",
}
"""What ``explore.backend`` may be besides "auto", and the class that speaks for it:
``module:class``. "auto" tries, in this order, those whose class says so.
"""

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[("auto", *BACKENDS)]
