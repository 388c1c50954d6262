"""Attention kernels of accelerators."""
