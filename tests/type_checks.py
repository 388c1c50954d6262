"""Type checks of annotated calls while tests run, by the rules of mypy: an int is taken where a float is declared."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
