"""How can SQL query a run?  Its lines, records and timings as views.

DuckDB (the extra `analysis`) reads record and log files in place. Other data (workers' output, histograms) is first
written as JSON to a temporary folder. Times are as recorded, without clock correction. Lines that cannot be parsed are
left out and counted; the timeline shows them.

    records   every event: time, place, source, tag, and its own fields as JSON
    logs      log lines (kind log) and lines of the workers' output (kind text), other fields as JSON
    timings   one row for each rank and section; heartbeat intervals have the name (heartbeat)
    periods   the same in periods of equal length, from which limits are learned
    calls     single durations: the first ones after each start, the longest ones, and all interrupted ones
    incidents the incidents of the report, with their cost
    phases    each phase of each incident's restart, by rank, or by node for a restart by the launcher
    restarts  each restart of each rank that is over, also those that the launcher undid
    seconds   where the time of each rank went, by cause; of ranks whose records are complete

The last four are views of the run's history, as in the report, on one clock."""

from __future__ import annotations

import contextlib
import errno
import importlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.history.completeness import Completeness
from resilience.history.history import History
from resilience.run_folder import query_rows
from resilience.run_folder.lines import LEVEL_OF
from resilience.run_folder.load import RECORDS, Reader, completeness_of
from resilience.run_folder.merge import LOGS, files_of, history_of
from resilience.run_folder.timings import TimingsReader

MEMORY = "1GB"  # memory limit of DuckDB; the rest goes to the temporary folder
BATCH = 1000  # rows fetched at once
_PLACE = {
    "job_id": "VARCHAR",
    "node": "VARCHAR",
    "role": "VARCHAR",
    "pid": "BIGINT",
    "attempt": "BIGINT",
    "cycle": "BIGINT",
    "call": "BIGINT",
    "iteration": "BIGINT",
    "initial_rank": "BIGINT",
    "rank": "BIGINT",
    "world_size": "BIGINT",
    "step": "BIGINT",
}
_RECORD = {"sequence": "BIGINT", "wall_ns": "BIGINT", "mono_ns": "BIGINT", "origin": _PLACE}
_LINE = {
    "ts": "VARCHAR",
    "level": "VARCHAR",
    "event": "VARCHAR",
    "mono_ns": "BIGINT",
    "seq": "BIGINT",
    **{name: kind for name, kind in _PLACE.items() if name != "call"},
    "section": "VARCHAR",
    "trace_id": "VARCHAR",
    "span_id": "VARCHAR",
    "kind": "VARCHAR",
    "file": "VARCHAR",
}
_OF_HISTORY = ("incidents", "phases", "restarts", "seconds")
_OF_TIMINGS = ("timings", "periods", "calls")
_COUNTS = ("attempt", "cycle", "call")  # omitted from a record if 0
_SPREAD = ("count", "sum_s", "mean_s", "p50_s", "p95_s", "p99_s", "max_s")
_TEXTS = ("node", "section", "outcome", "start", "layer", "kind", "category", "status", "phase")
_TIMES = ("ts", "until", "max_ts")
VIEWS: dict[str, tuple[str, ...]] = {
    "records": ("ts", "sequence", "wall_ns", "mono_ns", *_PLACE, "event", "level", "fields", "file"),
    "logs": (*_LINE, "fields"),
    "timings": ("node", "rank", "section", "outcome", *_SPREAD),
    "periods": ("node", "rank", "section", "ts", "until", "count", "sum_s", "mean_s", "p50_s", "max_s", "max_ts"),
    "calls": (
        "node",
        "rank",
        "section",
        "ts",
        "duration_s",
        "outcome",
        "number",
        "since_start",
        "start",
        "cycle",
        "iteration",
    ),
    "incidents": (
        "number",
        "layer",
        "attempt",
        "cycle",
        "call",
        "iteration",
        "ts",
        "kind",
        "category",
        "status",
        "first_rank",
        "hang_s",
        "restart_s",
        "rework_s",
        "lost_s",
    ),
    "phases": ("incident", "layer", "phase", "node", "rank", "ts", "duration_s"),
    "restarts": ("layer", "attempt", "cycle", "call", "iteration", "rank", "duration_s"),
    "seconds": ("rank", "work_s", "startup_s", "restart_s", "hang_s", "rework_s", "idle_s", "unknown_s"),
}


