"""Models on slices of the pool, called through groups."""

from jaxrlhf.workers.build import Builder, Roles
from jaxrlhf.workers.group import Group, Lane, Timeline

__all__ = ["Builder", "Group", "Lane", "Roles", "Timeline"]
