"""Low-rank adapters (LoRA) and the quantized weights next to them."""
