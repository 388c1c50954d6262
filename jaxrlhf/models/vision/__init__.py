"""Vision towers: images to features that stand among a decoder's tokens."""
