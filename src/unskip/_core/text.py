"""Words for messages."""

import difflib

MAX_NAMES = 40  # a message with more known names than this shows the closest ones only


def nearest(word: str, known: list[str]) -> str:
    """The end of an error message: the likely spelling, and all that there are, or the closest where there are many."""
    close = difflib.get_close_matches(word, known, n=6)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    if len(known) > MAX_NAMES:
        shown = close[1:] or known[:6]
        return f"{hint} There are {len(known)}, for instance {', '.join(shown)}."
    return f"{hint} Known: {', '.join(known) or 'none'}."
