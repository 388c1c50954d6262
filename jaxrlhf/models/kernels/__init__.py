"""Attention kernels of accelerators, each on the arrays of one device; `kernel_choice` decides which are used."""
