"""Keys and values of slots: where they lie, what of them prompts can go on from, and what waits on the host."""
