"""One spelling for each character and each command of LaTeX, before anything is read."""

from __future__ import annotations

import re
import unicodedata

from relax_envs.math.policy import Policy, Refused

_CHARACTERS = str.maketrans(
    dict.fromkeys("−‐‑‒–—﹣－", "-")
    | dict.fromkeys("×✕✖", r"\times ")
    | dict.fromkeys("·⋅∙•∗", r"\cdot ")
    | dict.fromkeys("÷∕⁄", "/")
    | dict.fromkeys("′’‘ʹ", "'")
    | dict.fromkeys("“”", '"')
    | dict.fromkeys("，、", ",")
    | {"√": r"\sqrt ", "∛": r"\sqrt[3]", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "⩽": r"\le "}
    | {"⩾": r"\ge ", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap "}
    | {"∅": r"\emptyset ", "⌀": r"\emptyset ", "°": r"^{\circ}", "º": r"^{\circ}", "˚": r"^{\circ}", "∖": r"\setminus "}
    | {"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}"}
    | {"⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil "}
    | {"∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "…": "...", "⋯": "...", "٫": ".", "٬": ",", "。": "."}
    | {"→": r"\to ", "⇒": r"\to ", "∨": r"\lor ", "∧": r"\land ", "℃": r"^{\circ}C", "℉": r"^{\circ}F", "µ": r"\mu "}
)
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))
_RAISED_RUN, _LOWERED_RUN = (re.compile(f"[{''.join(marks)}]+") for marks in (_RAISED, _LOWERED))

