"""Which lines did many ranks write at once, and which ranks differ?  Similar lines are folded into one.

Lines are similar if they differ only in numbers. The same line of several ranks within MOMENT_NS appears once, with
its ranks. If most ranks agree exactly and a few differ in a value, the few appear separately and stand out. If all
differ, as times and losses do, the values become a range. A line of a minority also stands out, unless rank 0 writes
it on behalf of all.

Memory is bounded: MOMENT_NS is short, and at most `HELD` bytes of lines wait for it to pass."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from resilience.analysis.lines import LEVELS, Line, line_text

MOMENT_NS = 2 * 10**9
HELD = 24 << 20  # bytes of waiting text
QUIET = 10
VARIANTS = 3  # shown separately next to a majority; more become a range
# A word is searched from its first character only (\b). From every character, a long word costs quadratic time.
_TOKEN = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?!\w)|\b[^\W\d]*\d\w*", re.ASCII)
_SERIOUS = frozenset(LEVELS[LEVELS.index("warning") :])
_Key = tuple[str, str, str | None, int | None, int | None, str]  # of similar lines; the last one is the masked text


class FoldedLine(msgspec.Struct, frozen=True):
    """A folded line. line: the first of the folded lines. ranks: initial ranks; nodes: of agents.

    count: number of lines. until_ns: time of the last one. stands_out: a minority of the ranks wrote it."""

    line: Line
    text: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    count: int
    until_ns: int
    stands_out: bool


def template(line: Line) -> str:
    """Return a line with every token that contains a digit replaced: equal for similar lines."""
    return f"{line.kind} {line.level} {_masked(line_text(line))}"


def templates(lines: Iterable[Line]) -> frozenset[int]:
    """Return hashes of the templates of a run's lines. Valid only in this process."""
    return frozenset(hash(template(line)) for line in lines)


def _masked(text: str) -> str:
    """Return a text with a 0 for every token. Every digit is part of a token, so the text has no other 0."""
    return _TOKEN.sub("0", text)


class _Slot:
    """Lines of one template that wait to be folded, one per speaker (rank or node)."""

    def __init__(self, line: Line, key: _Key, head: str) -> None:
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


def fold(lines: Iterable[Line | None]) -> Iterator[FoldedLine]:
    """Fold lines that arrive in order of time. Yield them in the order of their first lines.

    None: no new line for a while; after `QUIET` of them in a row, all waiting lines are yielded."""
    waiting: deque[_Slot] = deque()
    by_key: dict[_Key, list[_Slot]] = {}
    ranks: set[int] = set()
    held = empty_batches = 0
    for line in lines:
        if line is None:
            empty_batches += 1
            while waiting and empty_batches >= QUIET:
                held -= waiting[0].size
                yield from _folded(waiting, by_key, len(ranks))
            continue
        empty_batches = 0
        text = line_text(line)
        speaker = line.rank if line.rank is not None else line.node or line.file
        if isinstance(speaker, int):
            ranks.add(speaker)
        masked = _masked(text)
        key = (line.kind, line.level, line.role, line.cycle, line.iteration, masked)
        while waiting and (line.at_ns - waiting[0].line.at_ns > MOMENT_NS or held > HELD):
            held -= waiting[0].size
            yield from _folded(waiting, by_key, len(ranks))
        slot = _free(by_key.setdefault(key, []), text, speaker)
        if slot is None:
            slot = _Slot(line, key, _head(line, masked))
            waiting.append(slot)
            by_key[key].append(slot)
        previous_size = slot.size
        slot.add(line, text, speaker)
        held += slot.size - previous_size
    while waiting:
        yield from _folded(waiting, by_key, len(ranks))


def _free(slots: list[_Slot], text: str, speaker: int | str) -> _Slot | None:
    """Return the slot to join: one with the same text, else the first that this speaker is not in."""
    first_free = None
    for slot in slots:
        if speaker not in slot.speakers:
            if text in slot.variants:
                return slot
            first_free = first_free or slot
    return first_free


def _head(line: Line, masked: str) -> str:
    """Return the common part of lines about the same subject."""
    return f"{line.kind} {line.role} " + (line.event if line.kind in ("record", "log") else masked[:16])


def _folded(waiting: deque[_Slot], by_key: dict[_Key, list[_Slot]], world: int) -> Iterator[FoldedLine]:
    slot = waiting.popleft()
    by_key[slot.key].remove(slot)
    if not by_key[slot.key]:
        del by_key[slot.key]
    ordered = sorted(slot.variants.items(), key=lambda item: -len(item[1]))
    is_minority = _is_minority(slot, waiting, world)
    majority, majority_speakers = ordered[0]
    if len(ordered) == 1 or 2 * len(majority_speakers) <= len(slot.speakers) or len(slot.speakers) < 3:
        yield _folded_line(slot, _ranged([text for text, _ in ordered]), slot.speakers, is_minority)
        return
    yield _folded_line(slot, majority, majority_speakers, is_minority)
    variants = ordered[1:]
    if len(variants) <= VARIANTS:
        for text, speakers in variants:
            yield _folded_line(slot, text, speakers, True)
    else:
        yield _folded_line(
            slot, _ranged([text for text, _ in variants]), [name for _, names in variants for name in names], True
        )


def _is_minority(slot: _Slot, waiting: Iterable[_Slot], world: int) -> bool:
    count = sum(isinstance(speaker, int) for speaker in slot.speakers)
    if not count or 2 * count >= world:
        return False
    if 0 not in slot.speakers or slot.line.level in _SERIOUS:
        return True
    return any(candidate.head == slot.head and 2 * len(candidate.speakers) > world for candidate in waiting)


def _folded_line(slot: _Slot, text: str, speakers: Iterable[int | str], stands_out: bool) -> FoldedLine:
    ranks = tuple(sorted(speaker for speaker in speakers if isinstance(speaker, int)))
    nodes = tuple(sorted(speaker for speaker in speakers if isinstance(speaker, str)))
    return FoldedLine(slot.line, text, ranks, nodes, len(ranks) + len(nodes), slot.until_ns, stands_out)


def _ranged(texts: list[str]) -> str:
    """Return one text for several that differ in tokens with digits: numbers become lowest…highest, others *."""
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
