"""The trained model: families, LoRA, sampling, precision, and what is published of it."""

import logging

# diffusers imports torchao where that is installed. Beside a CPU build of torch its CUDA extensions
# do not load, and diffusers looks for classes that it lacks: warnings that concern nobody here
for _name in ("torchao", "diffusers.quantizers.torchao.torchao_quantizer", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
