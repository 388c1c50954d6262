"""Attention kernels for accelerators, each on the arrays of one device; `kernel_choice` selects the kernels."""
