"""``sol-rl plan`` compared with a GPU's allocator; without Ray, so that it runs in ``make
gpu-check``.
"""

import pytest
import torch

from policy import meta, pass_cost
from policy.explorer import Explorer
from policy.families import family_for
from policy.precision.backends import BACKENDS
from policy.sampling.noise import noise_for
from tests.tiny_families import tiny_model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_an_explorer_on_a_gpu(tiny_sd3_dir):
    """Weights match up to the allocator's blocks of 512 bytes per tensor; with passes, within a
    factor of two.
    """
    family = family_for(tiny_model("sd3", tiny_sd3_dir))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    real = Explorer(family, BACKENDS["bf16"], (), "cuda", torch.bfloat16)
    tensors = [
        *real.transformer.parameters(),
        *real.transformer.buffers(),
        *real.vae.parameters(),
        *real.vae.buffers(),
    ]
    held = pass_cost.held_bytes(real.transformer, real.vae)
    assert held <= torch.cuda.memory_allocated() - before <= held + 512 * len(tensors)
    blank = meta.meta_denoiser(family, torch.bfloat16)
    planned = pass_cost.denoiser_cost(family, blank, 64, torch.bfloat16).peak
    x = noise_for(range(64), family.latent_shape).cuda()
    cond = pass_cost.conditioning_like(family, 64, torch.bfloat16, "cuda")
    with torch.no_grad():
        # libraries allocate workspaces
        family.velocity(real.transformer, x, torch.tensor(0.5), cond)
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        family.velocity(real.transformer, x, torch.tensor(0.5), cond)
    assert 0.5 < planned / (torch.cuda.max_memory_allocated() - start) < 2
