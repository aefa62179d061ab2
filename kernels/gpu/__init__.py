"""Fused twins of the operations, in Triton; products of many tokens in CUDA C++ (`clusters`).

Imported only where there is a device (or Triton's interpreter).
"""
