"""Toy tasks that a tiny model learns in a minute, made at run time: no files, nothing to download.

Every prompt and answer consists of words between single spaces, so that a word-level tokenizer with ``vocabulary()``
can say all of them.
"""

from __future__ import annotations

from relax_envs.digits import ANSWERS as DIGITS
from relax_envs.digits import PROMPT as DIGIT_PROMPT
from relax_envs.toy import colour, motion, tone, words


def vocabulary() -> tuple[str, ...]:
    """Each word that a toy task or the digits data set uses, once; roles and special tokens are the model's own."""
    texts = [words.NTH_PROMPT, words.LAST_PROMPT, colour.PROMPT, tone.PROMPT, motion.PROMPT, DIGIT_PROMPT]
    answers = [*words.WORDS, *colour.COLOURS, *tone.TONES, *motion.DIRECTIONS, *DIGITS]
    found = [word for text in texts for word in text.split() if not word.startswith(("{", "<"))]
    return tuple(dict.fromkeys(found + answers))
