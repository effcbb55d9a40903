"""What the processes of the interrupt tests run. A body returns what the test expects, or asserts it."""

from __future__ import annotations

import contextlib
import difflib
import gc
import logging
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from resilience.errors import ConfigurationError, ProtocolError, RankShouldRestart
from resilience.inprocess.monitor_thread import async_raise, reraise_if_unraisable
from resilience.system import interrupt
from resilience.system.interrupt import Interrupter, Swallow

LIMIT = 120.0  # seconds: far more than an interrupt takes, far less than the blocked calls


@contextlib.contextmanager
def raises(kind: type[BaseException], text: str = "") -> Iterator[None]:
    raised = None
    try:
        yield
    except kind as error:
        raised = str(error)
    assert raised is not None, f"{kind.__name__} was not raised"
    assert text in raised


def deliver_until_arrived(interrupter: Interrupter, step: Callable[[], None] = lambda: None) -> bool:
    """Repeat the interrupt, as the watcher of an iteration does, until the main thread is out of the call. step:
    performed after each. Return True if it was within LIMIT."""
    call, deadline, pause = interrupter._call, time.monotonic() + LIMIT, 0.001
    while interrupter.is_armed and interrupter._call == call:
        if time.monotonic() > deadline:
            return False
        interrupter.deliver()
        time.sleep(pause)
        step()
        pause = min(2 * pause, 0.05)
    return True


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
        self.has_arrived = deliver_until_arrived(self.interrupter, self._count)

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


def in_library_loop(scene: Scene) -> None:
    scene.go()
    difflib.SequenceMatcher(None, "ab" * 20_000, "ba" * 20_000, autojunk=False).ratio()


def in_backward(scene: Scene) -> None:
    def hook(_: torch.Tensor) -> None:
        in_sleep(scene)

    leaf = torch.ones(1, requires_grad=True)
    product = leaf * 2
    product.register_hook(hook)
    product.backward()  # type: ignore[no-untyped-call]


def in_subprocess(scene: Scene) -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        scene.go()
        child.wait()
    finally:
        child.kill()
        child.wait()


def reach(place: str) -> Any:
    return Scene(globals()[place]).outcome


def reach_data_loader() -> Any:
    def load(scene: Scene) -> None:
        for _ in DataLoader(Slow(), num_workers=2, multiprocessing_context="fork"):
            scene.go()

    scene = Scene(load)
    outcome = scene.outcome
    del scene.error  # its frames hold the loader
    gc.collect()
    _, alive = psutil.wait_procs(psutil.Process().children(), LIMIT)
    return outcome, [child.cmdline() for child in alive]


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


def serve_many() -> None:
    interrupter = Interrupter()
    interrupter.install()
    for number in range(50):
        assert interrupter.call(lambda n=number: n) == number  # type: ignore[misc]
        assert not interrupter.arrived
        with raises(KeyError):
            interrupter.call(lambda: {}["missing"])
        assert not interrupter.arrived
        assert Scene(in_sleep, interrupter).outcome == RESTARTED
    # A signal that somebody else sent is no interrupt.
    assert interrupter.call(lambda: signal.raise_signal(interrupter.signal_number)) is None
    interrupter.remove()
    assert signal.getsignal(interrupter.signal_number) == signal.SIG_DFL
    interrupter.deliver()  # too late, and harmless: by default the signal would end the process


def do_not_run() -> None:
    interrupter = Interrupter()
    interrupter.install()
    ran: list[int] = []
    with raises(RankShouldRestart):
        interrupter.call(lambda: ran.append(1), unless=lambda: True)
    assert interrupter.arrived and not ran


# -- what it spares -----------------------------------------------------------------------------------


class Guarded:
    """Loops that take locks, each in a way of its own."""

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.Lock())
        self.lock = threading.Lock()
        self.items: queue.Queue[int] = queue.Queue()
        self.got: list[int] = []

    def enter_condition(self) -> None:
        with self.condition:
            pass

    def use_queue(self) -> None:
        self.items.put(1)
        self.items.get()

    def end_with_a_call(self) -> None:
        self.items.put(1)
        with self.condition:
            self.got.append(self.items.get())

    def return_from_with(self) -> int:
        self.items.put(1)
        with self.condition:
            return self.items.get()

    def release_in_finally(self) -> None:
        self.items.put(1)
        take = self.lock.acquire
        try:
            take()
            self.items.get()
        finally:
            self.lock.release()

    def catch_inside(self) -> None:
        with self.condition:
            try:
                self.items.get_nowait()
            except queue.Empty:
                self.items.qsize()

    def loop_inside(self) -> None:
        with self.lock:
            while self.got is not None:
                pass

    def switch_gradients_off(self) -> None:
        with torch.no_grad():
            pass

    def get_logger(self) -> None:
        logging.getLogger("guarded")

    @property
    def is_left_clean(self) -> bool:
        locks = [self.condition, self.lock, self.items.mutex]
        while is_logging_locked():
            locks.append(self.lock)  # taken twice: not clean
            logging._releaseLock()  # type: ignore[attr-defined]
        return torch.is_grad_enabled() and all([lock.acquire(blocking=False) for lock in locks])


