"""Inference servers (vLLM, SGLang) as rollout engines: their HTTP protocols, and an engine that calls them."""
