"""Attention over pages: the interface, a plain-torch reference, and Triton kernels."""
