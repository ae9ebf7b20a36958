"""Table of the precision backends of the explore stage by name.

A new backend is a row here and the file that it names. Reading a configuration does not import
these files.
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
"""Values of ``explore.backend`` and the class that implements each, as ``module:class``.

The further value "auto" tries, in this order, the backends whose ``auto_on`` is the device type.
"""

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[("auto", *BACKENDS)]