def is_logging_locked() -> bool:
    """Return True if another thread could not use logging."""
    with ThreadPoolExecutor(1) as pool:
        lock = logging._lock  # type: ignore[attr-defined]
        if pool.submit(lock.acquire, blocking=False).result():
            pool.submit(lock.release).result()
            return False
    return True


def count_leaks(way: str, rounds: int, step_limit: float = interrupt.STEP_LIMIT) -> tuple[int, int]:
    interrupt.STEP_LIMIT, interrupt.FRAGILE_LIMIT = step_limit, 60.0
    sys.setswitchinterval(0.0005)  # the sender would wait 5 ms for its turn beside a busy loop
    interrupter = Interrupter()
    interrupter.install()
    leaks = arrived = 0
    for _ in range(rounds):
        guarded = Guarded()
        once = getattr(guarded, way)

        def work(scene: Scene, once: Callable[[], Any] = once) -> None:
            scene.go()
            while True:
                once()

        arrived += Scene(work, interrupter).outcome == RESTARTED
        leaks += not guarded.is_left_clean
    interrupter.remove()
    return arrived, leaks


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


def turn_into_another() -> None:
    def work(scene: Scene) -> None:
        try:
            in_sleep(scene)
        except RankShouldRestart as error:
            copy = pickle.loads(pickle.dumps(error))
            raise ValueError(type(copy).__name__) from error

    scene = Scene(work)
    assert scene.outcome == ("ValueError", True, [])
    assert str(scene.error) == "RankShouldRestart"


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
    except BaseException:
        pass  # the place
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


def hold_back_one() -> None:
    interrupter = Interrupter()
    interrupter.install()
    steps: list[str] = []

    def work() -> None:
        with interrupter.atomic():
            interrupter.deliver()  # once, by itself
            steps.append("inside")
        steps.append("behind")

    @interrupter.atomic()
    def section(step: str) -> None:
        interrupter.deliver()
        steps.append(step)

    def work_in_a_decorated_function() -> None:
        section("decorated")
        steps.append("behind")

    for function in (work, work_in_a_decorated_function, work):
        with raises(RankShouldRestart):
            interrupter.call(function)
    assert steps == ["inside", "decorated", "inside"]


def leave_what_an_exception_left_open() -> None:
    interrupter = Interrupter()
    interrupter.install()
    is_held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with interrupter.hold_off():
            is_held.set()
            release.wait(LIMIT)

    def lose_a_process(*_: object) -> None:
        release.set()
        raise ValueError("a process of mine is lost")

    def enter() -> None:
        watcher.start()
        is_held.wait(LIMIT)
        signal.signal(signal.SIGALRM, lose_a_process)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with interrupter.atomic():  # waits for the watcher; the handler raises here
            raise AssertionError("entered")

    def lose_the_exit() -> None:
        interrupter._section.acquire()  # as if the handler had raised right after it
        interrupter._depth = 1

    for body in (enter, lose_the_exit):
        watcher = threading.Thread(target=hold, daemon=True)
        with contextlib.suppress(ValueError):
            interrupter.call(body)
        release.set()
        assert interrupter._depth == 0
        is_free: list[bool] = []

        def look(is_free: list[bool] = is_free) -> None:
            with interrupter.hold_off(LIMIT) as has_ended:
                is_free.append(has_ended)

        other = threading.Thread(target=look)
        other.start()
        other.join()
        assert is_free == [True]


def catch_what_a_handler_raises_at_each_instruction_of_an_atomic_section() -> None:
    """In the function, which goes on. As a handler does that limits a read by SIGALRM."""
    interrupter = Interrupter()
    interrupter.install()
    methods = (Interrupter._enter_atomic, Interrupter._leave_atomic, Interrupter._leave_atomic_to)
    codes = [method.__code__ for method in methods]
    struck: list[str] = []

    def body() -> None:
        strike, is_struck = 0, True
        while is_struck:
            strike, is_struck, seen = strike + 1, False, 0

            def trace(frame: FrameType, event: str, _: Any, strike: int = strike) -> Any:
                nonlocal is_struck, seen
                if frame.f_code not in codes:
                    return None
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
                if event == "opcode":
                    seen += 1
                    if seen == strike:
                        is_struck = True
                        struck.append(f"{frame.f_code.co_name} {frame.f_lasti}")
                        raise ValueError("took too long")
                return trace

            sys.settrace(trace)
            try:
                with interrupter.atomic(), interrupter.atomic():
                    pass
            except ValueError:
                pass
            finally:
                sys.settrace(None)
            assert interrupter._depth == 0, struck[-1]
            is_free: list[bool] = []

            def look(is_free: list[bool] = is_free) -> None:
                with interrupter.hold_off(0.0) as has_ended:
                    is_free.append(has_ended)

            other = threading.Thread(target=look)
            other.start()
            other.join()
            assert is_free == [True], struck[-1]

    interrupter.call(body)
    assert len(struck) > 100