class QueryResult(msgspec.Struct):
    """The result of a query. rows: readable once, inside the `run_query` block. bad: number of lines left out.
    completeness: of the records and timings, if the query reads them."""

    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]
    bad: int
    completeness: Completeness


@contextlib.contextmanager
def run_query(folder: Path, sql: str) -> Iterator[QueryResult]:
    """Run an SQL query on a run.

    Raises: ConfigurationError if DuckDB is not installed or the query fails or has no statement."""
    try:
        duckdb = importlib.import_module("duckdb")
    except ImportError:
        raise ConfigurationError(
            "--sql needs DuckDB, which is not installed: pip install 'torch-resilience[analysis]'"
        ) from None
    with _temporary_folder() as name:
        temporary = Path(name)
        path = _readable_path(folder.absolute(), temporary / "run")
        history, completeness = _records_read(folder, sql)
        with contextlib.closing(duckdb.connect()) as connection:
            try:
                connection.execute(f"SET memory_limit = '{MEMORY}'")
                connection.execute(f"SET temp_directory = {_quoted(str(temporary))}")
                reader = TimingsReader(folder)
                bad = _define(connection, path, temporary, query_rows.tables(path, history, completeness, reader))
                if any(view in sql.lower() for view in _OF_TIMINGS):
                    completeness = msgspec.structs.replace(completeness, timings=tuple(reader.unread))
                result = connection.execute(sql)
                if result is None:
                    raise ConfigurationError(
                        "--sql: the query has no statement; write for example: SELECT count(*) FROM records"
                    )
                columns = tuple(column[0] for column in result.description or ())
                yield QueryResult(columns, _rows(result), bad, completeness)
            except duckdb.Error as error:
                views = "; ".join(f"{name}({', '.join(columns)})" for name, columns in VIEWS.items())
                raise ConfigurationError(f"--sql: {str(error).strip()}\nThe views are: {views}") from None


@contextlib.contextmanager
def _full_disk_explained() -> Iterator[None]:
    """Raises: ConfigurationError if the disk of the temporary files is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _unwritable(error) from error


def _readable_path(folder: Path, link: Path) -> Path:
    """Return a path of this folder that DuckDB accepts: it has to be UTF-8. Raises: ConfigurationError."""
    try:
        link.symlink_to(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or re.search("[\ud800-\udfff]", str(folder)):
            raise _unwritable(error) from error
        return folder  # the file system of temporary files has no links
    return link


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder for the tables of a query. Raises: ConfigurationError."""
    try:
        return tempfile.TemporaryDirectory(prefix="resilience-sql-")
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"--sql cannot write its tables in the folder for temporary files: {error.strerror}; free space, or set TMPDIR"
    )


def _rows(result: Any) -> Iterator[tuple[Any, ...]]:
    while batch := result.fetchmany(BATCH):
        yield from batch


def _records_read(folder: Path, sql: str) -> tuple[History, Completeness]:
    """Return the history that a query needs, and which of the records that it needs are missing."""
    names = sql.lower()  # DuckDB ignores the case of names
    if any(view in names for view in _OF_HISTORY):  # these views need a fold over all records
        reader = Reader(folder)
        history = history_of(folder, reader.records)
        return history, reader.completeness  # final after the reading
    return History(), completeness_of(folder) if "records" in names else Completeness()


