"""Batches for SPMD programs: packing, shared prompts, microbatch shapes, and how calls are split over ranks."""
