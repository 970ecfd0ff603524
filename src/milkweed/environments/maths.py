r"""Whether two mathematical answers say the same. math-verify's parser reads them; the comparison is our own.

What its users report wrong lies in comparing (tiny numbers rounded to equal, a set that matches a value, positive
and negative taken together) and in plain text read as letters (`exp(16)`, `pi/2`). So structure is taken apart here,
lists, tuples, intervals, labels, plus-minus, and only scalars are parsed and compared, exactly or to 30 digits.

Symmetric, except that a percent sign may be left out by the reference alone.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from milkweed.environments.extract import answer_in, closing, last_box, level

DIGITS = 6
"""Significant digits that a decimal must show to stand for a number it only rounds."""
FLOAT_DIGITS = 16
"""Significant digits from which a decimal is taken for a printed float64, whose last one is noise."""
UNITS = (
    "mm|cm|dm|m|km|in|ft|yd|mi|inch|inches|foot|feet|yards?|miles?|met(?:er|re)s?|g|mg|kg|grams?|kilograms?|lbs?|"
    "pounds?|oz|ounces?|s|sec|seconds?|min|minutes?|h|hrs?|hours?|days?|weeks?|months?|years?|mph|km/h|m/s|l|ml|"
    "liters?|litres?|gallons?|dollars?|cents?|euros?|units?|points?|degrees?|radians?"
)
_UNIT = re.compile(
    rf"(?<=[\d}})])\s*(?P<unit>(?:square |cubic |sq\.? |cu\.? )?(?:{UNITS})(?:\s*(?:\^\s*\{{?[23]\}}?))?)\.?$"
    # and any words after a plain number, such as "12 red apples"
    r"|(?<=\d)\s+(?P<words>(?!or\b|and\b)[A-Za-z]{3,}(?: [A-Za-z]{2,})*)\.?$",
    re.IGNORECASE,
)
_CURRENCY = re.compile(
    r"^\s*(-?)\s*(?:\\\$|\$|€|£|¥|USD|EUR|GBP)\s*(?=-?[\d.])|(?<=\d)\s*(?:\\\$|€|£|¥|USD|EUR|GBP)$"
)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
_EQUALS = r"(?<![<>!=:])=(?!=)"
_BASED = re.compile(r"(\d[0-9A-Z]*|[0-9A-F]{2,})_\{?(\d{1,2})\}?")
_LABEL = re.compile(
    r"^\s*(\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)"
    r"|\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\s*\(\s*[a-z](?:\s*,\s*[a-z])*\s*\))?)"
    r"\s*(?:=|\\in\b|:(?=\s*\S))\s*(?!=)"
)
_NAMES = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|pi|theta|alpha|beta|gamma|lambda|infty"


def mathematical(completion: str | None, answer: Any) -> float:
    """1.0 where the completion's answer (see `extract.answer_in`) equals `answer` mathematically, else 0.0.

    `answer` is text (LaTeX or plain, boxed or not), a number, or a list of which one must match.
    """
    if isinstance(answer, (list, tuple)):
        return max((mathematical(completion, a) for a in answer), default=0.0)
    given = answer_in(completion)
    return float(given is not None and math_equal(given, str(given_reference(answer))))


def given_reference(answer: Any) -> Any:
    """`answer`; ValueError where it is None: a prompt without an answer cannot be judged."""
    if answer is None:
        raise ValueError("the reference answer is None: this prompt has no answer to compare with")
    return answer


def math_equal(given: str | None, reference: str) -> bool:
    """Whether the two answers, each an expression or a list of them, say the same. Neither may be empty, and None is."""
    a, b = (level(last_box(t) or t) for t in (given or "", str(reference)))
    if not a or not b:
        return False
    return _same(a, b, 0)


def _same(a: str, b: str, depth: int) -> bool:
    a, b = level(a), level(b)
    if a == b:
        return bool(a)
    if _squeezed(a) == _squeezed(b):
        return True
    if depth > 8:
        return False
    if _word(a) or _word(b):
        return _choice(a) == _choice(b)
    a, b = _result(a), _result(b)
    a, b, same = _without_labels(a, b)
    if not same:
        return False
    lists = [_elements(t) for t in (a, b)]
    if lists[0] is not None or lists[1] is not None:
        return _same_lists(lists[0] or ("one", [a]), lists[1] or ("one", [b]), depth)
    if _equation(a) != _equation(b):
        return False  # an equation is not the number on its right
    if _relation(a) or _relation(b) or "begin{" in a or "begin{" in b:
        return _by_library(a, b)
    return _same_scalar(a, b)


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text)  # between two digits or letters a space means something


def _word(text: str) -> bool:
    """Text that names something (a choice, a day, yes) rather than a quantity."""
    bare = _choice(text)
    named = re.fullmatch(r"[A-Z]+|[A-Za-z][a-z']{2,}(?:[ -][A-Za-z][a-z']*)*", bare)
    return named is not None and bare.lower() not in _NAMES.split("|")


def _choice(text: str) -> str:
    """`(E)`, `E.` and `E)` as `E`; words without case."""
    bare = re.sub(r"^[(\[]?\s*([A-Z])\s*[)\].:]?$", r"\1", text.strip())
    return bare if len(bare) == 1 else re.sub(r"\s+", " ", bare).casefold()


def _without_labels(a: str, b: str) -> tuple[str, str, bool]:
    """Both without a leading `x =`; False if both have one and they differ, or an equation is left."""
    # a label stands before one value: what has a second relation is an equation or a list of them
    first, second = (m if (m := _LABEL.match(t)) and not _relation(t[m.end() :]) else None for t in (a, b))
    if first and second:
        if _squeezed(first.group(1)).lower() != _squeezed(second.group(1)).lower():
            return a, b, _by_library(a, b)
        a, b = a[first.end() :], b[second.end() :]
    elif first and not _relation(b):
        a = a[first.end() :]
    elif second and not _relation(a):
        b = b[second.end() :]
    return a, b, bool(a.strip() and b.strip())


def _equation(text: str) -> bool:
    return bool(re.search(_EQUALS, text))


def _result(text: str) -> str:
    """`3 + 4 = 7` and `= 7` as 7: what stands last in an equation without variables whose sides are equal."""
    sides = [s.strip() for s in re.split(_EQUALS, text)]
    last = sides.pop()
    if not sides or not last or re.search(r"[<>]|\\(?:leq?|geq?|neq?|lt|gt|in)\b", text):
        return text
    label = _LABEL.match(text)
    name, sides = (label.group(), sides[1:]) if label and len(sides) > 1 else ("", sides)
    if any(re.search(r"[A-Za-z,]", re.sub(r"\\[A-Za-z]+", "", s)) or "begin" in s for s in sides):
        return text
    return name + last if all(not s or _same_scalar(s, last) for s in sides) else text


def _relation(text: str) -> bool:
    return bool(re.search(r"[<>=]|\\(?:leq?|geq?|neq?|lt|gt|in)\b", text))


def _elements(text: str) -> tuple[str, list[str]] | None:
    """Kind and parts of a list, set, tuple, interval, union or plus-minus; None for a scalar.

    Kinds: "list" (bare, any order), "set", or the two brackets of a tuple or interval, whose order counts.
    """
    text = text.strip()
    if re.fullmatch(_NUMBER, text) and "," in text:
        return None  # thousands
    union = _split(text, r"\\cup\b|\bor\b|\band\b|;")
    if len(union) > 1:
        label = _LABEL.match(union[0])
        name = label and label.group(1)
        return "list", [u[m.end() :] if (m := _LABEL.match(u)) and m.group(1) == name else u for u in union]
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set", _expanded(_split(text[2:-2], ","))
    if text[:1] in "([" and text[-1:] in ")]" and _encloses(text):
        parts = _split(text[1:-1], ",")
        if len(parts) > 1:
            return text[0] + text[-1], parts
        return None
    parts = _expanded(_split(text, ","))
    return ("list", parts) if len(parts) > 1 else None


def _expanded(parts: list[str]) -> list[str]:
    """Every part with a plus-minus as the two it stands for."""
    out = []
    for part in parts:
        if "\\pm" in part or "+-" in part or "+/-" in part:
            out += [re.sub(r"\\pm|\+/-|\+-", sign, part) for sign in ("+", "-")]
        else:
            out.append(part)
    return out


def _split(text: str, separator: str) -> list[str]:
    """`text` at the separators outside all brackets; a comma inside a number of thousands separates nothing if it
    stands without a space."""
    parts, depth, start, i = [], 0, 0, 0
    pattern = re.compile(separator)
    while i < len(text):
        c = text[i]
        if c == "\\" and text[i + 1 : i + 2] in ("{", "}"):
            depth += 1 if text[i + 1] == "{" else -1
            i += 2
            continue
        depth += (c in "([{") - (c in ")]}")
        match = pattern.match(text, i) if depth == 0 else None
        if match and not (c == "," and _thousands(text, i)):
            parts.append(text[start:i].strip())
            i = start = match.end()
            continue
        i += 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


def _thousands(text: str, comma: int) -> bool:
    return bool(re.search(r"(?<![\d.])\d{1,3}(,\d{3})*$", text[:comma]) and re.match(r",\d{3}(?!\d)", text[comma:]))


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last character. `[1, 2)` counts."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False


def _same_lists(a: tuple[str, list[str]], b: tuple[str, list[str]], depth: int) -> bool:
    (kind_a, xs), (kind_b, ys) = a, b
    if len(xs) != len(ys):
        return False
    ordered = [k for k in (kind_a, kind_b) if k[0] in "(["]
    if len(ordered) == 2 and kind_a != kind_b:
        return False  # open and closed ends differ
    if ordered and "set" in (kind_a, kind_b):
        return False
    if ordered:
        return all(_same(x, y, depth + 1) for x, y in zip(xs, ys, strict=True))
    left = list(ys)
    for x in xs:
        match = next((i for i, y in enumerate(left) if _same(x, y, depth + 1)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _same_scalar(a: str, b: str) -> bool:
    a, b = _in_radians(a), _in_radians(b)
    (a, unit_a), (b, unit_b) = _unit(a), _unit(b)
    percent_a, percent_b = (bool(re.search(r"\\?%\s*$|\bpercent\s*$", t)) for t in (a, b))
    unit_a, unit_b = unit_a or "%" * percent_a, unit_b or "%" * percent_b
    if unit_a and unit_b and unit_a != unit_b:
        return False
    bare_a, bare_b = (re.sub(r"\s*(?:\\?%|\bpercent)\s*$", "", t) for t in (a, b))
    if percent_a or percent_b:
        if percent_a == percent_b:
            return _same_value(bare_a, bare_b, Fraction(1), Fraction(1))
        if percent_a and _same_value(bare_a, b, Fraction(1), Fraction(1)):
            return True  # "What percent ...?" is answered 50% and kept as 50
        cent = Fraction(1, 100)
        return _same_value(bare_a, bare_b, cent if percent_a else Fraction(1), cent if percent_b else Fraction(1))
    return _same_value(a, b, Fraction(1), Fraction(1))


def _in_radians(text: str) -> str:
    r"""`\sin 30^\circ` with the angle as a number; degrees elsewhere are a unit."""
    if not re.search(r"(?:sin|cos|tan|cot|sec|csc)", text):
        return text
    return re.sub(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\\circ\}?", r"(\1 \\cdot \\frac{\\pi}{180})", text)


def _unit(text: str) -> tuple[str, str]:
    money = _CURRENCY.search(text)
    if money:
        sign = money.group().strip().strip("-\\ ")
        text = _CURRENCY.sub(lambda m: m.group(1) or "", text.strip())
        return text, {"$": "dollar", "USD": "dollar", "€": "euro", "EUR": "euro", "£": "GBP"}.get(sign, sign)
    text = text.strip()
    text = re.sub(r"\s*\^\s*\{?\\circ\}?\s*[CF]?$", " degrees", text)
    match = _UNIT.search(text)
    if not match:
        return text, ""
    unit = re.sub(r"[\s{}^]", "", (match.group("unit") or match.group("words")).lower())
    unit = {"inches": "in", "inch": "in", "feet": "ft", "foot": "ft"}.get(unit, unit)
    return text[: match.start()].strip(), unit.rstrip("s") if len(unit) > 2 else unit


def number(text: str) -> Fraction | None:
    r"""The exact value of a plain number: `1,000`, `-0.5`, `1.2e3`, `3/4`, `\frac34`, `1 1/2`, `5!` is none of them."""
    text = level(text).replace(" ", "") if not re.search(r"\d\s+\d", text) else level(text)
    if re.fullmatch(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        text = text.replace(" ", "")  # thousands set apart by spaces
    mixed = re.fullmatch(r"([-+]?)(\d+)\s*(?:\s|\\frac)\s*(.+)", text)
    if mixed and "\\frac" in text and text.lstrip("+-")[0].isdigit():
        part = number("\\frac" + text.partition("\\frac")[2])
        return None if part is None else (-1 if mixed[1] == "-" else 1) * (int(mixed[2]) + part)
    if mixed and (part := re.fullmatch(r"(\d+)\s*/\s*(\d+)", mixed[3])) and int(part[2]):
        return (-1 if mixed[1] == "-" else 1) * (int(mixed[2]) + Fraction(int(part[1]), int(part[2])))
    repeating = (
        re.fullmatch(r"([-+]?)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?|\()(\d+)[})]?", text)
        or re.fullmatch(r"([-+]?)(\d*)\.(\d*?)(?:(\d)\4{2,}|(\d{2,}?)\5+)(?:\.{3}|\\[lc]?dots)", text)
    )
    if repeating:
        sign, whole, head, *tails = repeating.groups()
        tail = next(t for t in tails if t)
        value = Fraction(int(whole or 0)) + Fraction(int(head or 0), 10 ** len(head))
        value += Fraction(int(tail), (10 ** len(tail) - 1) * 10 ** len(head))
        return -value if sign == "-" else value
    power = re.fullmatch(r"([-+]?[\d.,]+)(?:\\times|\\cdot|[x*])10\^\{?([-+]?\d{1,4})\}?", text.replace(" ", ""))
    if power and (factor := number(power[1])) is not None:
        return factor * Fraction(10) ** int(power[2])
    based = _BASED.fullmatch(text)
    if based:
        digits, base = based[1], int(based[2])
        return Fraction(int(digits, base)) if 2 <= base <= 36 and max(int(d, 36) for d in digits) < base else None
    fraction = _fraction(text)
    if fraction is not None:
        sign, top, bottom = fraction
        over, under = number(top), number(bottom)
        return None if over is None or not under else sign * over / under
    if not re.search(r"\d", text) or not _NUMBER.fullmatch(text) or len(text) > 1000:
        return None
    if abs(int(text.lower().partition("e")[2] or 0)) > 4000:
        return None  # an exponent that would fill the memory
    return Fraction(text.replace(",", "").rstrip(".") if "e" not in text.lower() else text.replace(",", ""))


def _fraction(text: str) -> tuple[int, str, str] | None:
    r"""Sign, numerator and denominator of `a/b` or `\frac{a}{b}` (or `\frac12`) that is the whole text."""
    plain = re.fullmatch(r"([-+]?)\(?([\d.,]+)\)?/\(?([\d.,]+)\)?", text)
    if plain:
        return (-1 if plain[1] == "-" else 1), plain[2], plain[3]
    head = re.match(r"([-+]?)\\frac", text)
    if not head:
        return None
    parts, at = [], head.end()
    for _ in range(2):
        if text[at : at + 1] == "{":
            end = closing(text, at)
            if end < 0:
                return None
            parts.append(text[at + 1 : end])
            at = end + 1
        else:
            parts.append(text[at : at + 1])
            at += 1
    return ((-1 if head[1] == "-" else 1), *parts) if at == len(text) else None  # type: ignore[return-value]


def _decimals(text: str) -> tuple[int, int] | None:
    """Decimal places and significant digits shown, of a plain decimal with a point."""
    match = re.fullmatch(r"[-+]?([\d,]*)\.(\d+)", text.replace(" ", ""))
    if not match:
        return None
    return len(match[2]), len((match[1].replace(",", "") + match[2]).lstrip("0"))


def close_decimal(text: str, error: Any) -> bool:
    """Whether a decimal that shows enough digits is only `error` away, half a unit of its last place; of one that shows
    all that a float64 has (0.30000000000000004), a few units."""
    shown = _decimals(text)
    if shown is None or shown[1] < DIGITS:
        return False
    units = Fraction(1, 2) if shown[1] < FLOAT_DIGITS else Fraction(10)
    return bool(error <= units / 10 ** shown[0])


def _same_value(a: str, b: str, times_a: Fraction, times_b: Fraction) -> bool:
    x, y = number(a), number(b)
    if x is not None and y is not None:
        x, y = x * times_a, y * times_b
        error = abs(x - y)
        return x == y or (times_a == times_b == 1 and (close_decimal(a, error) or close_decimal(b, error)))
    if any(_BASED.fullmatch(t) for t, value in ((a, x), (b, y)) if value is None):
        return False  # digits that its base has not: the parser would leave the base out
    if any(re.search(r"\d\s+\d", t) for t, value in ((a, x), (b, y)) if value is None):
        return False  # two numbers side by side are not their product
    from milkweed.environments import symbolic

    return symbolic.same(a, b, times_a, times_b)


def _by_library(a: str, b: str) -> bool:
    from milkweed.environments import symbolic

    return symbolic.by_library(a, b)
