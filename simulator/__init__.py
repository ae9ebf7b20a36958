"""The real driver on a virtual clock: pools, queues and ring, with actors that only take time."""
