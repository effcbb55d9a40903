"""What did many ranks say at once, and who said something else?  Like lines become one.

Lines are alike if they differ in numbers only. The same line of several ranks within a moment is told
once, with its ranks; where most ranks agree to the letter and a few differ in a value, the few are told
apart and stand out; where all differ, as times and losses do, the values are told as a range. A line that
only a minority says stands out too, unless it is what rank 0 says for all.

Bounded: a moment is short, and no more than `HELD` bytes of lines wait for it to pass."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from resilience.analysis.lines import LEVELS, Line, said

MOMENT_NS = 2 * 10**9
HELD = 24 << 20  # bytes of text that wait
QUIET = 10
VARIANTS = 3  # told one by one beside a majority; more are told as a range
_TOKEN = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?!\w)|\w*\d\w*", re.ASCII)
_SERIOUS = frozenset(LEVELS[LEVELS.index("warning") :])


class Said(msgspec.Struct, frozen=True):
    """One thing that was said, by whom. line: the first of them. ranks: initial ranks; nodes: of agents.

    count: of lines. until_ns: when the last of them was said. stands_out: a minority's, beside others."""

    line: Line
    text: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    count: int
    until_ns: int
    stands_out: bool


def template(line: Line) -> str:
    """Return a line with everything that holds a digit taken out: equal for lines that are alike."""
    return f"{line.kind} {line.level} {_TOKEN.sub('#', said(line))}"


def templates(lines: Iterable[Line]) -> frozenset[int]:
    """Return hashes of the templates of a run: what was said there. Good within this process."""
    return frozenset(hash(template(line)) for line in lines)


class _Slot:
    """Lines of one template, one a speaker, that wait to be told together."""

    def __init__(self, line: Line, key: str, head: str) -> None:
        self.line = line
        self.key = key
        self.head = head
        self.until_ns = line.at_ns
        self.speakers: set[int | str] = set()
        self.variants: dict[str, list[int | str]] = {}
        self.size = 0

    def add(self, line: Line, text: str, speaker: int | str) -> None:
        self.until_ns = max(self.until_ns, line.at_ns)
        self.speakers.add(speaker)
        if text not in self.variants:
            self.size += len(text)
        self.variants.setdefault(text, []).append(speaker)


def fold(lines: Iterable[Line | None]) -> Iterator[Said]:
    """Fold lines that come in order of time; yields in the order of each first line.

    None: nothing new came for a while; after `QUIET` in a row, what waits is told."""
    waiting: deque[_Slot] = deque()
    by_key: dict[str, list[_Slot]] = {}
    ranks: set[int] = set()
    held = quiet = 0
    for line in lines:
        if line is None:
            quiet += 1
            while waiting and quiet >= QUIET:
                held -= waiting[0].size
                yield from _told(waiting, by_key, len(ranks))
            continue
        quiet = 0
        text = said(line)
        speaker = line.rank if line.rank is not None else line.node or line.file
        if isinstance(speaker, int):
            ranks.add(speaker)
        masked = _TOKEN.sub("#", text)
        key = f"{line.kind} {line.level} {line.role} {line.cycle} {line.iteration} {masked}"
        while waiting and (line.at_ns - waiting[0].line.at_ns > MOMENT_NS or held > HELD):
            held -= waiting[0].size
            yield from _told(waiting, by_key, len(ranks))
        slot = _free(by_key.setdefault(key, []), text, speaker)
        if slot is None:
            slot = _Slot(line, key, _head(line, masked))
            waiting.append(slot)
            by_key[key].append(slot)
        before = slot.size
        slot.add(line, text, speaker)
        held += slot.size - before
    while waiting:
        yield from _told(waiting, by_key, len(ranks))


def _free(slots: list[_Slot], text: str, speaker: int | str) -> _Slot | None:
    """The slot to join: where the very same was said, else the first where this speaker has not spoken."""
    first = None
    for slot in slots:
        if speaker not in slot.speakers:
            if text in slot.variants:
                return slot
            first = first or slot
    return first


def _head(line: Line, masked: str) -> str:
    """What two lines share that speak of the same thing."""
    return f"{line.kind} {line.role} " + (line.event if line.kind in ("record", "log") else masked[:16])


def _told(waiting: deque[_Slot], by_key: dict[str, list[_Slot]], world: int) -> Iterator[Said]:
    slot = waiting.popleft()
    by_key[slot.key].remove(slot)
    if not by_key[slot.key]:
        del by_key[slot.key]
    ordered = sorted(slot.variants.items(), key=lambda item: -len(item[1]))
    is_minority = _is_minority(slot, waiting, world)
    most, most_speakers = ordered[0]
    if len(ordered) == 1 or 2 * len(most_speakers) <= len(slot.speakers) or len(slot.speakers) < 3:
        yield _one(slot, _ranged([text for text, _ in ordered]), slot.speakers, is_minority)
        return
    yield _one(slot, most, most_speakers, is_minority)
    rest = ordered[1:]
    if len(rest) <= VARIANTS:
        for text, speakers in rest:
            yield _one(slot, text, speakers, True)
    else:
        yield _one(slot, _ranged([text for text, _ in rest]), [name for _, names in rest for name in names], True)


def _is_minority(slot: _Slot, waiting: Iterable[_Slot], world: int) -> bool:
    count = sum(isinstance(speaker, int) for speaker in slot.speakers)
    if not count or 2 * count >= world:
        return False
    if 0 not in slot.speakers or slot.line.level in _SERIOUS:
        return True
    return any(other.head == slot.head and 2 * len(other.speakers) > world for other in waiting)


def _one(slot: _Slot, text: str, speakers: Iterable[int | str], stands_out: bool) -> Said:
    ranks = tuple(sorted(speaker for speaker in speakers if isinstance(speaker, int)))
    nodes = tuple(sorted(speaker for speaker in speakers if isinstance(speaker, str)))
    return Said(slot.line, text, ranks, nodes, len(ranks) + len(nodes), slot.until_ns, stands_out)


def _ranged(texts: list[str]) -> str:
    """Return one text for several that differ in tokens with digits: numbers as lowest…highest, else *."""
    if len(texts) == 1:
        return texts[0]
    pieces = _TOKEN.split(texts[0])
    columns = zip(*(_TOKEN.findall(text) for text in texts), strict=True)
    return "".join(piece + token for piece, token in zip(pieces, [*map(_range, columns), ""], strict=True))


def _range(tokens: tuple[str, ...]) -> str:
    if len(set(tokens)) == 1:
        return tokens[0]
    try:
        numbers = sorted(tokens, key=float)
    except ValueError:
        return "*"
    return f"{numbers[0]}…{numbers[-1]}"
