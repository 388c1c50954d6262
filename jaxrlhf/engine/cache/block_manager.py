"""Block manager: assignment of pages to slots, without any array."""

from collections.abc import Sequence

from jaxrlhf.models.attention.pages import NO_PAGE

_Beginning = tuple[int | None, tuple[int, ...]]
"""Key of a full prompt page: the previous page and the tokens of this page. The previous page is not freed earlier."""


class BlockManager:
    """Page table of some slots; slots share the full pages of a common prompt prefix.

    A page that a prompt fills is never written again, so every slot whose prompt has the same prefix can read it: the
    responses of a group, and prompts with the same few-shot examples. The page is free when its last reader is done.

    Attributes:
      numbered: Maximum number of pages in use at once so far; page numbers are below this number.
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
        """Return the pages of a slot, in the order of its tokens."""
        return self._held[slot]

    def hold(self, slot: int, tokens: int) -> None:
        """Give a slot the number of pages that its tokens need, and take back the rest; 0 tokens free all pages."""
        pages = self._held[slot]
        needed = -(-tokens // self._page_tokens)
        while len(pages) > needed:
            self._give_back(pages.pop())
        while len(pages) < needed:
            pages.append(self._take())

    def place(self, slot: int, prompt: Sequence[int]) -> list[int]:
        """Give a slot the pages of a prompt.

        Returns:
          Page to write each part of the prompt to; `NO_PAGE` if a shared page holds that part already.
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
