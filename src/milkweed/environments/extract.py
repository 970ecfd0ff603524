"""Finding the answer in a completion and levelling how it is written. Text in, text out; nothing is evaluated."""

from __future__ import annotations

import re
import unicodedata

_BOX = re.compile(r"\\f?boxed\b|\\framebox\b|\\fbox\b|\\boxed(?=\d)")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname\*?|bm|boldsymbol)\s*\{"
)
_MARKER = re.compile(
    r"(?:final\s+answer|answer)\s*(?:\([^)\n]{0,40}\))?[*_]*\s*(?:\bis\b(?!\s+not\b)|\bequals\b|:|=)"
    r"\s*[*_]*\s*:?\s*(?P<rest>[^\n]+)",
    re.IGNORECASE,
)
_MATH = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|\\\[(.+?)\\\]|(?<![\\$])\$(?!\s)([^$\n]+?)(?<![\\\s])\$|\\\((.+?)\\\)", re.DOTALL
)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_LEAD = re.compile(r"^(?:so|thus|hence|therefore|then)\b[,:]?\s*", re.IGNORECASE)
_BOLD = re.compile(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1")
NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
    r"(?:\s*/\s*\d+(?:\.\d+)?)?(?:\s*\\?%)?"
    r"|(?<![\w.])[-+]?\.\d+"
)
# dashes and minus signs that stand for "-" before a number; the rest of what level() rewrites
_MINUS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d\u02d7"), "-")
_SIGNS = {
    0x00D7: r"\times ", 0x22C5: r"\cdot ", 0x00B7: r"\cdot ", 0x00F7: "/", 0x2215: "/", 0x2044: "/", 0x03C0: r"\pi ",
    0x221E: r"\infty ", 0x00B1: r"\pm ", 0x222A: r"\cup ", 0x2264: r"\le ", 0x2265: r"\ge ", 0x00B0: r"^\circ ",
    0x2208: r"\in ", 0x2260: r"\ne ", 0x2205: r"\emptyset ", 0x2223: "|",
}  # fmt: skip


_RAISED = re.compile(r"[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("`", "`"))


def closing(text: str, start: int) -> int:
    """Index of the brace that closes the one at `start`, -1 if none does. Escaped braces are text."""
    depth, i = 0, start
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 2
            continue
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return i
        i += 1
    return -1


def last_box(text: str) -> str | None:
    r"""What stands in the last complete \boxed{...} (or \fbox) of `text`, braces balanced, boxes in it opened; None
    where there is none. The last one wins, however far from the end it is."""
    for match in reversed(list(_BOX.finditer(text))):
        rest = text[match.end() :]
        lead = len(rest) - len(rest.lstrip())
        if rest[lead : lead + 1] == "{":
            end = closing(rest, lead)
            if end < 0:
                continue  # cut off
            # a box inside a box was met first, being later in the text: take the outermost that holds it
            outer = _outermost(text, match.start())
            return _open_boxes(outer if outer is not None else rest[lead + 1 : end]).strip()
        bare = re.match(r"\s*(-?\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))", rest)
        if bare:
            return bare.group(1)
    return None


def _outermost(text: str, inside: int) -> str | None:
    """Contents of the first box that encloses position `inside`."""
    for match in _BOX.finditer(text, 0, inside):
        rest = match.end() + len(text[match.end() :]) - len(text[match.end() :].lstrip())
        if text[rest : rest + 1] == "{":
            end = closing(text, rest)
            if end > inside:
                return text[rest + 1 : end]
    return None


def _open_boxes(text: str) -> str:
    """`text` with every box in it replaced by its contents."""
    while match := _BOX.search(text):
        at = match.end()
        while text[at : at + 1].isspace():
            at += 1
        if text[at : at + 1] != "{" or (end := closing(text, at)) < 0:
            text = text[: match.start()] + text[match.end() :]
        else:
            text = text[: match.start()] + text[at + 1 : end] + text[end + 1 :]
    return text


def said(completion: str | None) -> str:
    """What a completion says once it has thought: the text after the last `</think>`, and of that only what stands in
    the last `<answer>` tags where there are any. Empty for None."""
    text = (completion or "").rpartition("</think>")[2]
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text).strip()


