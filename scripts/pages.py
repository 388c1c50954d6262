"""Parts of the pages in docs/ that scripts write: each lies between two marks."""

from collections.abc import Mapping


def written(page: str, parts: Mapping[str, str]) -> str:
    """The page with each part between its marks renewed.

    Raises:
      ValueError: The page has no marks for a part.
    """
    for name, text in parts.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, begun, rest = page.partition(start)
        _, ended, after = rest.partition(end)
        if not (begun and ended):
            raise ValueError(f"the page has no place for {name!r}; mark it with {start} and {end}")
        page = f"{before}{start}\n{text}\n{end}{after}"
    return page
