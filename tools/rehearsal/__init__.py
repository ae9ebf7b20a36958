"""One iteration of a published architecture through the whole ring on CPUs, against its plan.

    make rehearsal ARGS="sana-1.6b"        # about 20 GB of free memory, 15 minutes on two cores

Denoiser and autoencoder are the published ones with random weights; text encoders are small, with
the published width of output, and the plan counts those. What is compared with the plan: the bytes
of tensors in every actor between two tasks, of the broadcast, and at most in the object store.
Memory of the processes stands beside them, less that of a process that has imported the same
libraries: it holds the scratch memory of passes, and Python's and Ray's own.
"""
