"""Fused twins of the operations, in Triton. Imported only where there is a device (or Triton's interpreter)."""