def _define(connection: Any, folder: Path, temporary: Path, tables: Mapping[str, Iterable[dict[str, Any]]]) -> int:
    """Create the views for a query. Return how many lines of records and logs cannot be parsed."""
    connection.execute("CREATE TABLE levels (tag VARCHAR, level VARCHAR)")
    connection.executemany("INSERT INTO levels VALUES (?, ?)", list(LEVEL_OF.items()))
    text_path = temporary / "text.ndjson"
    _write(text_path, query_rows.text_of(folder))
    records = _objects(files_of(folder, RECORDS))
    logs = _objects(files_of(folder, LOGS))
    prefix = len(str(folder)) + 2  # SQL counts from 1
    origin = ", ".join(f"coalesce(r.origin.{n}, 0) AS {n}" if n in _COUNTS else f"r.origin.{n}" for n in _PLACE)
    connection.execute(
        f"""CREATE VIEW records AS
        SELECT make_timestamp(r.wall_ns // 1000) AS ts, r.sequence, r.wall_ns, r.mono_ns, {origin},
               tag AS event, coalesce(level, 'info') AS level, fields, substr(filename, {prefix}) AS file
        FROM (SELECT from_json(json, {_quoted(_shape(_RECORD))}) AS r, json->>'$.event.event' AS tag,
                     json->'$.event' AS fields, filename FROM {records} WHERE json IS NOT NULL)
        LEFT JOIN levels USING (tag)"""
    )
    plain = [f"r.{name}" for name in _LINE if name not in ("ts", "kind", "file")]
    columns = ", ".join(["TRY_CAST(r.ts AS TIMESTAMP) AS ts", *plain])
    shape = _quoted(_shape(_LINE))
    connection.execute(
        f"""CREATE VIEW logs AS
        SELECT {columns}, coalesce(r.kind, 'log') AS kind, coalesce(r.file, substr(filename, {prefix})) AS file, fields
        FROM (SELECT from_json(json, {shape}) AS r, json AS fields, filename FROM {logs} WHERE json IS NOT NULL
              UNION ALL SELECT from_json(json, {shape}), NULL, NULL FROM {_objects([text_path])})"""
    )
    for view, rows in tables.items():
        table = temporary / f"{view}.ndjson"
        _write(table, rows)
        columns = ", ".join(
            f"make_timestamp(r.{name}) AS {name}" if name in _TIMES else f"r.{name}" for name in VIEWS[view]
        )
        kinds = {
            name: "VARCHAR" if name in _TEXTS else "DOUBLE" if name.endswith("_s") else "BIGINT" for name in VIEWS[view]
        }
        connection.execute(
            f"CREATE VIEW {view} AS SELECT {columns} FROM "
            f"(SELECT from_json(json, {_quoted(_shape(kinds))}) AS r FROM {_objects([table])})"
        )
    count = (
        f"SELECT (SELECT count(*) FROM {records} WHERE json IS NULL) + (SELECT count(*) FROM {logs} WHERE json IS NULL)"
    )
    return int(connection.execute(count).fetchone()[0])


def _objects(files: Iterable[Path]) -> str:
    """Return a table of JSON objects, one per line, NULL for a line that is none."""
    names = [_quoted(_only(path)) for path in files if path.stat().st_size]
    if not names:
        return "(SELECT NULL::JSON AS json, NULL::VARCHAR AS filename WHERE false)"
    lines = f"read_ndjson_objects([{', '.join(names)}], ignore_errors = true, filename = true)"  # of any JSON type
    return f"(SELECT CASE json_type(json) WHEN 'OBJECT' THEN json END AS json, filename FROM {lines})"


def _only(path: Path) -> str:
    """Return a pattern that matches this path alone: DuckDB takes each path for a pattern."""
    return re.sub(r"([*?[])", r"[\1]", str(path))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _shape(kinds: dict[str, Any]) -> str:
    return encoding.to_json_text(kinds)


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with _full_disk_explained(), path.open("wb") as file:
        for row in rows:
            file.write(encoding.to_json(row) + b"\n")
