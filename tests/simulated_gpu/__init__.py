"""A simulated GPU: tensors that say that they are on ``cuda`` and are computed on the CPU.

The code for GPUs runs with it on a machine without one. Like a GPU, it refuses operands on two
devices, and it counts how often the host would wait for the device. It says nothing about real
kernels, memory, speed, ``torch.compile``, CUDA graphs and NCCL.

``install`` changes torch for the rest of a process, so tests do it in processes of their own.
"""

NORMS_CHANNELS_LAST = 2, 15
"""Release of torch from which group norms on a GPU keep channels-last images, and do not copy."""
