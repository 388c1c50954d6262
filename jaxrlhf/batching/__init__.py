"""Batches for SPMD programs: packing, shared prompts, microbatch shapes, and distribution of calls over ranks."""
