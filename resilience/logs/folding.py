"""Which lines did many ranks write at once, and which ranks differ?  Similar lines are folded into one.

Lines are similar if they differ only in numbers. The same line of several ranks within MOMENT_NS appears once, with
its ranks. If most ranks agree exactly and a few differ in a value, the few appear separately and stand out. If all
differ, as times and losses do, the values become a range. A line of a minority also stands out, unless rank 0 writes
it on behalf of all.

Memory is bounded: MOMENT_NS is short, and at most `HELD` bytes of lines wait for it to pass. A line may begin with a
time of the future, so that no later line comes: with `--follow` a line also waits at most for `QUIET` batches."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from resilience.run_folder.entries import utc
from resilience.run_folder.lines import LEVELS, Line, line_text

MOMENT_NS = 2 * 10**9
HELD = 48 << 20  # bytes of waiting lines
SLOT_BYTES, VARIANT_BYTES = 800, 350  # without the text, measured with tracemalloc; most lines are shorter than that
QUIET = 10  # batches of `--follow`, 0.2 s each, that a line waits for similar ones
VARIANTS = 3  # shown separately next to a majority; more become a range
# A word is searched from its first character only (\b). From every character, a long word costs quadratic time.
_TOKEN = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?!\w)|\b[^\W\d]*\d\w*", re.ASCII)
_SERIOUS = frozenset(LEVELS[LEVELS.index("warning") :])
_Speaker = int | str
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
    """Lines of one template that wait to be folded, one per speaker (rank or node). batch: in which the first came."""

    __slots__ = ("batch", "head", "is_folded", "key", "line", "size", "speakers", "until_ns", "variants")

    def __init__(self, line: Line, key: _Key, batch: int) -> None:
        self.line = line
        self.key = key
        self.batch = batch
        self.head = _head(line, key[-1])
        self.until_ns = line.at_ns
        self.speakers: set[_Speaker] = set()
        self.variants: dict[str, list[_Speaker]] = {}
        self.size = SLOT_BYTES
        self.is_folded = False

    def add(self, line: Line, text: str, speaker: _Speaker) -> None:
        self.until_ns = max(self.until_ns, line.at_ns)
        self.speakers.add(speaker)
        if text not in self.variants:
            self.size += len(text) + VARIANT_BYTES
        self.variants.setdefault(text, []).append(speaker)


class _Queue:
    """Slots of similar lines, or of equal ones. Finds a free slot in constant time on average.

    A slot that a speaker cannot join stays so. Each speaker's search begins where its previous one ended."""

    __slots__ = ("_begin", "_searched", "_slots", "waiting")

    def __init__(self) -> None:
        self.waiting = 0  # number of slots that are not folded yet
        self._slots: list[_Slot] = []
        self._begin = 0  # number of slots that were removed from the list
        self._searched: dict[_Speaker, int] = {}

    def append(self, slot: _Slot) -> None:
        self._slots.append(slot)
        self.waiting += 1

    def free_for(self, speaker: _Speaker) -> _Slot | None:
        """Return the first slot that this speaker is not in."""
        while self._slots and self._slots[0].is_folded:
            del self._slots[0]
            self._begin += 1
        index = max(0, self._searched.get(speaker, 0) - self._begin)
        while index < len(self._slots) and (self._slots[index].is_folded or speaker in self._slots[index].speakers):
            index += 1
        if index:
            self._searched[speaker] = self._begin + index
        return self._slots[index] if index < len(self._slots) else None


