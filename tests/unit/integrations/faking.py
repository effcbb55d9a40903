"""A client without a monitor: it notes what it is told."""

from __future__ import annotations

import errno
from typing import Any, ClassVar

from resilience.core.limits import HeartbeatTimeouts, SectionTimeouts
from resilience.errors import RankMonitorClientError
from resilience.system.background import NO_ANSWER


def no_answer_in_time(*args: object, **kwargs: object) -> None:
    """Stands in for `Writer.ask` on a disk that is slower than any limit."""
    raise OSError(errno.ETIMEDOUT, NO_ANSWER)


class FakeClient:
    """Stands in for RankMonitorClient. `made` are those of a test, in order; `told` is what all of them heard: `+step`
    when a section is opened, `-step` when it is closed, `!step` when it is discarded. They share one link."""

    made: ClassVar[list[FakeClient]] = []
    told: ClassVar[list[str]] = []
    refuses: ClassVar[set[str]] = set()  # names of sections that the program has opened itself; "attach"; "limits"

    def __init__(self) -> None:
        self.is_initialized = False
        self.loaded: dict[str, Any] | None = None
        self.calculated: list[tuple[tuple[str, ...], bool]] = []
        self.calculated_heartbeats = 0
        self.sections: set[str] = set()
        self.hb_timeouts = HeartbeatTimeouts()
        self.section_timeouts = SectionTimeouts()
        self.made.append(self)

    @classmethod
    def clear(cls) -> None:
        for each in (cls.made, cls.told, cls.refuses):
            each.clear()  # type: ignore[attr-defined]

    def init_workload_monitoring(self) -> None:
        if "attach" in self.refuses:
            raise RankMonitorClientError("nobody is there")
        self.is_initialized = True
        self.told.append("init")

    def shutdown_workload_monitoring(self) -> None:
        assert not self.sections
        for each in self.made:
            each.is_initialized = False
            each.sections.clear()
        self.told.append("shutdown")

    def send_heartbeat(self) -> None:
        assert self.is_initialized
        self.told.append("beat")

    def start_section(self, name: str) -> None:
        assert self.is_initialized
        assert name not in self.sections
        if name in self.refuses or any(name in each.sections for each in self.made):
            raise RankMonitorClientError("it is open already")
        self.sections.add(name)
        self.told.append(f"+{name}")

    def end_section(self, name: str) -> None:
        self.sections.remove(name)
        self.told.append(f"-{name}")

    def discard_section(self, name: str) -> None:
        self.sections.remove(name)
        self.told.append(f"!{name}")

    def calculate_and_set_section_timeouts(
        self, selected_sections: list[str], calc_out_of_section: bool, skip_if_not_ready: bool, method: str
    ) -> bool:
        assert skip_if_not_ready
        assert method == "fit"
        if "limits" in self.refuses:
            raise RankMonitorClientError("the new limits have 70000 bytes")
        self.calculated.append((tuple(selected_sections), calc_out_of_section))
        self.section_timeouts = SectionTimeouts(
            calculated_sections=self.section_timeouts.calculated_sections.union(selected_sections)
        )
        return True

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool) -> bool:
        self.calculated_heartbeats += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"calculated": len(self.calculated), "sections": sorted(self.section_timeouts.calculated_sections)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state
        self.section_timeouts = SectionTimeouts(calculated_sections=frozenset(state["sections"]))
