"""RL algorithms, one file each: the steps that the controller runs."""

__all__: list[str] = []