def keep_out() -> None:
    interrupter = Interrupter()
    interrupter.install()
    inside, leave, holding = threading.Event(), threading.Event(), threading.Event()
    main = threading.get_ident()
    held: list[bool] = []
    spent: list[float] = []  # seconds of CPU of the wait
    entered: list[int] = []

    def watch() -> None:
        inside.wait(LIMIT)
        began = time.thread_time()
        with interrupter.hold_off(1.0) as has_ended:
            held.append(has_ended)
        spent.append(time.thread_time() - began)
        leave.set()
        with interrupter.hold_off() as has_ended:
            held.append(has_ended)
            holding.set()
            while sys._current_frames()[main].f_code.co_name != "_enter_atomic":
                time.sleep(0.001)
            for _ in range(3):
                interrupter.deliver()
                time.sleep(0.001)
        deliver_until_arrived(interrupter)

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
    with raises(RankShouldRestart):
        interrupter.call(work)
    watcher.join()
    assert held == [False, True]
    assert spent[0] < 0.1  # of a second that it waited: it sleeps
    assert not entered


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
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with interrupter.hold_off():
            held.set()
            forked.wait(LIMIT)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(LIMIT)
    assert interrupter.call(lambda: fork_and_use(interrupter)) == 0
    forked.set()
    holder.join()
    assert done == ["main", "thread"]


def fork_and_use(interrupter: Interrupter) -> int:
    """Use atomic() in a child that inherits a lock which nobody there will open; return its status."""
    with contextlib.suppress(RankShouldRestart):
        interrupter.deliver()
        time.sleep(600)
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(LIMIT))  # ends it if it hangs
        with interrupter.atomic():
            os.kill(os.getpid(), interrupter.signal_number)  # the signal means nothing to a child
        os._exit(0)
    return os.waitpid(pid, 0)[1]


# -- other users of signals and traces ----------------------------------------------------------------


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
    with raises(ConfigurationError, "no signal is free"):
        interrupter.install()


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


def raise_while_claimed() -> None:
    """A scheduler's signal, whose handler ends the program, arrives while an interrupter takes back its own."""
    interrupter = Interrupter()
    interrupter.install()
    claim, wanted = interrupter._claim, [signal.SIGTERM]

    def claim_slowly() -> None:
        if interrupter.is_armed and wanted:
            signal.raise_signal(wanted.pop())
        claim()

    def work(scene: Scene) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        signal.pthread_sigmask(signal.SIG_BLOCK, {interrupter.signal_number})
        in_python_loop(scene)

    interrupter._claim = claim_slowly  # type: ignore[method-assign]
    assert Scene(work, interrupter).outcome == ("SystemExit", False, [])


def call_all_that_were_put_off() -> None:
    """Both handlers raise in our code, when the last call is over."""
    interrupter, called = Interrupter(), []

    def handle(number: int, frame: object) -> None:
        called.append(number)
        raise ValueError

    interrupter.install()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        interrupter._others.put_off(number, handle, ValueError())
    interrupter.remove()
    try:
        interrupter.raise_deferred()
    except ValueError:
        called.append(0)
    assert called == [signal.SIGUSR1, signal.SIGUSR2, 0]


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


def stop_tracing() -> None:
    assert Scene(in_event).outcome == RESTARTED
    assert sys.gettrace() is None


def refuse() -> None:
    interrupter = Interrupter()
    with raises(ProtocolError, "install"):
        interrupter.call(print)
    interrupter.install()
    with raises(ProtocolError, "nested"):
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


def raise_again() -> None:
    class Dying:
        def __del__(self) -> None:
            raise RankShouldRestart

    sys.unraisablehook = before = lambda _: None
    with raises(RankShouldRestart), reraise_if_unraisable(RankShouldRestart):
        Dying()
        any(time.sleep(0.001) for _ in range(10_000))
    assert sys.unraisablehook is before


def raise_in_thread() -> None:
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
    assert thread.ident is not None
    async_raise(thread.ident, RankShouldRestart, started)
    thread.join(LIMIT)
    assert ended == ["raised"]
    with raises(RuntimeError, "does not exist"):
        async_raise(1, RankShouldRestart)
