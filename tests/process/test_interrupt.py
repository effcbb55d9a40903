"""The interrupt against real signals: what it reaches, what it spares, and what cannot stop it."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from resilience.adapters.interrupt import Interrupter, Swallow
from resilience.errors import ConfigurationError, ProtocolError, RankShouldRestart
from resilience.inprocess.monitor_thread import async_raise, reraise_if_unraisable
from tests.process.forking import forked

LIMIT = 10.0  # seconds: far more than an interrupt takes, far less than the blocked calls


class Scene:
    """One interrupted call. The function is given the scene, and calls `go` where it may be struck."""

    def __init__(self, function: Callable[[Scene], Any], interrupter: Interrupter | None = None) -> None:
        self.interrupter = interrupter or Interrupter()
        self.signals = 0  # sent without success
        self.error: BaseException | None = None
        self.value: Any = None
        self.has_arrived = False
        self._go = threading.Event()
        if interrupter is None:
            self.interrupter.install()
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            self.value = self.interrupter.call(lambda: function(self))
        except BaseException as error:
            self.error = error
        self._go.set()
        watcher.join()
        if interrupter is None:
            self.interrupter.remove()

    def _watch(self) -> None:
        self._go.wait(LIMIT)
        self.has_arrived = self.interrupter.deliver_until_arrived(LIMIT, self._count)

    def _count(self) -> None:
        self.signals += 1

    def go(self) -> None:
        self._go.set()

    def endure(self, signals: int = 3) -> None:
        """Be struck by so many signals."""
        self.go()
        wanted = self.signals + signals
        while self.signals < wanted:
            time.sleep(0.001)

    @property
    def outcome(self) -> tuple[str, bool, list[Swallow]]:
        return type(self.error).__name__, self.interrupter.arrived and self.has_arrived, self.interrupter.swallows


RESTARTED = ("RankShouldRestart", True, [])


def line_of(function: Callable[..., Any], text: str) -> Swallow:
    """The place of the only line of `function` that contains `text`."""
    code = function.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    number = next(n for n in range(code.co_firstlineno, len(lines) + 1) if text in lines[n - 1])
    return Swallow(code.co_filename, number, code.co_name)


# -- what it reaches ----------------------------------------------------------------------------------


def in_python_loop(scene: Scene) -> None:
    scene.go()
    while True:
        pass


def in_sleep(scene: Scene) -> None:
    scene.go()
    time.sleep(600)


def in_event(scene: Scene) -> None:
    scene.go()
    threading.Event().wait()


def in_lock(scene: Scene) -> None:
    lock = threading.Lock()
    with lock:
        scene.go()
        lock.acquire()


def in_queue(scene: Scene) -> None:
    scene.go()
    queue.Queue[int]().get()


def in_select(scene: Scene) -> None:
    reading, _ = os.pipe()
    scene.go()
    select.select([reading], [], [])


def in_subprocess(scene: Scene) -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        scene.go()
        child.wait()
    finally:
        child.kill()
        child.wait()


PLACES = [in_python_loop, in_sleep, in_event, in_lock, in_queue, in_select, in_subprocess]


@pytest.mark.parametrize("place", PLACES)
def test_interrupt_reaches_the_main_thread(place: Callable[[Scene], None]) -> None:
    assert forked(reach, place) == RESTARTED


def reach(place: Callable[[Scene], None]) -> Any:
    return Scene(place).outcome


def test_interrupt_reaches_a_data_loader_and_its_workers_go() -> None:
    assert forked(reach_data_loader, limit=60.0) == (RESTARTED, [])


def reach_data_loader() -> Any:
    from torch.utils.data import DataLoader

    def load(scene: Scene) -> None:
        batches = iter(DataLoader(Stuck(), num_workers=2, multiprocessing_context="fork"))  # type: ignore[arg-type]
        scene.go()
        next(batches)

    scene = Scene(load)
    outcome = scene.outcome
    del scene.error  # its frames hold the loader
    gc.collect()
    return outcome, [child.cmdline() for child in psutil.Process().children()]


class Stuck:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(600)
        return index


def test_one_interrupter_serves_many_calls_and_lets_values_through() -> None:
    forked(serve_many)


def serve_many() -> None:
    interrupter = Interrupter()
    interrupter.install()
    for number in range(50):
        assert interrupter.call(lambda n=number: n) == number  # type: ignore[misc]
        assert not interrupter.arrived
        with pytest.raises(KeyError):
            interrupter.call(lambda: {}["missing"])
        assert not interrupter.arrived
        assert Scene(in_sleep, interrupter).outcome == RESTARTED
    interrupter.remove()
    assert signal.getsignal(interrupter.signal_number) == signal.SIG_DFL
    interrupter.deliver()  # too late, and harmless: by default the signal would end the process


def test_call_that_is_unwanted_when_it_begins_does_not_run() -> None:
    forked(do_not_run)


def do_not_run() -> None:
    interrupter = Interrupter()
    interrupter.install()
    ran: list[int] = []
    with pytest.raises(RankShouldRestart):
        interrupter.call(lambda: ran.append(1), unless=lambda: True)
    assert interrupter.arrived and not ran


# -- what it spares -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["condition", "queue"])
def test_no_lock_of_the_standard_library_stays_locked(kind: str) -> None:
    assert forked(count_leaks, kind, 200, limit=40.0) == (200, 0)


def count_leaks(kind: str, rounds: int) -> tuple[int, int]:
    interrupter = Interrupter()
    interrupter.install()
    leaks = arrived = 0
    for _ in range(rounds):
        condition = threading.Condition(threading.Lock())
        items: queue.Queue[int] = queue.Queue()

        def use_condition(scene: Scene, condition: threading.Condition = condition) -> None:
            scene.go()
            while True:
                with condition:
                    pass

        def use_queue(scene: Scene, items: queue.Queue[int] = items) -> None:
            scene.go()
            while True:
                items.put(1)
                items.get()

        scene = Scene(use_condition if kind == "condition" else use_queue, interrupter)
        arrived += scene.outcome == RESTARTED
        leaks += not (condition if kind == "condition" else items.mutex).acquire(blocking=False)
    interrupter.remove()
    return arrived, leaks


def test_cleanup_of_user_code_runs_to_its_end() -> None:
    forked(clean_up)


def clean_up() -> None:
    steps = []

    def work(scene: Scene) -> None:
        try:
            in_sleep(scene)
        finally:
            with contextlib.suppress(KeyError):
                try:
                    {}["missing"]  # handled inside: ours is now one down in the chain
                except KeyError:
                    scene.endure(8)
                    steps.append("endured")
                    raise

    assert Scene(work).outcome == RESTARTED
    assert steps == ["endured"]


def test_what_user_code_makes_of_it_still_counts_as_arrived() -> None:
    forked(turn_into_another)


def turn_into_another() -> None:
    def work(scene: Scene) -> None:
        try:
            in_sleep(scene)
        except BaseException as error:
            assert isinstance(error, RankShouldRestart)
            assert type(pickle.loads(pickle.dumps(error))) is RankShouldRestart
            raise ValueError("mine") from error

    assert Scene(work).outcome == ("ValueError", True, [])


def test_destructor_is_not_cut_short() -> None:
    forked(spare_destructor)


def spare_destructor() -> None:
    class Dying:
        def __init__(self, scene: Scene) -> None:
            self.scene = scene

        def __del__(self) -> None:
            self.scene.endure()
            steps.append("endured")

    steps: list[str] = []

    def work(scene: Scene) -> None:
        Dying(scene)
        time.sleep(600)

    assert Scene(work).outcome == RESTARTED
    assert steps == ["endured"]


def test_import_is_not_cut_short() -> None:
    forked(spare_import)


def spare_import() -> None:
    steps: list[str] = []

    def work(scene: Scene) -> None:
        class Finder:
            @staticmethod
            def find_spec(name: str, *_: Any) -> None:
                if name == "no_such_module":
                    scene.endure()
                    steps.append("endured")

        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
        with contextlib.suppress(ImportError):
            __import__("no_such_module")
        time.sleep(600)

    assert Scene(work).outcome == RESTARTED
    assert steps == ["endured"]


def test_interrupt_lost_in_a_callback_is_sent_again_and_the_users_hook_is_called() -> None:
    forked(lose_in_callback)


def lose_in_callback() -> None:
    hooked: list[type[BaseException]] = []

    class Target:
        pass

    def work(scene: Scene) -> None:
        target = Target()
        reference = weakref.ref(target, lambda _: in_sleep(scene))
        del target
        assert reference() is None
        time.sleep(600)

    def users_hook(unraisable: Any) -> None:
        hooked.append(unraisable.exc_type)

    sys.unraisablehook = users_hook
    scene = Scene(work)
    assert scene.outcome == RESTARTED
    assert len(hooked) == 1 and issubclass(hooked[0], RankShouldRestart)
    assert sys.unraisablehook is users_hook


# -- swallowed ----------------------------------------------------------------------------------------


def swallow_by_except(scene: Scene) -> None:
    scene.go()
    try:
        time.sleep(600)
    except BaseException: pass  # noqa: E701, S110 - the place
    time.sleep(600)


def swallow_by_suppress(scene: Scene) -> None:
    scene.go()
    with contextlib.suppress(BaseException):  # the place
        time.sleep(600)
    time.sleep(600)


def swallow_by_keeping(scene: Scene) -> None:
    scene.go()
    try:
        time.sleep(600)  # the place
    except BaseException as error:
        KEPT.append(error)
    time.sleep(600)


KEPT: list[BaseException] = []


@pytest.mark.parametrize("way", [swallow_by_except, swallow_by_suppress, swallow_by_keeping])
def test_swallowed_interrupt_is_found_with_its_place_and_sent_again(way: Callable[[Scene], None]) -> None:
    assert forked(reach, way) == ("RankShouldRestart", True, [line_of(way, "the place")])


def test_each_swallow_is_reported() -> None:
    forked(report_swallows)


def report_swallows() -> None:
    reported: list[Swallow] = []
    interrupter = Interrupter(on_swallow=reported.append)
    interrupter.install()

    def work(scene: Scene) -> None:
        for _ in range(3):
            swallow_by_return_once(scene)

    def swallow_by_return_once(scene: Scene) -> None:
        scene.go()
        try:
            time.sleep(600)
        finally:
            return  # noqa: B012

    scene = Scene(work, interrupter)
    # It got out of the function by itself after three swallows: not arrived, and not lost on the caller.
    assert scene.error is None and scene.has_arrived and not interrupter.arrived
    assert [swallow.function for swallow in reported] == ["swallow_by_return_once"] * 3
    assert reported == interrupter.swallows


# -- atomic -------------------------------------------------------------------------------------------


def test_atomic_section_ends_before_the_interrupt() -> None:
    forked(stay_whole)


def stay_whole() -> None:
    parameters = [0] * 100
    interrupter = Interrupter()
    interrupter.install()

    def work(scene: Scene) -> None:
        while True:
            with interrupter.atomic():
                for index in range(100):
                    with interrupter.atomic():
                        parameters[index] += 1
                    if index == 50:
                        scene.endure()

    for _ in range(5):
        assert Scene(work, interrupter).outcome == RESTARTED
        assert len(set(parameters)) == 1


def test_watcher_and_atomic_section_keep_each_other_out() -> None:
    forked(keep_out)


def keep_out() -> None:
    interrupter = Interrupter()
    interrupter.install()
    inside, leave, holding = threading.Event(), threading.Event(), threading.Event()
    main = threading.get_ident()
    held: list[bool] = []
    entered: list[int] = []

    def watch() -> None:
        inside.wait(LIMIT)
        with interrupter.hold_off(0.01) as has_ended:
            held.append(has_ended)
        leave.set()
        with interrupter.hold_off() as has_ended:
            held.append(has_ended)
            holding.set()
            while sys._current_frames()[main].f_code.co_name != "_enter_atomic":
                time.sleep(0.001)
            for _ in range(3):
                interrupter.deliver()
                time.sleep(0.001)
        interrupter.deliver_until_arrived(LIMIT)

    def work() -> None:
        with interrupter.atomic():
            inside.set()
            leave.wait(LIMIT)
        holding.wait(LIMIT)
        with interrupter.atomic():  # waits; interrupted meanwhile, it does not begin
            entered.append(1)
            time.sleep(600)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(RankShouldRestart):
        interrupter.call(work)
    watcher.join()
    assert held == [False, True]
    assert not entered


def test_atomic_works_outside_calls_and_in_other_threads_and_in_forked_children() -> None:
    forked(use_atomic_anywhere)


def use_atomic_anywhere() -> None:
    interrupter = Interrupter()
    interrupter.install()
    done: list[str] = []

    def use(name: str) -> None:
        with interrupter.atomic(), interrupter.atomic():
            done.append(name)

    use("main")
    thread = threading.Thread(target=use, args=("thread",))
    thread.start()
    thread.join()
    with interrupter.hold_off():  # a child that is forked now inherits a lock that nobody opens
        assert interrupter.call(lambda: forked(child_uses_atomic, interrupter)) is True
    assert done == ["main", "thread"]


def child_uses_atomic(interrupter: Interrupter) -> bool:
    with interrupter.atomic():
        os.kill(os.getpid(), interrupter.signal_number)  # and does not react to the signal
        return True


# -- other users of signals and traces ----------------------------------------------------------------


def test_signal_in_use_is_left_to_its_owner() -> None:
    forked(take_another)


def take_another() -> None:
    wanted = signal.SIGRTMIN + 9
    got: list[int] = []
    signal.signal(wanted, lambda number, _: got.append(number))
    interrupter = Interrupter()
    interrupter.install()
    assert interrupter.signal_number == wanted + 1
    assert Scene(in_sleep, interrupter).outcome == RESTARTED
    signal.raise_signal(wanted)
    assert got == [wanted]
    interrupter.remove()
    for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
        signal.signal(number, signal.SIG_IGN)
    with pytest.raises(ConfigurationError, match="no signal is free"):
        interrupter.install()


@pytest.mark.parametrize("way", ["handler", "mask"])
def test_signal_that_user_code_takes_during_the_call_is_claimed_again(way: str) -> None:
    forked(take_back, way)


def take_back(way: str) -> None:
    interrupter = Interrupter()
    interrupter.install()
    got: list[int] = []

    def work(scene: Scene) -> None:
        if way == "handler":
            signal.signal(interrupter.signal_number, lambda number, _: got.append(number))
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, {interrupter.signal_number})
        in_python_loop(scene)

    for _ in range(2):
        assert Scene(work, interrupter).outcome == RESTARTED
    assert not got


def test_users_trace_function_stays() -> None:
    forked(keep_trace)


def keep_trace() -> None:
    lines: list[str] = []

    def users_trace(*_: Any) -> Any:
        lines.append("traced")
        return users_trace

    def work(scene: Scene) -> None:
        sys.settrace(users_trace)
        condition = threading.Condition()
        scene.go()
        while True:
            with condition:
                assert sys.gettrace() is users_trace

    assert Scene(work).outcome == RESTARTED
    assert sys.gettrace() is users_trace and lines


def test_trace_is_off_after_stepping() -> None:
    forked(stop_tracing)


def stop_tracing() -> None:
    assert Scene(in_event).outcome == RESTARTED
    assert sys.gettrace() is None


def test_calls_that_cannot_work_are_refused() -> None:
    forked(refuse)


def refuse() -> None:
    interrupter = Interrupter()
    with pytest.raises(ProtocolError, match="install"):
        interrupter.call(print)
    interrupter.install()
    with pytest.raises(ProtocolError, match="nested"):
        interrupter.call(lambda: interrupter.call(print))
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            interrupter.install()
        except ProtocolError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == 1


# -- the compatible names -----------------------------------------------------------------------------


def test_async_raise_reaches_a_thread_that_runs_bytecode() -> None:
    ended: list[str] = []
    started = threading.Event()

    def loop() -> None:
        try:
            while True:
                started.set()
        except RankShouldRestart:
            ended.append("raised")

    thread = threading.Thread(target=loop)
    thread.start()
    started.wait()
    assert thread.ident is not None
    async_raise(thread.ident, RankShouldRestart, started)
    thread.join(LIMIT)
    assert ended == ["raised"]
    with pytest.raises(RuntimeError, match="does not exist"):
        async_raise(1, RankShouldRestart)


def test_reraise_if_unraisable_raises_again_in_the_main_thread() -> None:
    forked(raise_again)


def raise_again() -> None:
    class Dying:
        def __del__(self) -> None:
            raise RankShouldRestart

    sys.unraisablehook = lambda _: None
    before = sys.unraisablehook
    deadline = time.monotonic() + LIMIT
    with pytest.raises(RankShouldRestart), reraise_if_unraisable(RankShouldRestart):
        Dying()
        while time.monotonic() < deadline:
            pass
    assert sys.unraisablehook is before
