"""Saving and restoring everything a run is, with orbax."""

from jaxrlhf.checkpoint.checkpoints import Checkpoints
from jaxrlhf.checkpoint.items import Item, TreeItem

__all__ = ["Checkpoints", "Item", "TreeItem"]
