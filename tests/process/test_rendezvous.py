"""Agents in processes of their own meet, lose each other, and meet again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
)

from resilience.errors import ConfigurationError, StoreError
from tests.process.rendezvousing import LIMIT, Agent, Agents, agents, meet
from tests.support.server import ForkServer
from tests.support.stops import await_stops

Make = Callable[..., Agents]
LOSES = {"keep_alive_max_attempt": 25}  # a node that is silent for 5 s is lost


@pytest.fixture
def make(fork_server: ForkServer, tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def begin(nodes: str, **conf: Any) -> Agents:
            return stack.enter_context(agents(fork_server, tmp_path, nodes, **conf))

        yield begin


def test_single_node_restarts_with_a_fresh_store_each_time(make: Make) -> None:
    agent = make("1").start("a")
    assert agent.answer() is True  # it hosts
    seen = [agent.do("meet") for _ in range(3)]
    assert [told.cycle for told in seen] == [0, 1, 2]
    assert [(told.rank, told.size, told.store) for told in seen] == [(0, 1, [])] * 3
    assert len({told.address for told in seen}) == 3


def test_two_nodes_restart_with_the_same_ranks_and_a_fresh_store(make: Make) -> None:
    them = make("2").several(2)
    first = meet(them)
    assert sorted(told.rank for told in first) == [0, 1]
    assert len({told.address for told in first}) == 1
    for cycle in (1, 2):
        told = meet(them)
        assert [each.cycle for each in told] == [cycle] * 2
        assert [each.rank for each in told] == [each.rank for each in first]
        assert [each.store for each in told] == [[], []]
        assert told[0].address == told[1].address != first[0].address


def test_all_agents_obey_the_first_word_on_a_cycles_end(make: Make) -> None:
    a, b = make("2").several(2)
    meet([a, b])
    assert not a.do("is_cycle_ended")
    assert a.do("cycle_end") is None
    assert b.do("end_cycle", "a worker failed") == "a worker failed"
    assert a.do("end_cycle", "all is well") == "a worker failed"
    assert a.do("is_cycle_ended") and b.do("is_cycle_ended")
    meet([a, b])
    assert not a.do("is_cycle_ended")


def test_job_store_outlives_cycles(make: Make) -> None:
    a, b = make("2").several(2)
    meet([a, b])
    a.do("job_store", "set", "restarts", "3")
    meet([a, b])
    assert b.do("job_store", "get", "restarts") == b"3"


def test_late_node_joins_where_there_is_room(make: Make) -> None:
    job = make("1:3", last_call_timeout=0.2)
    (a,) = job.several(1)
    (told,) = meet([a])
    assert told.size == 1 and a.do("num_nodes_waiting") == 0
    late = job.start("b")
    late.answer()
    late.ask("meet")
    assert await_value(a, "num_nodes_waiting", 1)
    (told,) = meet([a])
    assert (told.rank, told.size, told.cycle) == (0, 2, 1)
    assert late.answer()[:3] == (1, 1, 2)


def test_newcomer_at_the_maximum_waits_until_a_place_is_free_whatever_its_limit(make: Make) -> None:
    job = make("1:2")
    a, b = job.several(2)
    meet([a, b])
    spare = job.start("c", join_timeout=1)
    spare.answer()
    spare.ask("meet")
    told = meet([a, b])  # a restart tears nobody from its place
    assert [each.size for each in told] == [2, 2] and spare.is_silent(2.0)
    assert a.do("num_nodes_waiting") == 0
    b.do("leave", "excluded")
    assert await_value(a, "num_nodes_waiting", 1)
    assert a.do("lost_nodes") == ["b"]
    meet([a])
    assert spare.answer()[1:3] == (1, 2)


def test_killed_node_is_found_lost_and_the_next_cycle_is_smaller(make: Make) -> None:
    job = make("1:3", **LOSES)
    a, b, c = job.several(3)
    assert {told.size for told in meet([a, b, c])} == {3}
    c.kill()
    told = meet([a, b])
    assert [each.size for each in told] == [2, 2]
    assert sorted(each.rank for each in told) == [0, 1]


def test_stopped_node_is_lost_and_learns_that_its_cycle_is_over(make: Make) -> None:
    a, b = make("1:2", **LOSES).several(2)
    meet([a, b])
    b.send_signal(signal.SIGSTOP)
    await_stops([b.pid])
    (told,) = meet([a])
    assert told.size == 1
    b.send_signal(signal.SIGCONT)
    assert b.do("is_cycle_ended")
    b.ask("meet")
    assert await_value(a, "num_nodes_waiting", 1)
    (told,) = meet([a])
    assert told.size == b.answer().size == 2


def test_neighbour_tells_of_a_lost_node_while_workers_run(make: Make) -> None:
    a, b, c = make("1:3", **LOSES).several(3)
    meet([a, b, c])
    c.kill()
    assert await_value(a, "lost_nodes", ["c"], also=b)


@pytest.mark.slow
def test_second_lost_node_is_found_though_its_watcher_was_the_first(make: Make) -> None:
    """The cycle goes on meanwhile, as with min-healthy."""
    them = make("1:4", **LOSES).several(4)
    ranks = {agent.node: told.rank for agent, told in zip(them, meet(them), strict=True)}
    host = ranks["a"]
    watcher, watched = (next(agent for agent in them if ranks[agent.node] == (host + ahead) % 4) for ahead in (2, 1))
    left = [agent for agent in them if agent not in (watcher, watched)]
    watcher.kill()
    assert await_value(left[0], "lost_nodes", [watcher.node], also=left[1])
    watched.kill()
    both = sorted((watcher.node, watched.node), key=lambda node: ranks[node])
    assert await_value(left[0], "lost_nodes", both, also=left[1])


def test_next_in_line_takes_over_from_a_leader_that_is_killed(make: Make) -> None:
    job = make("3", **LOSES)
    a, b = job.several(2)
    c = job.start("c")
    c.answer()
    c.ask("meet")
    job.store().wait(["leader/0/0"])  # it is c
    a.ask("meet")
    c.kill()
    b.ask("meet")
    successor = job.start("c")
    successor.answer()
    successor.ask("meet")
    assert [each.answer().size for each in (a, b, successor)] == [3, 3, 3]


def test_returning_node_has_its_rank_again(make: Make) -> None:
    job = make("2:3", **LOSES)
    them = job.several(3)
    ranks = {agent.node: told.rank for agent, told in zip(them, meet(them), strict=True)}
    leaver = max(them[1:], key=lambda agent: ranks[agent.node])
    rest = [agent for agent in them if agent is not leaver]
    leaver.kill()
    meet(rest)
    again = job.start(leaver.node)
    again.answer()
    again.ask("meet")
    assert await_value(rest[0], "num_nodes_waiting", 1)
    meet(rest)
    assert again.answer().rank == ranks[leaver.node]


def test_excluded_node_takes_part_no_more_and_others_go_on(make: Make) -> None:
    a, b, c = make("1:3").several(3)
    meet([a, b, c])
    a.do("exclude", "c", "its GPU fell off the bus")
    c.ask("meet")
    told = meet([a, b])
    assert [each.size for each in told] == [2, 2]
    with pytest.raises(RendezvousClosedError, match="its GPU fell off the bus"):
        c.answer()
    with pytest.raises(RendezvousClosedError, match="excluded"):
        c.do("meet")


def test_closed_rendezvous_turns_everybody_away(make: Make) -> None:
    job = make("1:2")
    a, b = job.several(2)
    meet([a, b])
    spare = job.start("c")
    spare.answer()
    spare.ask("meet")
    job.await_entries(3)
    b.do("set_closed", "completed")
    with pytest.raises(RendezvousClosedError, match="completed"):
        spare.answer()
    assert a.do("is_closed") and a.do("last_words") == "completed"
    assert a.do("is_cycle_ended")
    assert a.do("num_nodes_waiting") == 0
    with pytest.raises(RendezvousClosedError, match="completed"):
        a.do("meet")


def test_newcomer_that_ends_before_it_has_a_place_closes_nothing(make: Make) -> None:
    job = make("1:3", last_call_timeout=6)
    a, b = job.several(2)
    meet([a, b])
    newcomer = job.start("c")
    newcomer.answer()
    assert newcomer.do("shutdown")  # as its launcher does if its own start fails
    assert a.do("last_words") == ""
    assert [each.cycle for each in meet([a, b])] == [1, 1]


def test_agent_that_ends_before_the_first_cycle_ends_the_job_for_all(make: Make) -> None:
    a, b = make("2").several(2)
    assert b.do("shutdown")
    with pytest.raises(RendezvousClosedError, match="the job is over"):
        a.do("meet")


def test_store_outlives_the_end_of_the_agent_that_hosts_it(make: Make) -> None:
    a, b = make("2").several(2)
    meet([a, b])
    a.ask("shutdown")
    assert a.is_silent(1.0)
    b.do("job_store", "set", "last", "words")
    assert b.do("shutdown") is True
    assert a.answer() is True


def test_host_that_is_excluded_serves_the_others_until_they_are_through(make: Make) -> None:
    a, b = make("1:2").several(2)
    meet([a, b])
    a.do("exclude", "a", "disk full")
    a.ask("leave")
    for cycle in (1, 2):
        assert b.do("meet")[:3] == (cycle, 0, 1)
    assert a.is_silent(0.3)
    b.do("shutdown")
    assert a.answer() is True


def test_agent_that_is_asked_to_stop_waits_no_longer(make: Make, tmp_path: Path) -> None:
    job = make("2")
    (a,) = job.several(1)
    a.ask("meet")
    job.await_entries(1)
    (tmp_path / "a.stop").touch()
    with pytest.raises(RendezvousClosedError, match="node a was asked to stop while it waited for cycle 0"):
        a.answer()
    b, c = job.start("b"), job.start("c")
    for agent in (b, c):
        agent.answer()
    assert [told.size for told in meet([b, c])] == [2, 2]  # it is not missed, nor is its lead


def test_host_that_finishes_does_not_wait_for_the_dead(make: Make) -> None:
    a, b = make("2", **LOSES).several(2)
    meet([a, b])
    b.kill()
    assert a.do("shutdown") is True


def test_loss_of_the_host_is_reported_as_torch_does(make: Make) -> None:
    a, b = make("2", **LOSES).several(2)
    meet([a, b])
    a.kill()
    for name in ("num_nodes_waiting", "is_closed", "meet"):
        with pytest.raises(RendezvousConnectionError):
            b.do(name)
    assert b.do("shutdown") is False


def test_static_rendezvous_keeps_the_given_ranks_over_restarts(make: Make) -> None:
    job = make("2", backend="static")
    a, b = job.start("a", rank=1), job.start("b", rank=0)
    assert b.answer() is True and a.answer() is False
    for cycle in (0, 1):
        told = meet([a, b])
        assert [(each.cycle, each.rank, each.store) for each in told] == [(cycle, 1, []), (cycle, 0, [])]


def test_second_node_of_one_infrastructure_rank_is_refused(make: Make) -> None:
    job = make("2", keep_alive_max_attempt=25)  # so long it might be the successor of a lost node
    a = job.start("a", infra_rank=0)
    a.answer()
    twin = job.start("twin", infra_rank=0)
    twin.answer()
    a.ask("meet")
    job.await_entries(1)
    twin.ask("meet")
    with pytest.raises(ConfigurationError, match=r"node twin has infrastructure rank 0, but node a"):
        twin.answer()
    b = job.start("b", infra_rank=1)
    b.answer()
    b.ask("meet")
    assert (a.answer().rank, b.answer().rank) == (0, 1)


def test_successor_of_a_lost_node_gets_its_infrastructure_rank(make: Make) -> None:
    job = make("2", **LOSES)
    a, b = job.start("a", infra_rank=0), job.start("b", infra_rank=1)
    for agent in (a, b):
        agent.answer()
    meet([a, b])
    b.ask("meet")
    job.await_entries(3)
    job.store().wait(["leader/1/0"])  # without one, who comes next forms the cycle with the dead
    b.kill()  # it had arrived
    successor = job.start("b", infra_rank=1)
    successor.answer()
    successor.ask("meet")
    a.ask("meet")
    assert (a.answer().rank, successor.answer().rank) == (0, 1)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"inner": "zookeeper"}, "the rendezvous backend is 'zookeeper'"),
        ({"join_timeout": "soon"}, "join_timeout is 'soon', expected a number above 0"),
        ({"backend": "static"}, "pass --node-rank"),
        ({"infra_rank": 7}, "this node's rank is 7, but the job has at most 1 node"),
    ],
)
def test_wrong_configuration_is_reported(make: Make, conf: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make("1").start("a", **conf).answer()


def test_port_that_is_taken_is_reported_by_the_node_that_must_host(make: Make) -> None:
    job = make("1")
    job.start("a").answer()
    with pytest.raises(StoreError, match="this node cannot host the rendezvous"):
        job.start("b", is_host=True).answer()


def await_value(agent: Agent, name: str, value: object, also: Agent | None = None) -> bool:
    """Ask until an agent answers this, and another one too, if there is one: who notices tells the other."""
    deadline = time.monotonic() + LIMIT
    asked = [agent, also or agent]
    while [each.do(name) for each in asked] != [value, value]:
        assert time.monotonic() < deadline, f"{name} is {[each.do(name) for each in asked]}, never {value}"
    return True


def test_loss_of_a_node_leaves_no_gap_between_the_infrastructures_ranks(make: Make) -> None:
    job = make("1:3", **LOSES)
    a = job.start("a", infra_rank=0)
    a.answer()  # it hosts the store, not the one that is killed
    b, c = (job.start(node, infra_rank=rank) for rank, node in enumerate("bc", 1))
    for agent in (b, c):
        agent.answer()
    assert [told.rank for told in meet([a, b, c])] == [0, 1, 2]
    b.kill()
    assert [told.rank for told in meet([a, c])] == [0, 1]


def test_newcomer_fills_the_gap_and_others_keep_their_ranks(make: Make) -> None:
    job = make("2:3")
    a, b, c = job.several(3)
    ranks = {agent.node: told.rank for agent, told in zip((a, b, c), meet([a, b, c]), strict=True)}
    lost = next(agent for agent in (a, b, c) if ranks[agent.node] == 1)
    newcomer = job.start("d")
    newcomer.answer()
    newcomer.ask("meet")
    job.await_entries(4)
    rest = [agent for agent in (a, b, c) if agent is not lost]
    lost.ask("leave")
    job.await_entries(5)
    assert [told.rank for told in meet(rest)] == [ranks[agent.node] for agent in rest]
    assert newcomer.answer().rank == 1


def test_two_jobs_share_one_endpoint(make: Make) -> None:
    job = make("1")
    a = job.start("a")
    a.answer()
    other = job.start("b", run_id="another")
    other.answer()
    assert [a.do("meet").cycle, other.do("meet").cycle, a.do("meet").cycle] == [0, 0, 1]
    other.do("job_store", "set", "key", "other")
    assert a.do("job_store", "add", "key", 1) == 1
