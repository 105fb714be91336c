"""Words of a text in any script: where a script has no spaces, every character is one."""

from __future__ import annotations

import re
import unicodedata

NO_SPACES = (
    "\u0e00-\u0eff"  # Thai and Lao
    "\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Tibetan, Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese and Japanese
    "\U00020000-\U0003ffff"
)
"""Characters of scripts that do not separate words, as ranges of a regular expression."""

_ONE = re.compile(f"[{NO_SPACES}]")
_TOKEN = re.compile(rf"[{NO_SPACES}]|[^\W{NO_SPACES}]+|[^\w\s]")
_ARTICLES = frozenset({"a", "an", "the"})
_LONGEST_WORD = 50
_SIGN = re.compile(r"(?!\.\d|(?<!\w)-\.?\d)(?:[^\w\s]|_)")  # all but the point of 3.5 and the minus of -3


def tokens(text: str) -> list[str]:
    """Words, signs and, where there are no spaces, characters. A run of letters too long for a word is split too."""
    found: list[str] = []
    for token in _TOKEN.findall(text):
        found += [token] if len(token) <= _LONGEST_WORD else token
    return found


def compared_words(text: str) -> list[str]:
    """The words of an answer as they are compared: without case, punctuation, articles and differences of width.

    As in SQuAD, but points inside and signs before numbers stay (3.5 is not 35, -3 is not 3), and scripts without
    spaces give characters. A text of nothing but articles keeps them, one of nothing but signs keeps these.
    """
    text = unicodedata.normalize("NFKC", text).casefold().replace("−", "-")
    words = _ONE.sub(lambda found: f" {found[0]} ", _SIGN.sub(_kept, text)).split()
    return [word for word in words if word not in _ARTICLES] or words or text.split()


def _kept(sign: re.Match[str]) -> str:
    """What stays of a character that is no letter: marks on letters do, punctuation and symbols do not."""
    return sign[0] if unicodedata.category(sign[0])[0] in "MC" else ""