class _Waiting:
    """All slots that wait, the oldest first."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._queues: defaultdict[tuple[_Key, str | None], _Queue] = defaultdict(_Queue)  # by text; None: similar lines
        self._of_most: defaultdict[str, set[_Slot]] = defaultdict(set)  # by head: slots that most ranks may be in
        self._ranks: set[int] = set()
        self._held = 0
        self._batch = 0

    def take(self, line: Line) -> Iterator[FoldedLine]:
        """Let a line wait. Fold those that it cannot join, and those that do not fit into the memory."""
        speaker = line.rank if line.rank is not None else line.node or line.file
        if isinstance(speaker, int):
            self._ranks.add(speaker)
        while self._slots and (line.at_ns - self._slots[0].line.at_ns > MOMENT_NS or self._held > HELD):
            yield from self._fold_first()
        self._add(line, line_text(line), speaker)

    def end_batch(self) -> Iterator[FoldedLine]:
        """Fold the lines that have waited long enough, whatever time they have."""
        self._batch += 1
        while self._slots and self._batch - self._slots[0].batch >= QUIET:
            yield from self._fold_first()

    def fold_all(self) -> Iterator[FoldedLine]:
        while self._slots:
            yield from self._fold_first()

    def _add(self, line: Line, text: str, speaker: _Speaker) -> None:
        slot = self._slot_for(line, text, speaker)
        previous_size = slot.size if slot.speakers else 0
        slot.add(line, text, speaker)
        self._held += slot.size - previous_size
        if 2 * len(slot.speakers) > len(self._ranks):
            self._of_most[slot.head].add(slot)

    def _slot_for(self, line: Line, text: str, speaker: _Speaker) -> _Slot:
        """Return the slot to join: one with the same text, else one of similar lines, else a new one."""
        key = (line.kind, line.level, line.role, line.cycle, line.iteration, _masked(text))
        equal, similar = self._queues[key, text], self._queues[key, None]
        slot = equal.free_for(speaker)
        if slot is not None:
            return slot
        slot = similar.free_for(speaker)
        if slot is None:
            slot = _Slot(line, key, self._batch)
            self._slots.append(slot)
            similar.append(slot)
        equal.append(slot)
        return slot

    def _fold_first(self) -> Iterator[FoldedLine]:
        slot = self._slots.popleft()
        slot.is_folded = True
        self._held -= slot.size
        for text in (None, *slot.variants):
            queue = self._queues[slot.key, text]
            queue.waiting -= 1
            if not queue.waiting:
                del self._queues[slot.key, text]
        others = self._of_most[slot.head]
        others.discard(slot)
        is_minority = _is_minority(slot, others, len(self._ranks))
        if not others:
            del self._of_most[slot.head]
        yield from _folded(slot, is_minority)


def fold(lines: Iterable[Line | None]) -> Iterator[FoldedLine]:
    """Fold lines that arrive in order of time. Yield them in the order of their first lines.

    None: the end of a batch. A line waits until `QUIET` batches have ended, or a line MOMENT_NS later comes."""
    waiting = _Waiting()
    for line in lines:
        if line is None:
            yield from waiting.end_batch()
        else:
            yield from waiting.take(line)
    yield from waiting.fold_all()


def _head(line: Line, masked: str) -> str:
    """Return the common part of lines about the same subject."""
    return f"{line.kind} {line.role} " + (line.event if line.kind in ("record", "log") else masked[:16])


def _folded(slot: _Slot, is_minority: bool) -> Iterator[FoldedLine]:
    ordered = sorted(slot.variants.items(), key=lambda item: -len(item[1]))
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


def _is_minority(slot: _Slot, others: Iterable[_Slot], world: int) -> bool:
    """Return True if a slot's line stands out. others: waiting slots with the same head."""
    count = sum(isinstance(speaker, int) for speaker in slot.speakers)
    if not count or 2 * count >= world:
        return False
    if 0 not in slot.speakers or slot.line.level in _SERIOUS:
        return True
    return any(2 * len(other.speakers) > world for other in others)


def _folded_line(slot: _Slot, text: str, speakers: Iterable[_Speaker], stands_out: bool) -> FoldedLine:
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


def folded_entry(folded: FoldedLine) -> dict[str, Any]:
    """Return a folded line as plain values."""
    return {
        "ts": utc(folded.line.at_ns),
        "until": utc(folded.until_ns),
        "level": folded.line.level,
        "event": folded.line.event if folded.line.kind in ("record", "log") else folded.text,
        "text": folded.text,
        "ranks": folded.ranks,
        "nodes": folded.nodes,
        "count": folded.count,
        "stands_out": folded.stands_out,
    }
