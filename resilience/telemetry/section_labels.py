"""Which sections have series of their own?  At most MAX_SECTIONS; the others are summed up as OTHER.

The choice follows from what is on disk, not from the order in which an exporter read it, so that the next exporter of
the node makes the same one: first the sections that have ended, in the order of each rank's own file, then those that
only records name, then those that are open or have a limit. But an exporter keeps the sections whose durations it has
shown, also if another rank later ends others first: a series that ends, with its counts moved to OTHER, would look like
a reset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resilience.facts.deadlines import parse_limit
from resilience.telemetry.catalogue import MAX_SECTIONS, OTHER, Labels
from resilience.telemetry.durations import Durations
from resilience.telemetry.rank_snapshot import RankSnapshot


class SectionLabels:
    """The names of one node's sections, and those that are labels."""

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}  # section -> its place in the order in which a rank's sections first ended
        self._recorded: set[str] = set()
        self._chosen: set[str] = set()
        self._shown: set[str] = set()  # the chosen ones that had ended

    def take_durations(self, ranks: Iterable[Durations]) -> None:
        """Replace what the ranks have recorded."""
        self._ended = {}
        for durations in ranks:
            for place, section in enumerate(durations.sections()):
                self._ended[section] = min(self._ended.get(section, place), place)

    def take_limit(self, name: str) -> Labels:
        """Return the kind of a limit in a record, and the section that it applies to: `labelled` labels it."""
        limit = parse_limit(name)
        if limit.section:
            self._recorded.add(limit.section)
        return limit.kind, limit.section or ""

    def choose(self, snapshots: Iterable[RankSnapshot], others: Iterable[str]) -> None:
        """Choose the labels. snapshots: of ranks that exist now. others: further names, of the present state."""
        order = dict.fromkeys(others, (2, 0))
        for snapshot in snapshots:
            order |= {section.name: (2, 0) for section in snapshot.sections}
            order |= {limit.name: (2, 0) for limit in snapshot.limits if limit.name}
        order |= dict.fromkeys(self._recorded, (1, 0))
        order |= {name: (0, -1 if name in self._shown else place) for name, place in self._ended.items()}
        self._chosen = set(sorted(order, key=lambda name: (order[name], name))[:MAX_SECTIONS])
        self._shown = self._chosen & self._ended.keys()

    def label(self, section: str) -> str:
        """Return the label of a section."""
        return section if section in self._chosen else OTHER

    def labelled(self, counts: Mapping[Labels, float]) -> dict[Labels, float]:
        """Return counts by kind of limit and section with the sections' labels."""
        labelled: dict[Labels, float] = {}
        for (kind, section), count in counts.items():
            labels = kind, self.label(section) if section else ""
            labelled[labels] = labelled.get(labels, 0) + count
        return labelled
