"""How long a pattern is when its repetitions are written out: what bounds the time that a matcher spends on it."""

import re

_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def written_out(pattern: str) -> int:
    """Return the number of characters, classes and escapes of a pattern with every counted repetition unrolled.

    What has no end (`*`, `{3,}`) counts as often as it must come, once at least. Of wrong patterns any number.
    """
    totals, last, place = [0], [0], 0
    while place < len(pattern):
        letter = pattern[place]
        size = 1
        if letter == "(":
            totals.append(0)
            last.append(0)
            place += 1
            continue
        if letter == ")" and len(totals) > 1:
            inner = totals.pop()
            last.pop()
            totals[-1] += inner
            last[-1] = inner
        elif letter == "{" and (found := _COUNT.match(pattern, place)):
            times = max(int(number) for number in found.groups() if number)
            totals[-1] += last[-1] * (max(times, 1) - 1)
            last[-1] *= max(times, 1)
            size = len(found[0])
        elif letter not in "*+?|^$":
            if letter == "\\":
                size = 2
            elif letter == "[" and (found := _CLASS.match(pattern, place)):
                size = len(found[0])
            totals[-1] += 1
            last[-1] = 1
        place += size
    return sum(totals)
