"""The numerics class of an engine: engines of one class round alike.

A request that moves within one class gets the tokens that it would have got unmoved, batches being
equal. Between two classes its logits differ in their last bits, and now and then a token does.
"""

from __future__ import annotations


def numerics_class(**words: object) -> str:
    """All that engines must agree on to round alike; readable, in the order of the names.

    Example: `numerics_class(workers=2, dtype="bfloat16")` is "dtype=bfloat16 workers=2".
    """
    return " ".join(f"{name}={'-'.join(str(word).split())}" for name, word in sorted(words.items()))


def difference(here: str, there: str) -> str:
    """The words in which two classes differ, for people."""
    ours, theirs = here.split(), there.split()
    only_here = [word for word in ours if word not in theirs]
    only_there = [word for word in theirs if word not in ours]
    return f"{' '.join(only_there) or 'nothing'} there, {' '.join(only_here) or 'nothing'} here"
