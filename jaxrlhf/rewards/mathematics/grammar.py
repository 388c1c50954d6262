"""Parser of answers: quantities, lists, intervals, relations and tables; it reads the whole text or fails."""

from dataclasses import replace
from typing import Any

from jaxrlhf.rewards.mathematics.arithmetic import ExpressionReader
from jaxrlhf.rewards.mathematics.expressions import Expr, number, operation, real, symbol
from jaxrlhf.rewards.mathematics.sets import joined, unitless, without
from jaxrlhf.rewards.mathematics.tokens import CLOSED, OPENED, Token, Unread, is_name
from jaxrlhf.rewards.mathematics.units import amount_of
from jaxrlhf.rewards.mathematics.values import (
    Compound,
    Congruence,
    Items,
    Quantity,
    Ratio,
    Relation,
    SolutionFamily,
    Table,
    Union,
    Words,
    both_signs,
)
from jaxrlhf.rewards.mathematics.words import NOISE, NUMBERS, ORDINALS, UNITS, VERBS

_SIGNS = {"=": "=", "<": "<", ">": ">"}
_COMMANDS = {"le": "<=", "ge": ">=", "ne": "!=", "neq": "!=", "lt": "<", "gt": ">", "approx": "=", "in": "in"}
_JOINERS = {",": ",", ";": ",", "and": "and", "or": "or", "lor": "or", "land": "and", "vee": "or", "wedge": "and",
            "&": "and", "\\\\": ","}  # fmt: skip
_CURRENCIES = {"euro": "€", "texteuro": "€", "pounds": "£", "textsterling": "£", **{sign: sign for sign in "$£€¥₹"}}
_BEFORE_UNIT = ("/", "per", "sq", "square", "cu", "cubic")
_LEADING = ("approx", "approximately", "about", "exactly", "roughly", "around", "only", "the")
_MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MOST_UNIT_WORDS = 3


