"""How do the lines of a run look on a terminal?  Folded lines, or every line in chosen columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from resilience.attribution.advice import ranks_in_words
from resilience.logs.folding import FoldedLine
from resilience.run_folder.entries import utc
from resilience.run_folder.lines import Line, line_text, shown_fields, without_colours
from resilience.system.render import Line as Row

COLUMNS = (
    "time",
    "date",
    "level",
    "who",
    "text",
    "rank",
    "node",
    "role",
    "cycle",
    "iteration",
    "kind",
    "event",
    "file",
)
_WHO = 12
_NODES_NAMED = 5
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}
_SHORT = {"warning": "warn", "critical": "crit"}


def folded_rows(lines: Iterable[FoldedLine]) -> Iterator[Row]:
    """Yield folded lines for a terminal. Lines of a minority of ranks are marked."""
    day = ""
    for folded in lines:
        if (today := utc(folded.line.at_ns)[:10]) != day:
            day = today
            yield ((f"{day} UTC", "dim"),)
        style = _STYLES.get(folded.line.level, "")
        if folded.stands_out:
            style = f"bold {style}".strip() if "bold" not in style else style
        yield (
            (_time(folded.line) + ("! " if folded.stands_out else "  "), style if folded.stands_out else "dim"),
            (f"{_SHORT.get(folded.line.level, folded.line.level):5}  ", style),
            (f"{_speakers(folded):{_WHO}}  ", "cyan"),
            (folded.text, style),
        )


def rows_of(lines: Iterable[Line], columns: tuple[str, ...]) -> Iterator[Row]:
    """Yield every line for a terminal, in these columns."""
    day = ""
    for line in lines:
        if (today := utc(line.at_ns)[:10]) != day and "time" in columns:
            day = today
            yield ((f"{day} UTC", "dim"),)
        style = _STYLES.get(line.level, "")
        fields = {} if set(columns) <= set(COLUMNS) else shown_fields(line)
        cells = [_cell(line, name, fields) for name in columns]
        yield ((f"{'  '.join(cells[:-1])}  " if len(cells) > 1 else "", "dim"), (cells[-1].rstrip(), style))


def _cell(line: Line, name: str, fields: dict[str, object]) -> str:
    match name:
        case "time":
            return _time(line)
        case "date":
            return utc(line.at_ns) + ("~" if line.is_placed else " ")
        case "level":
            return f"{_SHORT.get(line.level, line.level):5}"
        case "who":
            return f"{_speaker(line):{_WHO}}"
        case "text":
            return line_text(line)
        case "rank" | "cycle" | "iteration":
            value = getattr(line, name)
            return f"{'-' if value is None else value:>4}"
        case "node" | "role" | "kind" | "event":
            return f"{without_colours(getattr(line, name) or '-'):8}"
        case "file":
            return f"{line.file}:{line.number}"
        case _:
            return without_colours(str(fields.get(name, "-")))


def _time(line: Line) -> str:
    return utc(line.at_ns)[11:23] + ("~" if line.is_placed else " ")


def _speaker(line: Line) -> str:
    if line.rank is None:
        return f"{line.role or ''} {line.node or line.file}".strip()
    return f"{'monitor' if line.role == 'monitor' else 'rank'} {line.rank}"


def _speakers(folded: FoldedLine) -> str:
    if not folded.ranks:
        return f"{folded.line.role or ''} {','.join(folded.nodes[:_NODES_NAMED])}".strip()
    role = "monitor" if folded.line.role == "monitor" else "rank"
    return f"{role}{'s' if len(folded.ranks) > 1 else ''} {ranks_in_words(folded.ranks, 4).replace(', ', ',')}"
