"""``make rehearsal``: compare one iteration of a published architecture on CPUs with its plan.

    make rehearsal ARGS="sana-1.6b"        # about 20 GB of free memory, 15 minutes on two cores

The iteration goes through all services. Denoiser and autoencoder have the published sizes and
random weights; the text encoders are small, with the published output width, and the plan counts
these small ones. Compared with the plan are the bytes of tensors in every actor between two tasks,
the bytes of the broadcast, and the peak size of the object store. The table also shows the memory
of each process, less that of a process that has imported the same libraries; it includes the
scratch memory of forward and backward passes and the overhead of Python and Ray.
"""
