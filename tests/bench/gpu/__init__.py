"""Benchmarks of the GPU path: kernels alone, and whole steps of models with random weights of the real shapes."""
