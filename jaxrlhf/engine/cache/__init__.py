"""KV cache of the slots: its storage (slots or pages), prefix reuse, and caches held in host memory."""
