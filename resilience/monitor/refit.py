"""Which limits do all runs so far support?  The same fit as `resilience calibrate`, from within a running job.

Each rank reads its monitor's histograms, of this run and of earlier runs with the same configuration in the same
folder. The histograms are added up over ranks, so that all ranks compute the same limits. They count the durations of
single ranks, so the requested probability is for one duration of one rank; a rate needs as many occurrences as there.
Occurrences that a limit ended are missing, because a rank does not know the verdicts of incidents, and so are the last
seconds: a monitor writes every 15 s. The first occurrences after a start are left out: they are slower, and
`core.watch` does not apply these limits to them.

The rank is silent while it reads, and the disk may not answer. So it reads the newest runs only, and contributes
nothing if that takes too long."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

from resilience.calibration.differences import differences, serious
from resilience.calibration.episodes import LargestDurations
from resilience.calibration.fitting import MONTH, fit_pool, trial_probability
from resilience.calibration.pool import Pool
from resilience.calibration.tails import quantile
from resilience.core.limits import SHORTEST
from resilience.errors import DecodeError
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import OUT_OF_SECTION, section_of
from resilience.facts.identity import attempt_of
from resilience.system import files, rank_reductions
from resilience.system.background import Writer
from resilience.system.environment import Settings, launched_folder
from resilience.telemetry.durations import Durations, Series, read_histograms
from resilience.telemetry.timings import LARGEST_BUCKET, upper_bound

MOST_RUNS = 5  # the newest
READ_LIMIT = SHORTEST / 2  # seconds: no calculated limit is exceeded meanwhile, nor while other ranks wait for this one
_BETWEEN = "\0"  # separates run and deadline in a name that ranks exchange; occurs in neither
_WHOLE_RUN = "\0"  # in place of a deadline: the run's milliseconds, in bucket 0
_RANKS = "\0ranks"  # in place of a deadline: the number of ranks that exchange, in bucket 0

_reader = Writer()  # one thread, however often the disk does not answer


def limits(
    selected: Collection[str] | None, ranks: int, rank: int, report: Callable[[str, Exception], object]
) -> dict[str, float]:
    """Return the limits of sections for which a rate can be stated, in seconds; "out_of_section" is one of them.

    selected: sections, by default all. ranks: of the job, in each of which a false alarm restarts all. report: takes a
    deadline whose fit failed, and the error; it has no limit then, on any rank. A collective of the default group: all
    ranks call it. Without a group, the limits are those of this rank's durations."""
    states = _own_histograms(rank)
    rank_buckets: dict[str, Counter[int]] = defaultdict(Counter)
    rank_buckets[_exchanged("", _RANKS)][0] = 1
    for state in states:  # a rank that moved has one for each node of a run
        for name, series in state.deadlines.items():
            if name == OUT_OF_SECTION or section_of(name) is not None:
                rank_buckets[_exchanged(state.header.run, name)].update(_buckets(series))
        rank_buckets[_exchanged(state.header.run, _WHOLE_RUN)][0] += int(1000 * state.seconds)
    sums = rank_reductions.sums_over_ranks(rank_buckets, LARGEST_BUCKET + 1)
    summed = {_run_and_deadline(exchanged): buckets for exchanged, buckets in sums.items()}
    members = summed["", _RANKS][0]
    milliseconds = sum(buckets.get(0, 0) for (_, name), buckets in summed.items() if name == _WHOLE_RUN)
    seconds = milliseconds / 1000 / members
    if seconds <= 0.0:
        return {}
    by_section: dict[str, dict[str, dict[int, int]]] = defaultdict(dict)
    for (run, name), buckets in summed.items():
        if name not in (_WHOLE_RUN, _RANKS) and (selected is None or section_of(name) in (*selected, None)):
            by_section[name][run] = buckets
    fitted: dict[str, float] = {}
    for name, runs in sorted(by_section.items()):
        pool = _pool([runs[run] for run in sorted(runs, key=_begun)], members)
        every = seconds / max(1.0, pool.n / members)
        p = trial_probability(1.0, len(by_section), MONTH, every) / max(1, ranks)
        try:
            answer = fit_pool(pool, p, per_occurrence=members)
        except (ArithmeticError, ValueError) as error:  # a fault of the fit must not end the training
            report(name, error)
            continue
        if answer.status == "ok" and answer.timeout_s is not None:
            fitted[section_of(name) or name] = answer.timeout_s
    return fitted


