"""Single-turn tasks from data sets: ask once, and score the reply."""

from __future__ import annotations

from relax_envs.data.environment import RowsEnvironment


class SingleTurn(RowsEnvironment):
    """Rows such as ``{"messages": [{"role": "user", "content": "what digit ? <image>"}], "images": ["7.png"],
    "answer": "7"}``; ``{"prompt": "..."}`` stands for one user message. ``<image>``, ``<audio>`` and ``<video>`` are
    replaced by the row's media in order. Columns with other names are given by ``columns``.

    A missing or empty file raises DataError, as does asking for the task of a row that cannot be used.
    """