def answer_in(completion: str | None) -> str | None:
    r"""The text of the answer that a completion gives (see `said`), by what marks it most clearly: the last box; what
    follows the last `####`; what follows the last "answer is" or "answer:"; the last bold text; the last formula; a
    line that stands alone; the last number. None where there is nothing.

    One answer is chosen and stands, right or wrong: trying several would reward listing them.
    """
    text = _LEAD.sub("", said(completion))
    if not text:
        return None
    box = last_box(text)
    if box is not None:
        return box or None
    if "####" in text:
        return _line(text.rpartition("####")[2])
    marked = list(_MARKER.finditer(text))
    if marked:
        rest = marked[-1].group("rest")
        formula = _MATH.match(rest.strip())
        if formula:
            return _first(formula)
        return _line(_sentence(rest))
    bold = _BOLD.findall(text)
    if bold:
        return _line(bold[-1][1])
    if "\n" not in text and not _prose(text):
        return text
    formulas = list(_MATH.finditer(text))
    if formulas:
        return _first(formulas[-1])
    last = text.splitlines()[-1].strip()
    if last and not _prose(last):
        return last
    numbers = list(NUMBER.finditer(text.translate(_MINUS)))
    return numbers[-1].group(0) if numbers else None


def _first(match: re.Match[str]) -> str:
    return next(g for g in match.groups() if g is not None)


def _line(text: str) -> str | None:
    lines = text.strip().splitlines()
    return lines[0].strip().strip("*_").strip() or None if lines else None


def _sentence(text: str) -> str:
    """Up to the full stop that ends it; a point inside a number does not. Bold around the answer is taken off."""
    text = text.strip()
    bold = _BOLD.match(text)
    if bold:
        return bold.group(2)
    cut = re.split(r"(?<![.\s])\.(?:\s+(?=[A-Z])|\s*$)", text, maxsplit=1)[0]
    cut = re.split(r",?\s+(?:not|instead of|rather than|because|since)\b", cut, maxsplit=1)[0]
    if _prose(cut):
        numbers = list(NUMBER.finditer(cut.translate(_MINUS)))
        return numbers[0].group(0) if numbers else cut
    return cut


def _prose(text: str) -> bool:
    """Whether `text` is a sentence rather than an expression: two words or more that are no LaTeX and no connective."""
    plain = re.sub(r"\\(?:text|mathrm)\s*\{[^}]*\}|\\[A-Za-z]+|\$[^$]*\$", " ", text)
    words = [w for w in re.findall(r"[A-Za-z]{2,}", plain) if w.lower() not in _NOT_PROSE]
    return len(words) >= 2


_NOT_PROSE = {"or", "and", "sqrt", "pi", "exp", "ln", "log", "sin", "cos", "tan", "cm", "mm", "km", "kg"}


def level(text: str) -> str:
    """The same answer in one spelling: Unicode signs as LaTeX or ASCII, no math delimiters, no sizing or spacing
    commands, text commands opened, no full stop at the end. Case and order stay."""
    text = re.sub(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)  # 3\u00bd is three and a half
    text = _RAISED.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m.group()).translate(_MINUS) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(_MINUS).translate(_SIGNS)).translate(_MINUS).translate(_SIGNS)
    text = re.sub(r"\s*\b[Pp]er ?cent\b", "%", text)
    text = re.sub(r"\u221a\s*(\d+(?:\.\d+)?|[A-Za-z])", r"\\sqrt{\1}", text).replace("\u221a", "sqrt").strip()
    text = re.sub(r"(?<![A-Za-z])\\(?:displaystyle|textstyle|bf|rm|it)\b", " ", text)
    text = re.sub(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?", "", text)
    text = re.sub(r"(?<!\\)\\[!,;:>]|(?<!\\)\\ |\\q?quad\b|~|\u00a0", " ", text)
    text = re.sub(r"(\d)\{,\}(\d)", r"\1,\2", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\w)\s+(\w)(?!\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\(?:mid|[lr]?vert)(?![A-Za-z])", "|", text)
    text = re.sub(r"\\varnothing\b|\bempty set\b|\\\{\s*\\\}", r"\\emptyset", text)
    text = re.sub(r"(log\s*_)\s*(\w)(?![\w}])", r"\1{\2}", text)  # \log_2 8: no two numbers side by side
    text = re.sub(r"(?<![\\A-Za-z])(?:infinity|inf)\b", r"\\infty", text, flags=re.IGNORECASE)
    while match := _TEXT.search(text):
        end = closing(text, match.end() - 1)
        if end < 0:
            break
        # the spaces keep words apart that the command kept apart
        text = f"{text[: match.start()]} {text[match.end() : end]} {text[end + 1 :]}"
    for _ in range(4):  # wrappers may stand in each other
        before = text
        text = text.strip().rstrip(",;").strip()
        text = re.sub(r"(?<![.\d])\.$|(?<=\d)\.$", "", text).strip()
        for start, end in _WRAPPERS:
            if len(text) >= len(start) + len(end) and text.startswith(start) and text.endswith(end):
                inner = text[len(start) : len(text) - len(end)]
                if start not in inner:
                    text = inner.strip()
        if text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            break
    return re.sub(r"\s+", " ", text)
