"""Data sets: sources of problems, tokenization, and the order in which problems are used."""

from jaxrlhf.data.arithmetic import arithmetic_records
from jaxrlhf.data.loader import Loader
