"""Saving and restoring of runs with orbax, and loading of the weights that runs start from."""

from jaxrlhf.checkpoint.checkpoints import Checkpoints
from jaxrlhf.checkpoint.damage import Damaged
from jaxrlhf.checkpoint.identity import identity
from jaxrlhf.checkpoint.items import Item, TreeItem
from jaxrlhf.checkpoint.pretrained import check_local, check_pretrained, convert, load_pretrained
