"""Models on pools of devices, called through groups."""

from jaxrlhf.workers.build import Stage
from jaxrlhf.workers.group import Group, Pending, Timeline
from jaxrlhf.workers.launch import launch
from jaxrlhf.workers.model import Progress
from jaxrlhf.workers.pools import Pools, Roles
from jaxrlhf.workers.roles import response_texts
from jaxrlhf.workers.settings import Row

__all__ = [
    "Group",
    "Pending",
    "Pools",
    "Progress",
    "Roles",
    "Row",
    "Stage",
    "Timeline",
    "launch",
    "response_texts",
]
