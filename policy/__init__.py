"""The trained model: model families, LoRA adapters, sampling, precision and published weights."""

import logging

# diffusers imports torchao if it is installed. With a CPU build of torch its CUDA extensions do not
# load, and diffusers looks for classes that it lacks: the warnings do not matter to Sol-RL
for _name in ("torchao", "diffusers.quantizers.torchao.torchao_quantizer", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
