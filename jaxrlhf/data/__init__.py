"""Problems: where they come from, how they become tokens, and in which order they are used."""

from jaxrlhf.data.arithmetic import arithmetic_records
from jaxrlhf.data.loader import Loader
