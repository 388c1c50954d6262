"""Vision towers: images to features that take the place of a decoder's placeholder tokens."""
