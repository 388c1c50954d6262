"""Block manager: which pages hold which slot's tokens; it knows no array."""

from collections.abc import Sequence

from jaxrlhf.models.attention.pages import NO_PAGE

_Beginning = tuple[int | None, tuple[int, ...]]
"""Content of a full page of a prompt: its tokens, after those of the page before it, which is there as long."""


class BlockManager:
    """The pages of some slots, which share what their prompts have in common.

    A page that a prompt fills is never written again, so that every slot whose prompt begins alike can read it:
    the responses of a group, and prompts that begin with the same examples. It is free when the last of them is done.

    Attributes:
      numbered: Pages that were ever in use at once; their numbers are below.
    """

    def __init__(self, *, slots: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._readers: dict[int, int] = {}
        self._free: list[int] = []
        self._page_of: dict[_Beginning, int] = {}
        self._beginning_of: dict[int, _Beginning] = {}
        self.numbered = 0

    def held(self, slot: int) -> Sequence[int]:
        """Pages of a slot, in the order of its tokens."""
        return self._held[slot]

    def hold(self, slot: int, tokens: int) -> None:
        """Give a slot as many pages as these tokens need; take back those beyond, all of them where there are none."""
        pages = self._held[slot]
        needed = -(-tokens // self._page_tokens)
        while len(pages) > needed:
            self._give_back(pages.pop())
        while len(pages) < needed:
            pages.append(self._take())

    def place(self, slot: int, prompt: Sequence[int]) -> list[int]:
        """Give a slot the pages of a prompt.

        Returns:
          Where each part of the prompt is to be written; `NO_PAGE` where it is there already.
        """
        self.hold(slot, 0)
        pages, written = self._held[slot], []
        for start in range(0, len(prompt) - self._page_tokens + 1, self._page_tokens):
            beginning = (pages[-1] if pages else None, tuple(prompt[start : start + self._page_tokens]))
            known = self._page_of.get(beginning)
            page = self._take() if known is None else known
            if known is None:
                self._page_of[beginning], self._beginning_of[page] = page, beginning
            else:
                self._readers[page] += 1
            pages.append(page)
            written.append(page if known is None else NO_PAGE)
        self.hold(slot, len(prompt))
        return written + pages[len(written) :]

    def _take(self) -> int:
        if not self._free:
            self._free.append(self.numbered)
            self.numbered += 1
        page = self._free.pop()
        self._readers[page] = 1
        return page

    def _give_back(self, page: int) -> None:
        self._readers[page] -= 1
        if not self._readers[page]:
            del self._readers[page]
            self._free.append(page)
            if page in self._beginning_of:
                del self._page_of[self._beginning_of.pop(page)]