def _exchanged(run: str, deadline: str) -> str:
    return f"{run}{_BETWEEN}{deadline}"


def _run_and_deadline(exchanged: str) -> tuple[str, str]:
    run, _, deadline = exchanged.partition(_BETWEEN)
    return run, deadline


def _begun(run: str) -> tuple[int, str]:
    """Return the sort key of a run's name that puts a later attempt of a job behind an earlier one."""
    job_id = Settings.from_environment().job_id
    return (attempt_of(run, job_id) or 0) if job_id is not None else 0, run


def _own_histograms(rank: int) -> list[Durations]:
    """Return this rank's histograms, of this run and of earlier ones with its configuration. [] if they cannot be read
    in time."""
    settings = Settings.from_environment()
    job_id = settings.job_id
    if job_id is None:
        return []
    deadline = time.monotonic() + READ_LIMIT
    try:
        return _reader.ask(lambda: _read(Path(settings.run_dir), job_id, rank, deadline), READ_LIMIT)
    except OSError:
        return []


def _read(run_dir: Path, job_id: str, rank: int, deadline: float) -> list[Durations]:
    """Raises: TimeoutError if it is not done at `deadline`."""
    own_folder = launched_folder()

    def is_own(run: str) -> bool:
        return attempt_of(run, job_id) is not None if own_folder is None else run == own_folder.name

    def read(folder: Path) -> list[Durations]:
        states = []
        for path in files.matching(folder, f"*-{rank}.hist"):
            if time.monotonic() > deadline:
                raise TimeoutError
            with contextlib.suppress(OSError, DecodeError):
                states.append(read_histograms(path))
        return [state for state in states if state.header.rank == rank]

    newest_first = sorted(files.matching(run_dir, "*/timings"), key=_changed_ns, reverse=True)
    own = next(filter(None, (read(folder) for folder in newest_first if is_own(folder.parent.name))), None)
    if own is None:
        return []
    configuration = max(own, key=lambda state: state.began_at).header.configuration
    runs: list[list[Durations]] = []
    for folder in newest_first:
        alike = [state for state in read(folder) if _is_like(configuration, state.header.configuration)]
        if alike:
            runs.append(alike)
        if len(runs) == MOST_RUNS:
            break
    return [state for alike in runs for state in alike]


def _changed_ns(folder: Path) -> int:
    """Return when a file in a folder was last replaced; a monitor does that while its run lasts."""
    signature = files.signature(folder)
    return 0 if signature is None else signature[2]


def _is_like(ours: Configuration, other: Configuration) -> bool:
    return not serious(differences(ours, other))


def _buckets(series: Series) -> dict[int, int]:
    """Return the count of each duration, without the first occurrences after each start."""
    settled = {number: count - series.early.buckets.get(number, 0) for number, count in series.total.buckets.items()}
    return {number: count for number, count in settled.items() if count > 0}


def _pool(runs: list[dict[int, int]], ranks: int) -> Pool:
    """Merge runs. Buckets have no order in time, so the first runs stand for the first half of the data. One event may
    slow down all ranks."""
    merged: dict[int, int] = {}
    for buckets in runs:
        for number, count in buckets.items():
            merged[number] = merged.get(number, 0) + count
    first = runs[: (len(runs) + 1) // 2]
    return Pool(
        descending=_descending(merged),
        run_medians=tuple(quantile(_descending(buckets), 0.5) for buckets in runs if buckets),
        drift=0.0,
        first_half_max=max((upper_bound(max(buckets)) for buckets in first if buckets), default=0.0),
        run_maxima=tuple(upper_bound(max(buckets)) for buckets in runs if buckets),
        tops=LargestDurations(most_per_event=ranks),
    )


def _descending(buckets: dict[int, int]) -> tuple[tuple[float, int], ...]:
    return tuple((upper_bound(number), buckets[number]) for number in sorted(buckets, reverse=True))
