"""Comparing expressions with sympy, read by math-verify 0.9.0. Imported on first use: it takes half a second."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from milkweed.environments.extract import closing
from milkweed.environments.maths import close_decimal

for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # it warns that its own timeouts are off: ours kill instead

PRECISION = 40
POINTS = ("0.7391", "1.6180339", "2.2360679", "3.3019272", "0.2718281")
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|pi|theta|alpha|beta|gamma|lambda|infty"
LARGEST = 10_000
"""Decimal digits beyond which a power or factorial is not evaluated."""


def same(a: str, b: str, times_a: Fraction = Fraction(1), times_b: Fraction = Fraction(1)) -> bool:
    """Whether two scalar expressions are equal: everywhere that both are defined, for positive variables, and for
    negative ones where both are real."""
    x, y = read(a), read(b)
    if x is None or y is None:
        return False
    x, y = (_times(e, f) for e, f in ((x, times_a), (y, times_b)))
    if any(e.has(sympy.zoo, sympy.nan) for e in (x, y)):
        return False  # two undefined things are not the same thing
    symbols = sorted(x.free_symbols | y.free_symbols, key=str)
    if _too_big(x) or _too_big(y):
        return bool(x == y)
    if not symbols:
        rounded = x.has(sympy.Float) or y.has(sympy.Float)
        # exact numbers are compared to digits after the point, however many stand before it
        digits = PRECISION + (0 if rounded else max(_places(x), _places(y)))
        value_x, value_y = _value(x, digits), _value(y, digits)
        if value_x is None or value_y is None:
            return bool(x == y)
        if _close(value_x, value_y, rounded):
            return True
        difference = abs(value_x - value_y)
        return bool(difference.is_real) and any(close_decimal(t, difference) for t in (a, b))
    if x.free_symbols != y.free_symbols and _differs_in_symbols(x, y):
        return False
    tried = 0
    for turn in range(len(POINTS)):
        for sign in (1, -1):
            at = {
                s: sign * sympy.Float(POINTS[(turn + i) % len(POINTS)], PRECISION) + i * sign
                for i, s in enumerate(symbols)
            }
            value_x, value_y = (_value(e.subs(at)) for e in (x, y))
            if value_x is None or value_y is None:
                continue
            if sign < 0 and not (_real(value_x) and _real(value_y)):
                continue  # roots and logarithms of negatives: branches, not answers
            if not _close(value_x, value_y, x.has(sympy.Float) or y.has(sympy.Float)):
                return False
            tried += sign > 0
    return tried > 0 or bool(x == y)


def by_library(a: str, b: str) -> bool:
    """Relations and matrices, as math-verify compares them, in both directions."""
    x, y = read(a), read(b)
    if x is None or y is None:
        return False
    if isinstance(x, sympy.Eq) and isinstance(y, sympy.Eq):
        return _same_equation(x, y)
    if isinstance(x, sympy.MatrixBase) and isinstance(y, sympy.MatrixBase):
        return x.shape == y.shape and all(_same_entries(p, q) for p, q in zip(x, y, strict=True))
    if any(isinstance(e, sympy.Basic) and _too_big(e) for e in (x, y)):
        return bool(x == y)
    if isinstance(x, sympy.And) and isinstance(y, sympy.And) and _relations(x) == _relations(y):
        return True  # 1 < x < 2 and 2 > x > 1
    return bool(verify(x, y, timeout_seconds=None) and verify(y, x, timeout_seconds=None))


def _relations(chain: Any) -> set[Any]:
    return {r.canonical for r in chain.args}


def _same_equation(x: Any, y: Any) -> bool:
    """Two equations are the same if their differences of sides have one constant ratio."""
    first, second = (sympy.expand(e.lhs - e.rhs) for e in (x, y))
    if first == 0 or second == 0:
        return bool(first == second)
    ratio = sympy.simplify(first / second)
    return bool(ratio.is_number and ratio != 0)


def _same_entries(p: Any, q: Any) -> bool:
    if p == q:
        return True
    return bool(sympy.simplify(p - q) == 0) if not _too_big(p - q) else False


@lru_cache(maxsize=4096)
def read(text: str) -> Any:
    """A sympy value, or None where the text is not mathematics."""
    if "$" in text or len(text) > 2000:
        return None  # more than one formula: it would read one of them
    latex = "$" + to_latex(text) + "$"
    try:
        # LaTeX only: its plain-text reader would pick a number out of what it cannot read whole
        found = parse(latex, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    except Exception:  # its grammar raises many kinds on text that is not mathematics
        return None
    value = found[0] if found else None
    if isinstance(value, sympy.Basic):
        imaginary = [s for s in value.free_symbols if str(s) == "i"]
        value = value.subs({s: sympy.I for s in imaginary}) if imaginary and not _too_big(value) else value
    return value


def to_latex(text: str) -> str:
    """Plain text as people type it (`sqrt(2)`, `exp(16)`, `pi/2`, `x**2`, `2^10`) as LaTeX; LaTeX unchanged."""
    text = text.replace("**", "^")
    text = _call(text, r"(?<![A-Za-z\\])sqrt\s*(?=\()", r"\sqrt")
    text = re.sub(r"(?<![A-Za-z\\])sqrt\s*(?=[{\d])", r"\\sqrt", text)
    text = _call(text, r"(?<![A-Za-z\\])abs\s*(?=\()", "", "|", "|")
    text = _call(text, r"(?<![A-Za-z])\\?exp\s*(?=\()", "e^")
    text = re.sub(rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])", r"\\\1 ", text)
    text = _call(text, r"\^\s*(?=\()", "^")
    text = re.sub(r"\^\s*(-?\d+(?:\.\d+)?)", r"^{\1}", text)
    text = re.sub(r"(\d)\s*[x×]\s*(10\s*\^)", r"\1 \\times \2", text)
    text = re.sub(r"(\d)[eE]([-+]?\d+)(?![\d.A-Za-z])", r"\1 \\times 10^{\2}", text)
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def _call(text: str, pattern: str, command: str, left: str = "{", right: str = "}") -> str:
    """`name(argument)` as `command{argument}` (`left` `right`: other brackets), brackets balanced."""
    out, at = "", 0
    while match := re.compile(pattern).search(text, at):
        braces = text[match.end() :].replace("{", "\0").replace("}", "\1").replace("(", "{").replace(")", "}")
        end = closing(braces, 0)
        if end < 0:
            break
        inner = _call(text[match.end() + 1 : match.end() + end], pattern, command, left, right)
        out += text[at : match.start()] + command + left + inner + right
        at = match.end() + end + 1
    return out + text[at:]


def _times(expression: Any, factor: Fraction) -> Any:
    return expression if factor == 1 else expression * sympy.Rational(factor.numerator, factor.denominator)


def _differs_in_symbols(x: Any, y: Any) -> bool:
    """A variable of one side that the other lacks may still cancel out."""
    odd = x.free_symbols ^ y.free_symbols
    return any(sympy.simplify(e).free_symbols & odd for e in (x, y))


def _value(expression: Any, digits: int = PRECISION) -> Any:
    try:
        value = sympy.N(expression.doit(), digits)
    except Exception:  # sympy raises many kinds where a function is not defined
        return None
    return value if value.is_number and value.is_finite and not value.has(sympy.nan, sympy.zoo) else None


def _places(expression: Any) -> int:
    """Digits before the decimal point, at most LARGEST."""
    value = _value(expression, 15)
    if value is None or abs(value) < 1:
        return 0
    return int(min(sympy.N(sympy.log(abs(value), 10), 15), LARGEST)) + 1


def _real(value: Any) -> bool:
    return bool(abs(sympy.im(value)) <= abs(value) * sympy.Float("1e-25"))


def _close(x: Any, y: Any, rounded: bool) -> bool:
    """Relative for small numbers, so that two are not equal for being tiny; for large ones too where they are rounded,
    else absolute, so that two are not equal for being large."""
    scale = max(abs(x), abs(y))
    if scale == 0:
        return True
    if not rounded and scale > 1:
        scale = sympy.Integer(1)
    return bool(abs(x - y) <= scale * sympy.Float("1e-6" if rounded else "1e-25"))


def _too_big(expression: Any) -> bool:
    """Whether evaluating it could fill the machine: a tower of powers, the factorial of a large number."""
    for node in sympy.preorder_traversal(expression):
        if isinstance(node, sympy.Pow) and not node.exp.free_symbols:
            if node.exp.has(sympy.Pow) and any(
                isinstance(p, sympy.Pow) and p.exp.has(sympy.Pow) for p in sympy.preorder_traversal(node.exp)
            ):
                return True  # three storeys
            if any(_too_big(a) for a in node.exp.args):
                return True
            size = _magnitude(node.exp)
            if size is None or size * max(1.0, _digits(node.base)) > LARGEST:
                return True
        elif isinstance(node, sympy.factorial) and not node.free_symbols:
            size = _magnitude(node.args[0])
            if size is None or size > 5000:
                return True
    return False


def _magnitude(expression: Any) -> float | None:
    try:
        return float(abs(sympy.N(expression, 15)))
    except (TypeError, ValueError, OverflowError, MemoryError):
        return None


def _digits(expression: Any) -> float:
    size = _magnitude(expression) if not expression.free_symbols else 1.0
    return 1e9 if size is None else abs(float(sympy.log(size, 10))) if size > 0 else 0.0
