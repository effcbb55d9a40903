"""How does the state of a job look on a terminal?  Lines to print once, and an interactive screen.

Pure: `status_lines` returns what `resilience status` prints. `frame` fills a screen of a given size for a
`StatusView`, and `pressed` returns the view after a key. `status.state.grouped` condenses many ranks to a few lines.
Single ranks follow in order of staleness, as many as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import msgspec

from resilience.attribution.advice import first_ranks_in_words, named
from resilience.errors import ConfigurationError
from resilience.facts.in_words import about_in_words, count, seconds
from resilience.run_folder.rank_ranges import ranges_of
from resilience.status.state import Group, Now, RankNow, Sort, grouped, order
from resilience.system.render import Line, brief, cut, field, table

What = Literal["ranks", "alike", "node"]
SORTS: tuple[Sort, ...] = get_args(Sort)
WHATS: tuple[What, ...] = get_args(What)
WIDE = 100  # columns needed for the extra column
_NODE, _SECTION, _BAR = 8, 10, 10  # columns; of the first two at least so many
MOST_NAMES = 4  # in a line
_SILENT = "no monitor writes (the disk may be full); what follows may be old"
_STYLES = {"running": "green", "starting": "cyan", "restarting": "yellow", "ended": "bold", "lost": "bold red"}
_KEYS = (
    ("q", "quit"),
    ("s, S", f"next or previous order: {', '.join(SORTS)}"),
    ("g", "switch between ranks, groups of similar ranks, and nodes"),
    ("w", "show only unhealthy ranks, or all"),
    ("/", "filter by ranks (0-7,12) or by part of a node, state or section; Enter keeps it, Esc removes it"),
    ("space", "pause or continue"),
    ("↑ ↓ PgUp PgDn Home End", "scroll (also j and k)"),
    ("h, ?", "this help"),
)


class StatusView(msgspec.Struct, frozen=True):
    """What the user wants to see. top: the first visible row. text: filter; show only ranks that match it."""

    what: What = "ranks"
    sort: Sort = "staleness"
    only_wrong: bool = False
    text: str = ""
    top: int = 0
    is_typing: bool = False
    is_paused: bool = False
    is_helping: bool = False


# -- keys --------------------------------------------------------------------------------------


def pressed(view: StatusView, key: str, page: int) -> StatusView | None:
    """Return the view after a key; None if the user quits. page: rows of a screen."""
    if view.is_typing:
        return _typed(view, key)
    changed = msgspec.structs.replace
    moves = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page, "home": -(10**9), "end": 10**9}
    if key in moves:
        return changed(view, top=max(0, view.top + moves[key]))
    match key:
        case "q":
            return None
        case "s" | "S":
            return changed(view, sort=_next(SORTS, view.sort, 1 if key == "s" else -1), top=0)
        case "g":
            return changed(view, what=_next(WHATS, view.what, 1), top=0)
        case "w":
            return changed(view, only_wrong=not view.only_wrong, top=0)
        case "/":
            return changed(view, is_typing=True, text="", top=0)
        case " ":
            return changed(view, is_paused=not view.is_paused)
        case "h" | "?":
            return changed(view, is_helping=not view.is_helping)
        case "escape":
            return changed(view, is_helping=False, text="", top=0)
        case _:  # a key without a function
            pass
    return changed(view, is_helping=False)


def _typed(view: StatusView, key: str) -> StatusView:
    changed = msgspec.structs.replace
    match key:
        case "enter":
            return changed(view, is_typing=False)
        case "escape":
            return changed(view, is_typing=False, text="")
        case "backspace":
            return changed(view, text=view.text[:-1], top=0)
        case _:  # a key without a function
            pass
    return changed(view, text=view.text + key, top=0) if len(key) == 1 else view


def _next(choices: Sequence[What] | Sequence[Sort], present: str, by: int) -> str:
    return choices[(choices.index(present) + by) % len(choices)]


# -- one look ----------------------------------------------------------------------------------


def status_lines(now: Now, width: int, rows: int) -> Iterator[Line]:
    """Yield the state of a job for a terminal of `width` columns, with at most about `rows` lines for its ranks."""
    yield from _head(now, width)
    if not now.ranks or now.phase == "ended":
        return
    yield ()
    ranks = order(now.ranks, "staleness", len(now.ranks))
    if len(ranks) <= rows:
        yield from _rank_table(order(ranks, "rank"), width)
        return
    groups = _few_groups(ranks, width, rows)
    yield from groups
    visible = ranks[: max(1, rows - len(groups))]
    yield from _rank_table(visible, width)
    yield ((f"  … and {count(len(ranks) - len(visible), 'more rank')}, less suspicious than these", "dim"),)


def _head(now: Now, width: int, rate: float | None = None) -> Iterator[Line]:
    """Yield the lines about the job as a whole. rate: steps per second, if known."""
    duration = now.last_record_s if now.phase == "lost" else now.since_s
    yield (
        ("Run ", "bold"),
        (cut(now.job_id, width - 42) + (f", attempt {now.attempt}" if now.attempt else ""), "bold cyan"),
        (f"  {now.phase}", _STYLES[now.phase]),
        (f"  for {seconds(duration)}" if now.phase != "ended" else "", "dim"),
    )
    if now.outcome is not None:
        detail = f": {now.detail}" if now.detail else ""
        yield from field("ended", f"{now.outcome}{detail}", width, "green" if now.is_well else "red", indent=2)
    if now.phase == "lost":
        yield from field("lost", now.detail, width, "red", indent=2)
    for name, text in _gaps(now):
        yield from field(name, text, width, "red", indent=2)
    size = "?" if now.world_size is None else count(now.world_size, "rank")
    states = ", ".join(f"{number} {state}" for state, number in now.states.items())
    world = f"{size} on {count(now.nodes, 'node')}" + (f": {states}" if states else "")
    yield from field("world", world, width, indent=2)
    yield from field("restarts", _restarts(now), width, indent=2)
    if step := _step(now, rate):
        yield from field("step", step, width, indent=2)
    if now.failure is not None:
        text = f"{seconds(now.failure.ago_s)} ago, rank {now.failure.rank}: {now.failure.what}"
        yield from field("last fault", cut(text.replace("\n", " "), 2 * (width - 25)), width, "yellow", indent=2)


def _gaps(now: Now) -> Iterator[tuple[str, str]]:
    """Yield what is known to be missing or old in what is shown."""
    lost = "must have run; what follows lacks them"
    if now.damaged:
        lines = count(now.damaged, "line")
        yield "records", f"{lines} could not be read, so what follows may be wrong; `resilience report` names the files"
    if now.unreadable:
        yield "records", f"cannot be read, so what follows lacks them: {_first_of(now.unreadable, 'file')}"
    if now.absent:
        yield "records", f"no records of {named(now.absent)}, which {lost}"
    if now.absent_agents:
        yield "records", f"no records of the agent of {_first_of(now.absent_agents, 'node')}, which {lost}"
    if now.old:
        yield "snapshots", f"nothing new of {named(now.old)}: {_SILENT}"


def _first_of(names: Sequence[str], noun: str) -> str:
    more = f" and {count(len(names) - MOST_NAMES, f'more {noun}')}" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _step(now: Now, rate: float | None) -> str:
    """Return the steps of the ranks whose state is known; if none is, the last known ones with their age."""
    known = [rank for rank in now.ranks if rank.step is not None and rank.is_well]
    present = [rank for rank in known if not rank.is_old]
    steps = [rank.step for rank in present or known if rank.step is not None]
    if not steps:
        return ""
    low, high = min(steps), max(steps)
    speed = "" if rate is None else f", {rate:.3g} per second"
    age_s = min((rank.shown_s or 0.0 for rank in known), default=0.0)
    return (f"{low}" if low == high else f"{low} to {high}") + (speed if present else f", {seconds(age_s)} ago")


def _restarts(now: Now) -> str:
    parts, about = [], about_in_words(now.has_all_records)
    if now.restarts is not None:
        remaining = f", {about}{now.restarts_left} left" if now.restarts_left is not None else ""
        parts.append(f"{about}{now.restarts} by the launcher (cycle {now.cycle}){remaining}")
    if now.iterations or not parts:
        parts.append(f"{about}{now.iterations} in place" + (" since" if now.restarts else ""))
    return "; ".join(parts)


# -- a screen ----------------------------------------------------------------------------------


class ScreenFrame(msgspec.Struct, frozen=True):
    """A screen. top: the first visible row, within bounds. page: rows for the table."""

    lines: list[Line]
    top: int = 0
    page: int = 1


def frame(
    now: Now | None, view: StatusView, width: int, height: int, looked_s: float, rate: float | None = None
) -> ScreenFrame:
    """Return a screen of exactly `height` lines of at most `width` columns. looked_s: age of the state in seconds."""
    if view.is_helping:
        return ScreenFrame(_filled(list(_help(width)), height))
    if now is None:
        return ScreenFrame(_filled([(("No records yet …", "dim"),)], height))
    head = [*_head(now, width, rate), ()]
    is_wanted = _filter(view)
    ranks = [rank for rank in order(now.ranks, view.sort, len(now.ranks)) if is_wanted(rank)]
    room = height - len(head) - 2  # the table's header and the foot
    if view.what == "ranks":
        groups = _few_groups(ranks, width, room) if len(ranks) > room > 0 else []
        head, room = head + groups, room - len(groups)
    else:
        groups_shown = grouped(ranks, view.what, len(now.ranks))
    total = len(ranks) if view.what == "ranks" else len(groups_shown)
    page = max(1, room)
    top = min(view.top, max(0, total - page))
    if view.what == "ranks":
        rows = _rank_table(ranks[top : top + page], width)
    else:
        rows = _group_table(groups_shown[top : top + page], width, view.what)
    foot = _foot(view, top, min(total, top + page), total, len(now.ranks), looked_s, width)
    return ScreenFrame([*_filled([*head, *rows], height - 1), foot], top, page)


def _filled(lines: list[Line], height: int) -> list[Line]:
    """Return exactly `height` lines."""
    return [*lines[:height], *([()] * (height - len(lines)))]


def _foot(view: StatusView, first: int, last: int, total: int, world: int, looked_s: float, width: int) -> Line:
    if view.is_typing:
        return ((cut(f"filter: {view.text}", width - 1), "bold"), ("▏", "bold"))
    noun = {"ranks": "rank", "alike": "group", "node": "node"}[view.what]
    notes = [f"{first + 1 if total else 0}-{last} of {count(total, noun)} by {view.sort}"]
    if view.only_wrong:
        notes.append("only unhealthy ranks")
    if view.text:
        notes.append(f"filter {view.text!r}, {count(world, 'rank')} in all")
    if view.is_paused:
        notes.append("PAUSED")
    if looked_s >= 2.0:
        notes.append(f"as of {brief(looked_s)} ago")
    keys = "  q quit  h help"
    return ((cut(", ".join(notes), width - len(keys)), "bold"), (keys, "dim"))


def _help(width: int) -> Iterator[Line]:
    yield (("resilience status --watch", "bold"),)
    yield ()
    for key, meaning in _KEYS:
        yield from field(key, meaning, width, indent=2, gutter=24)
    yield ()
    text = "silent: how long the rank had shown nothing new when its monitor last wrote to the run folder; old: it has "
    text += "not written for so long, and step and section are as old as that"
    yield from field("", text, width, "dim", indent=2, gutter=0)


def _filter(view: StatusView) -> Callable[[RankNow], bool]:
    """Return what decides whether a rank is shown. The text is parsed here, once for all ranks."""
    matches = _matching(view.text.strip().lower())
    return lambda rank: not (view.only_wrong and rank.is_well) and matches(rank)


def _matching(text: str) -> Callable[[RankNow], bool]:
    if not text:
        return lambda rank: True
    if set(text) <= set("0123456789,- "):
        try:
            ranges = ranges_of(text.rstrip(",-"))
        except ConfigurationError:
            return lambda rank: False  # incomplete while the user types
        return lambda rank: any(rank.rank in chosen for chosen in ranges)
    return lambda rank: text in f"{rank.node} {rank.state} {_place(rank)}".lower()


# -- tables ------------------------------------------------------------------------------------


def _few_groups(ranks: Sequence[RankNow], width: int, room: int) -> list[Line]:
    """Return what most ranks do: a few of the `room` lines, and a blank line."""
    groups = sorted(grouped(ranks, "alike", len(ranks)), key=lambda group: -len(group.ranks))
    visible = groups[: max(2, room // 4)]
    lines = _group_table(visible, width, "alike")
    return [*lines, ()]


def _group_table(groups: Sequence[Group], width: int, what: What) -> list[Line]:
    name = "node" if what == "node" else "ranks"
    header: tuple[str, ...] = (name, "count", "state", "step", "section", "open / limit", "silent")
    rows: list[tuple[str, ...]] = [
        (
            group.worst.node if what == "node" else _some(group.ranks),
            str(len(group.ranks)),
            group.state,
            _steps(group),
            group.where,
            _age(group.worst),
            _silence(group.worst),
        )
        for group in groups
    ]
    rows = _narrowed(header, rows, width)
    lines = table(header, rows, width, wide=4)
    return [lines[0], *_painted(lines[1:], [group.worst for group in groups])]


def _some(ranks: Sequence[int]) -> str:
    """Return the first of these ranks. Another column shows their number."""
    words, hidden = first_ranks_in_words(ranks, 3)
    return f"{words} …" if hidden else words


def _narrowed(header: Sequence[str], rows: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Shorten the first column (ranks or node) and the states if the section would not fit."""
    sizes = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    room = width - 2 * len(header) - sum(sizes[column] for column in (1, 3, 5, 6)) - _SECTION
    state = min(sizes[2], max(_NODE, room // 3))
    first = min(sizes[0], max(_NODE, room - state))
    return [(cut(row[0], first), row[1], cut(row[2], state), *row[3:]) for row in rows]


def _rank_table(ranks: Sequence[RankNow], width: int) -> list[Line]:
    header: tuple[str, ...] = ("rank", "pid", "node", "state", "step", "section", "open / limit", "silent")
    rows: list[tuple[str, ...]] = [
        (
            str(rank.rank),
            "" if rank.pid is None else str(rank.pid),
            rank.node,
            rank.state,
            "" if rank.step is None else str(rank.step),
            _section(rank),
            _age(rank),
            _silence(rank),
        )
        for rank in ranks
    ]
    if width >= WIDE:
        header, rows = (*header, "limit used"), [(*row, _bar(rank)) for row, rank in zip(rows, ranks, strict=True)]
    fixed = [column for column in range(len(header)) if column not in (2, 5)]
    fixed_width = sum(max(len(row[column]) for row in (header, *rows)) for column in fixed) + 2 * len(header)
    node = min(max(len(row[2]) for row in (header, *rows)), max(_NODE, width - fixed_width - _SECTION))
    rows = [(*row[:2], cut(row[2], node), *row[3:]) for row in rows]
    lines = table(header, rows, width, wide=5)
    return [lines[0], *_painted(lines[1:], ranks)]


def _painted(lines: Sequence[Line], ranks: Sequence[RankNow]) -> list[Line]:
    return [((text, _style(rank)),) for rank, ((text, _),) in zip(ranks, lines, strict=True)]


def _style(rank: RankNow) -> str:
    if not rank.is_well:
        return "red"
    return "yellow" if rank.share >= 0.8 else ""


def _place(rank: RankNow) -> str:
    if rank.section is None:
        return "" if rank.doing in ("", "run") else f"({rank.doing})"
    return rank.section.name


def _section(rank: RankNow) -> str:
    return _place(rank) + (f" +{rank.sections - 1}" if rank.section is not None and rank.sections > 1 else "")


def _steps(group: Group) -> str:
    if group.low is None:
        return ""
    return str(group.low) if group.low == group.high else f"{group.low}-{group.high}"


def _age(rank: RankNow) -> str:
    section = rank.section
    if section is None:
        return ""
    return f"{brief(section.open_s)} / {'–' if section.limit_s is None else brief(section.limit_s)}"


def _silence(rank: RankNow) -> str:
    if rank.is_old:
        return f"old {brief(rank.shown_s or 0.0)}"
    return "" if rank.silent_s is None else brief(rank.silent_s)


def _bar(rank: RankNow) -> str:
    if not rank.share:
        return ""
    return f"{'|' * min(_BAR, round(_BAR * rank.share)):{_BAR}} {rank.share:4.0%}"
