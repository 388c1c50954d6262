"""Calculator, a tool for a policy that cannot multiply in its head."""

import ast
import operator
from collections.abc import Callable
from typing import Any

_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the signs + - * / // %, such as "47*86".
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, ValueError) as error:
        return f"error: {error}"
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_value(left), _value(right))
    raise ValueError("only numbers, parentheses and + - * / // % can be computed")
