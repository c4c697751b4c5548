"""What a network says when it can't run on an input."""

RUN_ERRORS = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)  # of a network on a wrong input


def reason(error: BaseException) -> str:
    """The first line of what an error says, without its full stop; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
