"""Parser for sums, products, powers, roots and functions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from jaxrlhf.rewards.mathematics.expressions import CONSTANTS, Expr, number, operation, symbol
from jaxrlhf.rewards.mathematics.sets import EVERYTHING
from jaxrlhf.rewards.mathematics.tokens import Token, Unread
from jaxrlhf.rewards.mathematics.values import Items, Table, Union, Words
from jaxrlhf.rewards.mathematics.words import GREEK, NUMBERS

_BEGINS = ("frac", "sqrt", "surd", "binom", "lfloor", "lceil", "pi")
_SIGNS = ("+", "-", "pm", "mp")
_DEEPEST = 60


class ExpressionReader(ABC):
    """Recursive-descent parser of expressions.

    Attributes:
      tokens: Tokens of the answer.
      place: Index of the next token.
      base: Digits and base of the last number with a base as its subscript; None without a base.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.place, self.depth, self.bars = list(tokens), 0, 0, 0
        self.base: tuple[str, int] | None = None

    @abstractmethod
    def bracketed(self, opened: str) -> Any:
        """Read the content of brackets."""

    @abstractmethod
    def table(self) -> Any:
        """Read an environment of rows."""

    def peek(self) -> Token | None:
        """Return the next token; None at the end."""
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def next_is(self, ahead: int, *texts: str) -> bool:
        """Return whether the token `ahead` places after the next token is one of the texts."""
        place = self.place + ahead
        return place < len(self.tokens) and self.tokens[place].text in texts

    def accept(self, *texts: str) -> bool:
        """Read the next token if it is one of the texts; return whether it was read."""
        if self.next_is(0, *texts) and self.tokens[self.place].kind != "letter":
            self.place += 1
            return True
        return False

    def expr(self, value: Any) -> Expr:
        """Check that a value is an expression, and return it.

        Raises:
          Unread: The value is a list, a set or words.
        """
        if not isinstance(value, Expr):
            raise Unread("an operand that is not a number")
        return value

    def sum(self) -> Any:
        """Read terms joined by plus and minus signs, or a single value that is not an expression."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unread("brackets are too deep")
        terms = [self.signed()]
        while (token := self.peek()) is not None and token.text in _SIGNS and token.kind != "word":
            if isinstance(terms[0], Union):
                break  # a difference of sets
            self.expr(terms[0])
            self.place += 1
            terms.append(_signed(token.text, self.expr(self.signed())))
        self.depth -= 1
        return terms[0] if len(terms) == 1 else operation("add", *terms)

    def signed(self) -> Any:
        """Read a term with its sign."""
        token = self.peek()
        if token is not None and token.text in _SIGNS and token.kind != "word":
            self.place += 1
            return _signed(token.text, self.expr(self.signed()))
        return self.term()

    def term(self) -> Any:
        """Read factors that are joined by multiplication or division signs, or that are side by side."""
        value = self.power()
        while (token := self.peek()) is not None:
            if token.text in ("*", "times", "cdot", "ast") and token.kind != "letter":
                self.place += 1
                value = operation("mul", self.expr(value), self.expr(self.factor()))
            elif token.text in ("/", "div"):
                if self.tokens[self.place + 1 :] and self.tokens[self.place + 1].kind == "word":
                    return value  # a unit in the denominator
                self.place += 1
                value = operation("div", self.expr(value), self.expr(self.factor()))
            elif isinstance(value, Expr) and self.begins_factor(token):
                if token.kind == "number" and self.tokens[self.place - 1].kind == "number":
                    raise Unread("two numbers side by side")
                if value.head == "degree" and token.text in ("C", "F"):
                    return value
                if value.head == "degree" and token.kind != "letter":
                    raise Unread("a factor after degrees")
                value = operation("mul", value, self.expr(self.power()))
            else:
                return value
        return value

    def factor(self) -> Any:
        """Read a factor with an optional sign."""
        token = self.peek()
        if token is not None and token.text in ("-", "+"):
            self.place += 1
            return _signed(token.text, self.expr(self.factor()))
        return self.power()

    def begins_factor(self, token: Token) -> bool:
        """Return whether a token begins a factor that needs no multiplication sign before it."""
        if token.kind in ("number", "letter", "function", "constant", "vector"):
            return True
        if token.kind == "command":
            return token.text in _BEGINS or token.text in GREEK
        return (
            token.text in ("(", "{") or (token.text == "[" and self.depth > 0) or (token.text == "|" and not self.bars)
        )

    def power(self) -> Any:
        """Read an operand with its exponents, factorials, degrees and primes."""
        value = self.operand()
        while (token := self.peek()) is not None:
            if token.text == "^":
                self.place += 1
                if isinstance(value, Items | Table) and self.argument() == symbol("T"):
                    rows = tuple(zip(*value.rows, strict=True)) if isinstance(value, Table) else (value.values,)
                    value = Table(rows)
                    continue
                if self.degrees():
                    value = operation("degree", self.expr(value))
                    continue
                value = operation("pow", self.expr(value), self.argument())
            elif token.text == "!" and not self.next_is(1, "="):
                self.place += 1
                value = operation("factorial", self.expr(value))
            elif token.text == "'" and isinstance(value, Expr) and value.head == "symbol":
                self.place += 1
                value = symbol(value.args[0] + "'")
            else:
                return value
        return value

    def degrees(self) -> bool:
        """Read the degree sign if the exponent is a degree sign; return whether it was read."""
        braces = self.next_is(0, "{")
        if not self.next_is(int(braces), "circ"):
            return False
        self.place += 3 if braces else 1
        return True

    def operand(self) -> Any:
        """Read a number, a variable, a function or a bracket."""
        token = self.peek()
        if token is None:
            raise Unread("an operand is missing")
        self.place += 1
        match token.kind:
            case "number":
                return self.number(token)
            case "letter" | "vector":
                return self.variable(token.text)
            case "constant":
                return operation(token.text)
            case "function":
                return self.function(token.text)
            case "command":
                return self.command(token.text)
        if token.text in ("(", "[", "\\{", "<"):
            return self.bracketed(token.text)
        if token.text == "{":
            return self.inside_braces()
        if token.text in ("|", "||"):
            self.bars += 1
            inner = self.expr(self.sum())
            self.bars -= 1
            if not self.accept(token.text):
                raise Unread("bars are not closed")
            return operation("abs", inner)
        raise Unread(f"{token.text!r} does not begin a value")

    def inside_braces(self) -> Any:
        """Read a group after its opening brace."""
        bars, self.bars = self.bars, 0
        value = self.sum()
        self.bars = bars
        if not self.accept("}"):
            raise Unread("a brace is not closed")
        return value

    def number(self, token: Token) -> Expr:
        """Read the rest of a number: a base as a subscript, or the fraction of a mixed number."""
        value = number(token.value)
        if self.next_is(0, "_"):
            self.place += 1
            base = self.argument()
            if base.head != "number" or base.args[0].denominator != 1 or not token.text.isalnum():
                raise Unread("a subscript of a number")
            self.base = token.text, int(base.args[0])
            return value
        fraction = self.proper_fraction() if token.value.denominator == 1 else None
        return value if fraction is None else number(token.value + fraction)

    def spelled(self) -> Expr | None:
        """Read a number in words, such as forty-two; return None if the next words are no number."""
        text, place, found = "", self.place, None
        while place < len(self.tokens) and (self.tokens[place].kind == "word" or self.tokens[place].text == "-"):
            text += self.tokens[place].text.lower().replace("-", "")
            place += 1
            if text in NUMBERS:
                found, self.place = number(NUMBERS[text]), place
        return found

    def proper_fraction(self) -> Fraction | None:
        """Read the proper fraction after a whole number; return None if there is none."""
        start, parts = self.place, None
        first = self.peek()
        if first is not None and first.kind == "number" and first.spaced and self.next_is(1, "/"):
            last = self.tokens[self.place + 2] if self.place + 2 < len(self.tokens) else None
            if last is not None and last.kind == "number":
                parts = first.value, last.value
                self.place += 3
        elif first is not None and first.text == "frac":
            self.place += 1
            made = [self.argument(digits=True) for _ in range(2)]
            if all(each.head == "number" for each in made):
                parts = made[0].args[0], made[1].args[0]
        whole = parts is not None and all(part.denominator == 1 for part in parts)
        if parts is None or not whole or not 0 < parts[0] < parts[1]:
            self.place = start
            return None
        return Fraction(parts[0], parts[1])

    def variable(self, name: str) -> Expr:
        """Read the subscript of a variable; `e` and `i` without a subscript are constants."""
        if self.next_is(0, "_"):
            self.place += 1
            return symbol(f"{name}_{self.subscript()}")
        return operation(name) if name in CONSTANTS else symbol(name)

    def subscript(self) -> str:
        """Read a subscript, or another argument, as text."""
        if not self.accept("{"):
            self.place += 1
            if self.place > len(self.tokens):
                raise Unread("an argument is missing")
            return self.tokens[self.place - 1].text
        text = ""
        while not self.accept("}"):
            if self.peek() is None:
                raise Unread("a brace is not closed")
            text += self.tokens[self.place].text
            self.place += 1
        return text

    def argument(self, *, digits: bool = False) -> Expr:
        """Read the argument of a command: a group, or one token.

        Args:
          digits: True to read only the first digit of a number, as LaTeX does in `\\frac12`.
        """
        token = self.peek()
        if token is None:
            raise Unread("an argument is missing")
        if token.text == "{":
            self.place += 1
            return self.expr(self.inside_braces())
        if token.text == "-":
            self.place += 1
            return operation("neg", self.argument())
        if digits and token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            rest = token.text[1:]
            self.tokens[self.place] = replace(token, text=rest, value=Fraction(rest), spaced=False)
            return number(int(token.text[0]))
        if token.kind == "number":
            self.place += 1
            return number(token.value)
        return self.expr(self.operand())

    def function(self, name: str) -> Expr:
        """Read a function with its exponent, base and argument."""
        if name in ("sqrt", "cbrt", "abs"):
            inner = self.expr(self.power_of_root() if name == "sqrt" else self.argument())
            return {"sqrt": inner, "cbrt": operation("root", inner, number(3)), "abs": operation("abs", inner)}[name]
        exponent = base = None
        while (token := self.peek()) is not None and token.text in ("^", "_"):
            self.place += 1
            if token.text == "^":
                exponent = self.argument()
            else:
                base = self.argument()
        operands = self.function_argument()
        if name in ("gcd", "lcm", "max", "min"):
            return operation(name, *operands)
        (one,) = operands
        if exponent == operation("neg", number(1)) and name in ("sin", "cos", "tan"):
            return operation(f"arc{name}", one)
        if name == "lg" or (name == "log" and base is None):
            base = number(10) if name == "lg" else None
        value = operation("log", one, base) if base is not None else operation("ln" if name == "log" else name, one)
        return value if exponent is None else operation("pow", value, exponent)

    def function_argument(self) -> list[Expr]:
        """Read the arguments of a function: in round brackets, or as the factors after its name."""
        if self.accept("("):
            found = [self.expr(self.sum())]
            while self.accept(","):
                found.append(self.expr(self.sum()))
            if not self.accept(")"):
                raise Unread("the argument of a function is not closed")
            return found
        value = self.expr(self.signed_power())
        while (token := self.peek()) is not None and self.begins_factor(token) and token.kind != "function":
            if token.text in ("(", "["):
                break
            value = operation("mul", value, self.expr(self.power()))
        if self.accept("/"):
            value = operation("div", value, self.expr(self.power()))
        return [value]

    def signed_power(self) -> Any:
        """Read a power with an optional minus sign."""
        return operation("neg", self.expr(self.power())) if self.accept("-") else self.power()

    def power_of_root(self) -> Expr:
        """Read a root: its optional degree in square brackets, and its argument."""
        degree = number(2)
        if self.accept("["):
            degree = self.expr(self.sum())
            if not self.accept("]"):
                raise Unread("the degree of a root is not closed")
        return operation("root", self.argument(), degree)

    def command(self, name: str) -> Any:
        """Read a command of LaTeX."""
        match name:
            case "frac":
                return operation("div", self.argument(digits=True), self.argument(digits=True))
            case "surd":
                return operation("root", self.argument(), number(2))
            case "binom":
                return operation("binomial", self.argument(digits=True), self.argument(digits=True))
            case "lfloor" | "lceil":
                inner = self.expr(self.sum())
                if not self.accept("r" + name[1:]):
                    raise Unread("a bracket is not closed")
                return operation({"lfloor": "floor", "lceil": "ceil"}[name], inner)
            case "begin":
                return self.table()
            case "emptyset":
                return Union(())
            case "mathbb":
                return _domain(self.subscript())
            case "langle":
                return self.bracketed("langle")
        if name in GREEK:
            return self.variable(name)
        raise Unread(f"\\{name} is not known")


def _signed(sign: str, value: Expr) -> Expr:
    match sign:
        case "-":
            return operation("neg", value)
        case "pm":
            return Expr("plusminus", (value, 1))
        case "mp":
            return Expr("plusminus", (value, -1))
    return value


def _domain(name: str) -> Union | Words:
    """Return the set of numbers that a letter in blackboard bold names: the real numbers, else words."""
    return Union((EVERYTHING,)) if name == "R" else Words(f"numbers{name.lower()}")
