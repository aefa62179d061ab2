"""Tensor and expert parallel: one model over several ranks of one host, each with a device and a process of its own.

Rank 0 is the worker: it owns the queue, the engine and every decision. The others hold shares of the weights and of the
keys and values, and repeat what it tells them (`worker.parallel.messages`) in the order in which it does it itself.
"""