_RENAMED = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("leq", "leqslant", "leqq"), r"\le "),
    **dict.fromkeys(("geq", "geqslant", "geqq"), r"\ge "),
    **dict.fromkeys(("neq",), r"\ne "),
    **dict.fromkeys(("ast", "star", "bullet"), "*"),
    **dict.fromkeys(("lbrace",), r"\{"),
    **dict.fromkeys(("rbrace",), r"\}"),
    **dict.fromkeys(("vert", "mid", "Vert"), "|"),
    **dict.fromkeys(("varnothing", "O"), r"\emptyset "),
    **dict.fromkeys(("dots", "ldots", "cdots", "dotsc", "dotsb"), "..."),
    **dict.fromkeys(("backslash", "smallsetminus"), r"\setminus "),
    **dict.fromkeys(("rightarrow", "implies", "Rightarrow", "longrightarrow"), r"\to "),
    **dict.fromkeys(("degree", "degrees"), r"^{\circ}"),
    **dict.fromkeys(("vee",), r"\lor "),
    **dict.fromkeys(("wedge",), r"\land "),
    **dict.fromkeys(("infin",), r"\infty "),
    **dict.fromkeys(("bar", "overbar"), r"\overline"),
    **{"widehat": r"\hat", "widetilde": r"\tilde", "overrightarrow": r"\vec"},
    **dict.fromkeys(("euro",), "€"),
    **dict.fromkeys(("pounds",), "£"),
    **{"lt": "<", "gt": ">", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "div": "/", "colon": ":"},
    **{"prime": "'", "dollar": r"\$", "percent": "%", "simeq": r"\approx ", "land": r"\land ", "Reals": r"\mathbb{R}"},
    **{"varepsilon": r"\epsilon ", "varphi": r"\phi ", "vartheta": r"\theta ", "tg": r"\tan ", "ctg": r"\cot "},
}
_SPACES = frozenset(("quad", "qquad", "enspace", "thinspace", "medspace", "thickspace", "space", "nobreakspace", "par"))
_NOTHING = frozenset(
    (
        *("left", "right", "displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "negthinspace", "middle"),
        *("big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "Biggl", "Biggr", "bigm"),
        *("large", "Large", "LARGE", "huge", "Huge", "small", "normalsize", "bf", "rm", "it", "centering", "strut"),
        *("boxed", "fbox", "framebox", "ensuremath", "phantom"),
    )
)
_TEXTS = frozenset(
    (
        *("text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "textup", "mbox", "hbox", "emph"),
        *(
            "textsc",
            "mathrm",
            "mathbf",
            "mathit",
            "mathsf",
            "mathtt",
            "mathcal",
            "mathnormal",
            "boldsymbol",
            "bm",
            "rm",
        ),
        *("operatorname", "pmb", "bold", "underline", "Bbb", "mathfrak", "mathscr"),
    )
)
_LETTER_FONTS = frozenset(
    ("mathbf", "mathit", "mathsf", "mathcal", "boldsymbol", "bm", "pmb", "bold", "Bbb", "mathscr")
)
"""Fonts of variables; the upright ones are those of units and words."""
_BY_SIGN = {",": " ", ";": " ", ":": " ", " ": " ", "!": "", "/": "", "%": "%", "#": "#", "&": " ", "-": "", "|": "|"}
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)\*?|(\\)(?=[A-Za-z]{2})|(.))", re.DOTALL)
_TEXT_GROUP = re.compile(rf"\\({'|'.join(sorted(_TEXTS, key=len, reverse=True))})\*?\s*\{{([^{{}}]*)\}}")
_SHAPE = re.compile(r"\\(?:hspace|vspace|mspace)\*?\s*\{[^{}]*\}|\\(?:left|right)\s*\.")
_TEXT_IN_TEXT = re.compile(r"\\text\{\s*\\text\{([^{}]*)\}\s*\}")
_COLOUR = re.compile(r"\\(?:textcolor|color)\s*\{[^{}]*\}")
_TIMES = re.compile(r"(?<=\d)\s?[xX×]\s?(?=10\s?(?:\^|\*\*))")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_FRAMES = ("**", "__", "`", "*", '"', "'")
_NESTS = re.compile(r"\\.|[{}()\[\]]", re.DOTALL)


def plain(text: str, policy: Policy) -> str:
    """The text in the characters of ASCII and the commands that the grammar knows, without what only shapes it.

    What stands in ``\\text{}`` and the like stays in ``\\text{}``, unless it is a number. Raises Refused for a text
    that is too long or too deeply nested.
    """
    bounded(text, policy)
    text = characters(text)
    text = _TIMES.sub(r"\\times ", _COLOUR.sub(" ", _SHAPE.sub(" ", text)))
    text = _fractions(text)
    text = _COMMAND.sub(_double, text) if r"\begin" not in text else text
    for _ in range(4):  # text in text
        inner = _TEXT_IN_TEXT.sub(r"\\text{\1}", _TEXT_GROUP.sub(_words, text))
        if inner == text:
            break
        text = inner
    text = _COMMAND.sub(_command, text).replace("~", " ")
    return _without_frame(" ".join(text.split()))


def _fractions(text: str) -> str:
    """``{1 \\over 2}`` and ``1 \\over 2`` as ``\\frac{1}{2}``."""
    for _ in range(8):
        changed = _OVER.sub(r"\\frac{\1}{\2}", text)
        if changed == text:
            break
        text = changed
    left, over, right = text.partition(r"\over ")
    return rf"\frac{{{left}}}{{{right}}}" if over and r"\over" not in right and "{" not in left + right else text


def bounded(text: str, policy: Policy) -> None:
    """Raises Refused for a text that is too long or too deeply nested."""
    if len(text) > policy.longest:
        raise Refused(f"it has {len(text)} characters, of {policy.longest} allowed")
    depth = deepest = 0
    for found in _NESTS.finditer(text):
        if found[0] in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in "})]":
            depth -= 1
    if deepest > policy.deepest:
        raise Refused(f"it is nested {deepest} deep, of {policy.deepest} allowed")


def characters(text: str) -> str:
    """The text with one character, or one command, for all that look alike or mean the same."""
    if text.isascii():
        return text
    text = _RAISED_RUN.sub(lambda run: "^{" + "".join(_RAISED[c] for c in run[0]) + "}", text)
    text = _LOWERED_RUN.sub(lambda run: "_{" + "".join(_LOWERED[c] for c in run[0]) + "}", text)
    text = text.translate(_CHARACTERS)
    return text if text.isascii() else "".join(map(_character, text))


def _character(c: str) -> str:
    if c.isascii() or c in "€£¥₹":
        return c
    category = unicodedata.category(c)
    if category == "Nd":
        return str(unicodedata.decimal(c))
    if category in ("Zs", "Zl", "Zp"):
        return " "
    if category in ("Cf", "Mn"):  # signs without a width, marks of direction, variation selectors
        return ""
    if "①" <= c <= "⑳":  # labels, no numbers
        return c
    compatible = unicodedata.normalize("NFKC", c)
    if category == "No" and "⁄" in compatible:
        top, _, bottom = compatible.partition("⁄")
        return rf"\frac{{{top}}}{{{bottom}}}"
    if compatible != c and len(compatible) <= 4:
        return "".join(_character(inner) for inner in compatible.translate(_CHARACTERS))
    name = unicodedata.name(c, "")
    if name.startswith("GREEK ") and " LETTER " in name:
        greek = name.rpartition(" ")[2].lower().replace("lamda", "lambda").replace("final sigma", "sigma")
        return f"\\{greek.title() if 'CAPITAL' in name else greek} "
    return c


def _double(found: re.Match[str]) -> str:
    """A backslash that was escaped once too often: outside of a matrix, two before a word are one."""
    return "\\" if found[2] else found[0]


def _words(found: re.Match[str]) -> str:
    font, words = found.groups()
    inner = words.strip()
    if re.fullmatch(r"[\d.,\s+\-]*", inner):
        return words
    if font == "Bbb" and inner == "R":
        return r"\mathbb{R}"
    if font in _LETTER_FONTS and not (inner.isalpha() and len(inner) > 1):
        return "{" + words + "}"
    return r"\text{" + _unmarked(words) + "}"


def _unmarked(words: str) -> str:
    return _COMMAND.sub(_command, words)


def _command(found: re.Match[str]) -> str:
    name, escaped, sign = found.groups()
    if name is not None:
        if name in _NOTHING:
            return ""
        return " " if name in _SPACES else _RENAMED.get(name, found[0])
    return found[0] if escaped else _BY_SIGN.get(sign, found[0])


def _without_frame(text: str) -> str:
    """Without signs of mathematics mode, of emphasis and of the end of a sentence around the text."""
    text = re.sub(r"(?<!\\)\$\$", " ", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    dollars = len(re.findall(r"(?<!\\)\$", text))
    if dollars % 2 == 0 or not re.search(r"(?<!\\)\$\s*-?[\d.]", text):
        text = re.sub(r"(?<!\\)\$", " ", text)  # else a currency's
    text = text.replace(r"\$", "$").strip()
    while text:
        before = text
        for mark in _FRAMES:
            if text.startswith(mark) and text.endswith(mark) and len(text) > 2 * len(mark):
                text = text[len(mark) : -len(mark)].strip()
        text = re.sub(r"^(?:(?:\\\\|=)\s*)+|(?:\\\\\s*)+$|(?<!\.)[.,;:?]$|(?<=\.\.\.)[.,;:]$", "", text).strip()
        if text == before:
            break
    return text
