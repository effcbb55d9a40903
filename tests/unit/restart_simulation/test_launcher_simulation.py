"""The launcher's protocol under faults, in virtual jobs: every schedule keeps every invariant.

Many more of the same run with `python -m tests.launcher_simulation`; `python -m tests.mutate` shows that they can
fail. What is simulated are the functions that the launcher runs (`core.supervision`, `core.rendezvous`)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resilience.core.budget import Budget
from resilience.core.supervision import Rules
from resilience.core.terms import Terms
from tests.launcher_simulation.jobs import Job, Report
from tests.launcher_simulation.schedules import (
    RULES,
    TERMS,
    Asks,
    Breaks,
    Crash,
    Delay,
    Fails,
    Fault,
    Freeze,
    Hangs,
    Kind,
    Partition,
    PartitionBefore,
    Pause,
    Repeat,
    Schedule,
    Sick,
    Signalled,
    StoreDies,
    all_sigterms,
    draw,
    everywhere,
    only_sigterms,
)


def run(*faults: Fault, comes: tuple[float, ...] = (0.0, 0.2, 0.4), **settings: Any) -> Report:
    made: dict[str, Any] = {"terms": TERMS, "rules": RULES} | settings
    return Job(Schedule(seed=1, comes=comes, faults=faults, **made)).run()


HELPED = Rules("min-healthy", Budget(3), apart=30.0)  # workers help themselves if others fail
ONE_OF_TWO = {"comes": (0.0, 0.5), "terms": Terms(1, 1, join_limit=60.0, last_call=3.0), "node_hosts_store": False}


# -- stories -----------------------------------------------------------------------------------------------------


def test_undisturbed_job_completes_in_one_cycle() -> None:
    assert run() == run()  # the same schedule is the same run
    report = run()
    assert (report.cycles, report.ends) == (1, ("completed",) * 3)


def test_failed_worker_restarts_all_nodes() -> None:
    report = run(Fails(1, 0, 3.0))
    assert (report.cycles, report.ends) == (2, ("completed",) * 3)


def test_hung_worker_restarts_all_nodes() -> None:
    report = run(Hangs(1, 0))
    assert (report.cycles, report.ends) == (2, ("completed",) * 3)


def test_killed_agent_is_replaced_by_a_smaller_cycle() -> None:
    report = run(Crash(2, at=10.0))
    assert (report.cycles, report.ends) == (2, ("completed", "completed", "killed"))


def test_killed_host_of_the_store_ends_the_others_with_a_reason() -> None:
    assert run(Crash(0, at=10.0)).ends == ("killed", "failed", "failed")
    assert run(StoreDies(10.0)).ends == ("failed",) * 3


def test_evicted_node_leaves_and_the_others_go_on() -> None:
    report = run(Signalled(2, at=10.0))
    assert (report.cycles, report.ends) == (2, ("completed", "completed", "preempted"))


def test_interrupt_of_one_agent_stops_the_job() -> None:
    assert run(Signalled(2, "SIGINT", at=10.0)).ends == ("preempted",) * 3


def test_node_that_is_cut_off_ends_and_the_others_go_on() -> None:
    report = run(Partition(2, 10.0, 1000.0))
    assert (report.cycles, report.ends) == (2, ("completed", "completed", "failed"))


def test_short_partition_and_short_freeze_are_nothing() -> None:
    assert run(Partition(2, 10.0, 3.0)).cycles == 1
    assert run(Freeze(10.0, 3.0)).cycles == 1


def test_job_that_has_used_its_restarts_ends() -> None:
    report = run(*(Fails(1, cycle, 3.0) for cycle in range(5)), rules=Rules("any-failed", Budget(2, 0, 0, 0)))
    assert (report.cycles, report.ends) == (3, ("exhausted",) * 3)


def test_signalled_node_stops_the_job_if_too_few_remain_after_an_earlier_loss() -> None:
    report = run(Crash(2, at=5.0), Signalled(1, at=25.0), rules=HELPED, work=60.0)
    assert (report.cycles, report.ends) == (1, ("preempted", "preempted", "killed"))


def test_loss_of_the_node_before_one_that_was_lost_is_noticed() -> None:
    lost = Crash(2, at=5.0), Crash(1, at=25.0)
    report = run(
        *lost, comes=(0.0, 0.1, 0.2, 0.3), terms=msgspec.structs.replace(TERMS, most=4), rules=HELPED, work=60.0
    )
    assert (report.cycles, report.ends) == (1, ("completed", "killed", "killed", "completed"))


def test_node_that_asks_to_be_excluded_leaves_for_good_and_the_others_go_on() -> None:
    report = run(Asks(1, "ExcludeThisNode", 10.0))
    assert (report.cycles, report.ends) == (2, ("completed", "excluded", "completed"))
    report = run(Asks(1, "ExcludeThisNode", 10.0), comes_back=3.0)
    assert report.ends[:4] == ("completed", "excluded", "completed", "excluded")


def test_excluded_host_of_the_store_serves_the_others_until_a_signal_stops_the_job() -> None:
    excluded = Asks(0, "ExcludeThisNode", 10.0)
    assert run(excluded).ends == ("excluded", "completed", "completed")
    for signals in ((15.0,), (15.0, 15.1)):
        report = run(excluded, *(Signalled(0, at=at) for at in signals))
        assert report.ends == ("excluded", "preempted", "preempted")


def test_rank_that_asks_for_the_end_of_the_job_ends_it() -> None:
    assert run(Asks(1, "ShutdownWorkload", 10.0)).ends == ("shutdown",) * 3
    assert run(Asks(1, "ShutdownWorkload", 10.0), Asks(1, "ExcludeThisNode", 10.0)).ends == ("shutdown",) * 3


def test_unhealthy_node_is_left_out() -> None:
    report = run(Sick(1, 0))
    assert (report.cycles, report.ends) == (1, ("completed", "excluded", "completed"))
    report = run(Sick(1, 1), Fails(2, 0, 3.0))
    assert (report.cycles, report.ends) == (2, ("completed", "excluded", "completed"))


def test_nodes_that_are_too_few_wait_and_end_with_a_reason() -> None:
    job = Job(Schedule(seed=1, comes=(0.0,), terms=TERMS, rules=RULES))
    assert job.run().ends == ("failed",)
    verdict = job.agents[0].verdict
    assert verdict is not None and "found no place within 60 s" in verdict.detail
    assert run(Crash(1, at=5.0), comes=(0.0, 0.1)).ends == ("failed", "killed")


def test_host_of_the_store_that_found_too_few_nodes_ends_the_job_for_those_that_wait() -> None:
    """Otherwise nodes that come, wait and come again one at a time keep it up for ever, and no cycle begins."""
    job = Job(Schedule(seed=1, comes=(0.0, 40.0), terms=msgspec.structs.replace(TERMS, least=3), rules=RULES))
    report = job.run()
    assert report.ends == ("failed", "failed")
    assert report.seconds < TERMS.join_limit + 10.0  # node 1 alone would wait until second 100
    verdict = job.agents[1].verdict
    assert verdict is not None and "node node0 found no place within 60 s" in verdict.detail


def test_late_node_is_a_reason_for_a_new_cycle_unless_workers_help_themselves() -> None:
    late = {"comes": (0.0, 0.2, 15.0)}
    assert (run(**late).cycles, run(**late).ends) == (2, ("completed",) * 3)
    assert (run(**late, rules=HELPED).cycles, run(**late, rules=HELPED).ends) == (1, ("completed",) * 3)


def test_surplus_node_waits_and_ends_with_the_job() -> None:
    few = {"comes": (0.0, 0.2, 3.0), "terms": msgspec.structs.replace(TERMS, most=2)}
    assert (run(**few).cycles, run(**few).ends) == (1, ("completed",) * 3)
    assert run(Crash(1, at=8.0), **few).ends == ("completed", "killed", "completed")
    signalled = run(Signalled(2, at=10.0), **few)
    assert (signalled.cycles, signalled.ends) == (1, ("completed", "completed", "preempted"))


def test_spare_waits_longer_than_its_limit_and_takes_the_place_of_a_lost_node() -> None:
    """The workers run five times as long as a node waits for a place while no cycle runs."""
    long = {"work": 300.0, "comes": (0.0, 0.2, 3.0), "terms": msgspec.structs.replace(TERMS, most=2)}
    assert run(**long).ends == ("completed",) * 3
    report = run(Crash(1, at=200.0), **long)
    assert (report.cycles, report.ends) == (2, ("completed", "killed", "completed"))
    late = run(**(long | {"comes": (0.0, 0.2, 15.0), "terms": TERMS}), rules=HELPED)
    assert (late.cycles, late.ends) == (1, ("completed",) * 3)


def test_spare_of_which_the_whole_cycle_is_lost_gives_up_at_its_limit() -> None:
    terms = msgspec.structs.replace(TERMS, most=2)
    faults, comes = (Crash(0, at=200.0), Crash(1, at=200.0)), (0.0, 0.2, 3.0)
    job = Job(Schedule(1, comes, terms, RULES, faults, work=300.0, node_hosts_store=False))
    assert job.run().ends == ("killed", "killed", "failed")
    verdict = job.agents[2].verdict
    assert verdict is not None and "node node2 found no place within 60 s" in verdict.detail


def test_workers_that_end_long_before_the_others_end_the_job_only_if_there_is_a_limit() -> None:
    assert run(Hangs(1, 0), rules=HELPED).ends == ("failed",) * 3
    unlimited = msgspec.structs.replace(HELPED, apart=None)
    assert run(Hangs(1, 0), rules=unlimited).ends != ("failed",) * 3


def test_failed_worker_and_lost_node_end_no_cycle_while_enough_nodes_are_healthy() -> None:
    report = run(Fails(1, 0, 3.0), rules=HELPED)
    assert (report.cycles, report.ends) == (1, ("completed",) * 3)
    report = run(Crash(1, at=5.0), rules=HELPED)
    assert (report.cycles, report.ends) == (1, ("completed", "killed", "completed"))
    report = run(Fails(1, 0, 3.0), Fails(2, 0, 5.0), rules=HELPED)
    assert (report.cycles, report.ends) == (2, ("completed",) * 3)


def test_nodes_that_are_signalled_together_stop_the_job_if_too_few_are_left() -> None:
    assert run(Signalled(1, at=10.0), Signalled(2, at=10.0)).ends == ("preempted",) * 3
    assert run(Signalled(2, at=10.0), rules=Rules("any-failed", Budget(3), mode="stop")).ends == ("preempted",) * 3
    assert run(Signalled(0, at=10.0)).ends == ("preempted",) * 3  # it hosts the store


def test_agent_that_fails_by_an_error_of_its_own_ends_the_job_with_a_reason() -> None:
    job = Job(Schedule(seed=1, comes=(0.0, 0.2, 0.4), terms=TERMS, rules=RULES, faults=(Breaks(1, 10.0),)))
    assert job.run().ends == ("failed",) * 3
    assert all(agent.verdict is not None and "the agent failed" in agent.verdict.detail for agent in job.agents)


@pytest.mark.parametrize("seed", [402307, 405187, 405324, 65592])
def test_job_has_one_end_where_an_agent_fails_while_others_are_told_to_stop(seed: int) -> None:
    Job(draw(seed)).run()


def test_agent_that_was_stopped_for_a_while_comes_again_as_a_newcomer() -> None:
    for number in range(25, 45):
        report = run(Pause(2, number, 12.0, frozen=True), work=40.0)
        assert report.ends == ("completed",) * 3


# -- schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(8))
def test_drawn_schedules_keep_every_invariant(block: int) -> None:
    for seed in range(250 * block, 250 * (block + 1)):
        Job(draw(seed)).run()


def test_node_that_was_told_to_leave_costs_no_restart() -> None:
    for seed in range(500):
        Job(only_sigterms(seed)).run()


def test_sigterm_to_all_agents_within_the_grace_period_is_one_preemption() -> None:
    """Also if those that are signalled last already run a later cycle, which is so in many of these schedules."""
    later = 0
    for seed in range(600):
        job = Job(all_sigterms(seed))
        report = job.run()
        signalled_ends = {(agent.verdict.outcome, agent.verdict.exit_code) for agent in job.agents if agent.verdict}
        assert set(report.ends) == {"preempted"}, seed
        assert signalled_ends == {("preempted", 143)}, seed
        assert job.referee.restarts == 0, seed
        later += report.cycles > 1
    assert later > 50


@pytest.mark.parametrize("node", range(3))
@pytest.mark.parametrize("kind", ["crash", "delay", "repeat", "pause", "partition", "signal"])
def test_fault_before_any_operation_of_an_agent_keeps_every_invariant(kind: Kind, node: int) -> None:
    for schedule in everywhere(kind, node):
        Job(schedule).run()


# -- what the simulation has found -------------------------------------------------------------------------------


def test_loss_of_all_nodes_of_a_cycle_costs_a_restart_though_none_of_them_is_left_to_say_so() -> None:
    none = Rules("any-failed", Budget(0))
    assert run(Crash(0, at=8.0), rules=none, **ONE_OF_TWO).ends == ("killed", "exhausted")
    assert run(Crash(0, at=8.0), rules=Rules("any-failed", Budget(1)), **ONE_OF_TWO).ends == ("killed", "completed")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_job_that_was_ended_does_not_run_again_where_its_last_agent_died_before_it_said_so(name: Any) -> None:
    stop = Rules("any-failed", Budget(3), mode="stop")
    for number in range(1, 60):
        run(Signalled(0, name, at=8.0), Crash(0, number), rules=stop, **ONE_OF_TWO)


def test_agent_paused_before_its_cycle_starts_no_workers_beside_the_next_cycle() -> None:
    for number in range(1, 30):
        run(Pause(0, number, 25.0), PartitionBefore(0, number + 4, 1000.0), node_hosts_store=False)


def test_slow_workers_of_a_cut_off_node_end_before_the_others_continue() -> None:
    for at in range(4, 20):
        report = run(Hangs(2, 0), Fails(1, 0, 3.0), Partition(2, float(at), 1000.0))
        assert report.ends == ("completed", "completed", "failed")


def test_workers_of_a_host_that_stood_still_and_is_cut_off_end_within_its_lease() -> None:
    Job(draw(215822)).run()


@pytest.mark.parametrize("seed", [215294, 265993])
def test_agent_is_not_declared_lost_by_one_that_stood_still_since_it_looked(seed: int) -> None:
    Job(draw(seed)).run()


def test_agent_deletes_no_keys_that_another_one_needs_though_an_earlier_one_was_counted() -> None:
    Job(draw(451590)).run()


def test_agent_declared_lost_ends_its_workers_although_no_other_agent_ends_its_cycle() -> None:
    job = {"comes": (0.6, 1.4), "terms": Terms(1, 2, join_limit=60.0, last_call=3.0), "node_hosts_store": False}
    for number in range(8, 16):
        rules = Rules("min-healthy", Budget(2), apart=30.0)
        run(Crash(0, 11), Pause(1, number, 28.5, True), rules=rules, work=3.0, comes_back=20.0, **job)


def test_lost_cycle_costs_a_restart_though_an_agent_that_was_taken_for_lost_comes_back_from_it() -> None:
    """A spare says that both nodes are lost; one of them only stood still."""
    for number in range(20, 30):
        spare = {"comes": (0.0, 0.5, 3.0), "terms": msgspec.structs.replace(TERMS, most=2)}
        job = Crash(1, at=10.0), Pause(0, number, 20.0)
        assert run(*job, **spare, rules=Rules("any-failed", Budget(0))).cycles == 1
        assert run(*job, **spare, rules=Rules("any-failed", Budget(1))).cycles == 2


@pytest.mark.parametrize("seed", [49157, 64742])
def test_restarts_are_counted_where_all_agents_of_a_cycle_are_taken_for_lost(seed: int) -> None:
    Job(draw(seed)).run()


def test_cycle_does_not_wait_for_a_node_that_was_taken_for_lost_and_waits_for_the_next_one() -> None:
    report = Job(draw(89303)).run()
    assert sorted(report.ends) == ["completed"] * 4 + ["killed"]


def test_agent_that_was_stopped_while_it_waits_for_a_place_is_not_forgotten() -> None:
    all_of_them = {"comes": (0.0, 0.2, 20.0), "terms": msgspec.structs.replace(TERMS, least=3)}
    for node in (0, 1):
        for number in range(4, 24, 2):
            report = run(Pause(node, number, 12.0, frozen=True), **all_of_them, node_hosts_store=False)
            assert report.ends == ("completed",) * 3


def test_waiting_agent_is_not_forgotten_if_the_leader_that_declares_it_lost_dies() -> None:
    """Node 2 leads. Another node leads after it, and node 1, which was stopped for a while, has to hear of its loss."""
    four = {"comes": (0.0, 0.2, 0.4, 45.0), "terms": msgspec.structs.replace(TERMS, least=4, most=4, join_limit=100.0)}
    for stopped_at in (8, 14, 20):
        for dies_at in range(30, 90):
            run(
                Pause(1, stopped_at, 14.0, frozen=True),
                Crash(2, dies_at),
                **four,
                node_hosts_store=False,
                comes_back=2.0,
            )


def test_agent_that_arrives_again_and_has_a_place_already_is_not_given_the_one_after_it() -> None:
    """Its workers would be at work in two cycles."""
    Job(draw(45555)).run()


def test_operations_that_take_effect_twice_cost_nothing() -> None:
    for number in range(1, 60):
        report = run(Repeat(1, number), Delay(2, number, 2.0))
        assert (report.cycles, report.ends) == (1, ("completed",) * 3)
