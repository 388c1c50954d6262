"""Error for a checkpoint whose files changed after saving."""

from jaxrlhf.config import Refusal


class Damaged(Refusal):
    """Checkpoint with files that differ from the saved files."""