class AnswerReader(ExpressionReader):
    """Parser of the tokens of one answer."""

    def answer(self) -> Any:
        """Read all tokens and return the answer's value.

        Raises:
          Unread: Some tokens do not belong to a value.
        """
        value = self.values("")
        if self.place < len(self.tokens):
            raise Unread(f"{self.tokens[self.place].text!r} cannot be read here")
        return value

    def values(self, bracket: str) -> Any:
        """Read values separated by commas, `and` or `or`; a single value without a bracket is returned as it is."""
        found, joiner, logical = [self.item()], ",", False
        while (token := self.peek()) is not None and token.text in _JOINERS and token.kind != "letter":
            self.place += 1
            logical |= token.kind == "command"
            joiner = _JOINERS[token.text] if _JOINERS[token.text] != "," else joiner
            if self.accept("and", "or"):
                joiner = self.tokens[self.place - 1].text
            if token.text == "," and self.closing():
                break
            found.append(self.item())
        if logical and not all(isinstance(each, Relation) for each in found):
            raise Unread("a logical sign between values that are not relations")
        found = [each for one in found for each in both_signs(one)]
        families = [each for each in found if isinstance(each, SolutionFamily) and each.value is None]
        if families and len(found) > len(families):
            (clause, *_), rest = families, [each for each in found if each not in families]
            value = rest[0] if len(rest) == 1 else Items(tuple(rest), bracket, joiner)
            return SolutionFamily(value, clause.name, clause.domain)
        if len(found) == 1 and not bracket:
            return found[0]
        return Items(tuple(found), bracket, joiner)

    def closing(self) -> bool:
        """Return whether the next token closes a bracket, or none is left."""
        token = self.peek()
        return token is None or token.text in CLOSED

    def item(self) -> Any:
        """Read one value: a chain of comparisons, or one side."""
        name = self.name()
        if name is not None:
            self.place += 1
            inner = self.chain()
            if isinstance(inner, Relation) and set(inner.signs) == {"="}:
                return Relation((name, *inner.sides), ("=", *inner.signs), named=True)
            return Relation((name, inner), ("=",), named=True)
        token, start = self.peek(), self.place
        if token is not None and token.kind == "letter" and token.text.isupper() and self.next_is(1, "("):
            self.place += 2
            point = self.bracketed("(")
            if isinstance(point, Items):
                return Relation((Quantity(symbol(token.text)), point), ("=",), named=True)
            self.place = start
        return self.chain()

    def name(self) -> Any:
        """Read the name before an equals sign, so that the sign is next; return None if no name precedes a sign."""
        depth, end = 0, self.place
        while end < len(self.tokens):
            token = self.tokens[end]
            depth += (token.text in OPENED) - (token.text in CLOSED)
            if depth < 0 or (depth == 0 and token.text in _JOINERS and token.kind != "letter"):
                return None
            if depth == 0 and (token.text == "=" or (token.kind == "command" and token.text == "approx")):
                break
            if depth == 0 and (token.text in _SIGNS or token.text in _COMMANDS):
                return None
            end += 1
        left = self.tokens[self.place : end]
        if end == len(self.tokens) or not left or not is_name(left):
            return None
        start, self.place = self.place, end
        if left[0].kind == "letter" and (len(left) == 1 or left[1].text == "_"):
            self.place = start
            expr = self.power()
            if self.place == end:
                return Quantity(expr)
            self.place = end
        return Words("".join(token.text for token in left).lower())

    def chain(self) -> Any:
        """Read sides with comparisons between them."""
        sides, signs = [self.side()], []
        while (sign := self.sign()) is not None:
            if sign == "equiv":
                return self.congruence(sides[0])
            sides.append(self.side())
            signs.append(sign)
        if not signs and self.accept("pmod"):
            return Congruence(None, (unitless(sides[0]),), self.argument())
        if not signs:
            return sides[0]
        if signs == ["in"]:
            inside = sides[1]
            if isinstance(sides[0], Quantity):
                _only_symbol(sides[0].expr)
            if isinstance(inside, Words) and isinstance(sides[0], Quantity):
                return SolutionFamily(None, _only_symbol(sides[0].expr), inside.text)
            return inside
        if "in" in signs:
            raise Unread("a membership inside a chain of comparisons")
        return Relation(tuple(sides), tuple(signs))

    def sign(self) -> str | None:
        """Read the sign of a comparison, if one is next."""
        token = self.peek()
        if token is None:
            return None
        found = _SIGNS.get(token.text) if token.kind == "sign" else None
        if token.kind == "command":
            found = "equiv" if token.text == "equiv" else _COMMANDS.get(token.text)
        if found is None:
            return None
        self.place += 1
        if found in "<>" and self.accept("="):
            found += "="
        return found

    def congruence(self, left: Any) -> Congruence:
        """Read the rest of a congruence, after its sign."""
        rests = [self.expr(self.sum())]
        while self.accept(",", "or", "and"):
            rests.append(self.expr(self.sum()))
        self.accept("(")
        if not (self.accept("pmod") or self.accept("mod") or self.accept("bmod")):
            raise Unread("a congruence without its modulus")
        modulus = self.argument()
        self.accept(")")
        return Congruence(unitless(left), tuple(rests), modulus)

    def side(self) -> Any:
        """Read a union of sets, or a quantity."""
        value = self.quantity()
        while (token := self.peek()) is not None and token.text in ("cup", "setminus", "backslash", "-"):
            self.place += 1
            other = self.quantity()
            value = joined(value, other) if token.text == "cup" else without(value, other)
        return value

    def quantity(self) -> Any:
        """Read a number or formula with its unit, a ratio, or words."""
        while self.accept(*_LEADING):
            pass
        token = self.peek()
        if token is None:
            raise Unread("expected a quantity")
        spelled = self.spelled() if self.depth == 0 else None
        if spelled is not None:
            return self.with_unit(spelled)
        if token.kind == "word":
            return self.words()
        negative = self.accept("-") if self.next_is(1, *_CURRENCIES) else False
        money = _CURRENCIES[self.tokens[self.place - 1].text] if self.accept(*_CURRENCIES) else ""
        value = self.sum()
        if isinstance(value, Expr) and negative:
            value = operation("neg", value)
        if not isinstance(value, Expr):
            return value
        money = _CURRENCIES[self.tokens[self.place - 1].text] if self.accept(*_CURRENCIES) else money
        if self.next_is(0, ":"):
            return self.ratio(value)
        quantity = self.with_unit(value)
        if money and not quantity.percent:
            rate = quantity.unit if quantity.unit.startswith(("per ", "/ ")) else ""
            quantity = replace(quantity, unit=f"{money} {rate}".strip())
        more = [quantity]
        while quantity.unit and (token := self.peek()) is not None and token.kind == "number":
            more.append(self.with_unit(self.expr(self.sum())))
        if len(more) > 1:
            if amount_of(more) is None:
                raise Unread("a number after a quantity")
            return Compound(tuple(more))
        return quantity

    def ratio(self, first: Expr) -> Ratio:
        """Read the rest of a ratio or a time of day, after its first number."""
        start = self.place - 1
        parts = [first]
        while (colon := self.peek()) is not None and self.accept(":"):
            after = self.peek()
            if after is None or after.spaced != colon.spaced:
                raise Unread("a colon that separates no numbers")
            parts.append(self.expr(self.sum()))
        texts = [token.text for token in self.tokens[start : self.place] if token.text != ":"]
        clock = len(texts) == len(parts) and texts[0].isdigit() and int(texts[0]) <= 24
        clock = clock and all(len(text) == 2 and text.isdigit() and int(text) < 60 for text in texts[1:])
        clock = clock and (len(texts) == 2 or any(text.startswith("0") for text in texts))
        suffix = ""
        while (token := self.peek()) is not None and token.kind == "word":
            suffix += token.text.replace(".", "").lower()
            self.place += 1
        if suffix not in ("", "am", "pm"):
            raise Unread("words after a ratio")
        return Ratio(tuple(parts), clock, suffix)

    def with_unit(self, value: Expr) -> Quantity:
        """Read a percent sign, degrees, or the words of a unit."""
        if value.head == "degree":
            scales = {"C": "celsius", "F": "fahrenheit"}
            scale = scales[self.tokens[self.place].text] if self.next_is(0, *scales) else ""
            self.place += bool(scale)
            return Quantity(value.args[0], scale or "degree")
        if value.head == "neg" and value.args[0].head == "degree":
            return Quantity(operation("neg", value.args[0].args[0]), "degree")
        base, self.base = self.base, None
        if base is not None:
            if value.head != "number":
                raise Unread("a number with a base within a formula")
            return Quantity(value, base=base[1], digits=base[0])
        if self.accept("%", "percent"):
            return Quantity(value, percent=True)
        words: list[str] = []
        while (token := self.peek()) is not None:
            if token.kind == "word" and token.text not in _JOINERS:
                if token.text.lower() in VERBS or token.text.lower() in NUMBERS:
                    raise Unread("a sentence after a number")
                words.append(token.text)
            elif words and token.text == "^" and self.next_is(1, "2", "3", "{", "-"):
                self.place += 1
                exponent = real(self.argument())
                if exponent is None or exponent != int(exponent):
                    raise Unread("a unit with an exponent that is not a whole number")
                words[-1] += f"^{int(exponent)}"
                continue
            elif token.text == "/" and self.follows_unit():
                words.append("/")
            elif words and token.text in ("cdot", "*") and self.follows_unit():
                pass
            elif words and words[-1] in _BEFORE_UNIT and token.kind == "letter":
                words.append(token.text)
            else:
                break
            self.place += 1
        if words and words[0].lower() in _MULTIPLES:
            value = operation("mul", value, number(_MULTIPLES[words.pop(0).lower()]))
        inches = len(words) - (words[-1:] == ["in"])
        cut = next((place for place, word in enumerate(words[:inches]) if word.lower() in NOISE), len(words))
        unit = " ".join(words[:cut])
        if cut - words[:cut].count("/") > _MOST_UNIT_WORDS:
            raise Unread("a sentence after a number")
        if unit.lower() == "percent":
            return Quantity(value, percent=True)
        return Quantity(value, unit)

    def follows_unit(self) -> bool:
        """Return whether a word or the letter of a unit follows the next token."""
        after = self.tokens[self.place + 1 : self.place + 2]
        return any(token.kind == "word" or token.text in UNITS for token in after)

    def words(self) -> Words | Quantity:
        """Read an ordinal number, or words with numbers and signs, up to a comma, semicolon, equals sign or bracket."""
        found = ""
        while (token := self.peek()) is not None and token.text not in (",", ";", "=", *CLOSED):
            if token.kind not in ("word", "letter", "sign", "number", "constant", "function"):
                raise Unread("a command within words")
            found += token.text
            self.place += 1
        text = found.lower().replace(".", "").rstrip("!?")
        return Quantity(number(ORDINALS[text]), "th") if text in ORDINALS else Words(text)

    def bracketed(self, opened: str) -> Any:
        """Read the content of brackets: a group, a point, an interval or a set."""
        if opened == "\\{" and self.next_is(0, "begin"):
            self.place += 1
            table = self.table()
            self.accept("\\}")
            return Table(table.rows, cases=True)
        closers = {"(": (")", "]"), "[": ("]", ")"), "\\{": ("\\}",), "langle": ("rangle",), "<": (">",)}[opened]
        if self.accept(*closers):
            if opened == "\\{":
                return Union(())
            raise Unread("empty brackets")
        inner = self.values(opened)
        if opened == "\\{" and (self.accept("|", ":", "mid")):
            condition = self.values("")
            if not self.accept(*closers):
                raise Unread("a set is not closed")
            if isinstance(condition, SolutionFamily) and condition.value is None:
                (formula,) = inner.values
                return SolutionFamily(formula, condition.name, condition.domain)
            return condition
        if not self.accept(*closers):
            raise Unread(f"{opened} is not closed")
        shut = self.tokens[self.place - 1].text
        assert isinstance(inner, Items | SolutionFamily)
        if isinstance(inner, SolutionFamily):
            return inner
        if len(inner.values) == 1 and opened in "([":
            (only,) = inner.values
            if isinstance(only, Quantity) and not only.unit and not only.percent and only.base is None:
                return only.expr
            return only
        return Items(inner.values, {"langle": "()", "\\{": "{}", "<": "()"}.get(opened, opened + shut))

    def table(self) -> Table:
        """Read an environment of rows, after `\\begin`."""
        kind = self.subscript().rstrip("*")
        if kind == "vmatrix":
            raise Unread("a determinant")
        rows: list[list[list[Token]]] = [[[]]]
        depth = 0
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            self.place += 1
            if token.kind == "command" and token.text == "end" and depth == 0:
                self.subscript()
                break
            depth += (token.text == "begin") - (token.text == "end")
            if depth == 0 and token.text == "\\\\":
                rows.append([[]])
            elif depth == 0 and token.text == "&":
                rows[-1].append([])
            elif token.text not in ("hline",):
                rows[-1][-1].append(token)
        else:
            raise Unread("an environment is not ended")
        kept = [[cell for cell in row if cell] for row in rows]
        found = tuple(tuple(type(self)(_without_condition(cell)).answer() for cell in row) for row in kept if row)
        if not found:
            raise Unread("an empty environment")
        return Table(found, cases=kind in ("cases", "dcases", "rcases"))


def _without_condition(cell: list[Token]) -> list[Token]:
    """Return a table cell without a leading `if`, `for` or comma before its condition, and without end punctuation."""
    while cell and cell[0].text in ("if", "for", "when", ",", "otherwise,"):
        cell = cell[1:]
    while cell and cell[-1].text in (",", ";", "."):
        cell = cell[:-1]
    return cell or [Token("word", "otherwise")]


def _only_symbol(expr: Expr) -> str:
    if expr.head == "symbol":
        return str(expr.args[0])
    if expr.head in ("i", "e"):
        return expr.head
    raise Unread("a formula before a membership sign")
