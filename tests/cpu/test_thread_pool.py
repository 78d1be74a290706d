"""The thread pool of every kernel; each test runs a process with a pool of its own size."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from labkit.cpu.runtime import thread_pool
from labkit.machine import cache_entries
from labkit.machine.worker_environment import TAKES_TURNS

TEST_DIR = Path(__file__).resolve().parent
CHECKOUT = TEST_DIR.parents[1]

START = """
import ctypes, json, os, signal, sys, threading, time, traceback, warnings
import numba
import numpy as np
from pool_kernels import *
"""
# Each script has its own names, and what one raises is the result of no other.
ALL = """
def run(script):
    names, printed = dict(globals()), []
    names["print"] = printed.append
    try:
        exec(script, names)
    except BaseException:
        return {"raised": traceback.format_exc()}
    return json.loads(printed[0])

print(json.dumps([run(script) for script in json.loads(sys.argv[1])]))
"""


def run(code, threads, *arguments, start=START):
    """Run ``code`` after ``start`` in a process of so many threads; return what it printed."""
    environment = {
        **os.environ,
        "NUMBA_NUM_THREADS": str(threads),
        "NUMBA_CACHE_DIR": str(cache_entries.numba_cache_dir()),
        "PYTHONPATH": os.pathsep.join(map(str, (CHECKOUT, TEST_DIR))),
    }
    done = subprocess.run(
        [sys.executable, "-c", start + code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout) if done.stdout else None


@pytest.fixture(scope="module")
def printed():
    """A function from a script and a number of threads to what the script printed.

    All scripts of so many threads run in one process, one after the other.
    """
    known = {}

    def find(script, threads):
        if threads not in known:
            results = run(ALL, threads, json.dumps(SCRIPTS[threads]))
            known[threads] = dict(zip(SCRIPTS[threads], results, strict=True))
        return known[threads][script]

    return find


RESULTS = """
digests = []
for threads in range(1, 5):
    numba.set_num_threads(threads)
    for size in (0, 1, 2, 3, 7, 1000):
        x, indices = np.zeros(size), np.full(size, -1)
        add_one(x), unsigned(indices)
        assert (x == 1).all() and (indices == np.arange(size)).all(), (threads, size)
        assert total(np.arange(size)) == size * (size - 1) // 2, (threads, size)
    with numba.parallel_chunksize(16):
        assert total(np.arange(1000)) == 499500
    cube = np.linspace(0, 1, 3 * 5 * 7).reshape(3, 5, 7)
    digests.append(several(cube).tobytes().hex())
print(json.dumps(len(set(digests))))
"""


def test_1_to_4_threads_cover_every_range_once_with_the_same_bits(printed):
    assert printed(RESULTS, 4) == 1


ABSENT = """
# A signal takes every worker away from the pool: its handler spins until it may return.
gone, come_back = np.zeros(1, np.int64), np.zeros(1, np.int64)
GONE, BACK = gone.ctypes.data, come_back.ctypes.data

@numba.cfunc("void(int32)")
def hold(_number):
    code.fetch_add(GONE, 1)
    while code.load_atomic(BACK) == 0:
        pass

libc, x, seen = ctypes.CDLL(None), np.zeros(1000), np.zeros(64)
add_one(x), who(seen)
libc.signal(signal.SIGUSR1, ctypes.c_void_p(hold.address))
for thread in pool.threads:
    libc.pthread_kill(ctypes.c_void_p(thread), signal.SIGUSR1)
while gone[0] < len(pool.threads):
    time.sleep(0.001)
for _ in range(100):
    add_one(x)
who(seen)
alone = set(seen.tolist())
come_back[0] = 1
meeting_again = meeting()
print(json.dumps([len(pool.threads), bool((x == 101).all()), sorted(alone), meeting_again]))
"""


def test_the_caller_does_the_work_that_absent_threads_have_not_begun(printed):
    assert printed(ABSENT, 4) == [3, True, [0], True]


WAKING = """
meeting()
time.sleep(0.05)  # spins for a few ms at most
spent = time.process_time()
time.sleep(0.2)
spent = time.process_time() - spent
print(json.dumps([spent < 0.1, [meeting() for _ in range(20) if not time.sleep(0.02)]]))
"""


def test_idle_threads_sleep_and_are_woken(printed):
    assert printed(WAKING, 2) == [True, [True] * 20]


CROWDING = """
word = ctypes.c_int64.from_address
crowded = word(pool._address(code.CROWDED).value)
asleep = [word(pool._worker_address(k, code.ASLEEP).value) for k in pool._workers]
while not all(one.value for one in asleep):
    time.sleep(0.001)  # a sleeping worker marks nothing itself
now, limits = 10_000_000, []
for stopped_us in (None, 20_000):
    if stopped_us is not None:
        pool._write(code.STOPPED_US, stopped_us)
    for jump in (400, 600, 20_000, 20_001, 60_000):
        crowded.value = 0
        limits.append([spin_limit(now, now - jump), crowded.value])
crowded.value = now + 1
limits.append([spin_limit(now, now), crowded.value])
pool.uncrowd()
limits.append([spin_limit(now, now), crowded.value])
print(json.dumps(limits))
"""


def test_a_jump_makes_the_pool_crowded_except_by_a_stop_of_a_live_arm(printed):
    crowded, free = [50, 10_100_000], [2000, 0]
    jumps, live = [free, *[crowded] * 4], [free, crowded, crowded, free, free]
    assert printed(CROWDING, 2) == [*jumps, *live, [50, 10_000_001], free]


FEWER = """
digests = []
for threads in (1, 2, 3):
    numba.set_num_threads(threads)
    seen = np.full(256, -1.0)
    for _ in range(5):
        who(seen)
        assert 0 <= seen.min() and seen.max() < threads, (threads, seen)
print(json.dumps(numba.get_thread_id()))
"""


def test_a_launch_uses_no_more_threads_than_numba_allows(printed):
    assert printed(FEWER, 4) == 0


TOGETHER = """
sums = np.zeros(2)

def launch(me):
    x = np.zeros(8)
    for _ in range(50_000):
        add_one(x)
    sums[me] = x.sum()

add_one(np.zeros(8))
threads = [threading.Thread(target=launch, args=(i,)) for i in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(json.dumps(sums.tolist()))
"""


@pytest.mark.parametrize("threads", [2, 4])
def test_two_threads_launch_100_000_times_at_once(threads, printed):
    assert printed(TOGETHER, threads) == [400_000, 400_000]


FAILING = """
x = np.ones(64)
fails(x)
try:
    fails(x)
except ValueError as error:
    add_one(x)
    print(json.dumps([str(error), x.tolist() == [3.0] * 64]))
"""


def test_a_kernel_that_raises_leaves_a_pool_that_works(printed):
    assert printed(FAILING, 2) == ["larger than one", True]


def test_in_a_pool_of_one_thread_the_caller_does_all_work():
    code = "x = np.zeros(9); add_one(x); print(json.dumps([len(pool.threads), x.sum()]))"
    assert run(code, 1) == [0, 9]


ENDING = """
def launch():
    while True:
        add_one(np.zeros(64))

threading.Thread(target=launch, daemon=True).start()
time.sleep(0.05)
pool.close()
x = np.zeros(9)
add_one(x)
print(json.dumps([len(pool.threads), x.sum()]))
"""


def test_a_closed_pool_leaves_the_work_to_the_caller_and_python_ends_while_another_launches():
    assert run(ENDING, 4) == [0, 9]
    assert run("threading.Thread(target=meeting, daemon=True).start()", 2) is None


FORKED = """
warnings.simplefilter("ignore")
add_one(np.zeros(64))
child = os.fork()
if child == 0:
    x = np.zeros(64)
    add_one(x)
    os._exit(0 if (x == 1).all() and meeting() else 1)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), meeting()]))
"""


def test_a_forked_process_has_threads_of_its_own(printed):
    assert printed(FORKED, 2) == [0, True]


# A C library whose ``pthread_create`` starts ``limit`` threads and refuses the next.
REFUSING = """
import ctypes, errno

class Refusing:
    def __init__(self, libc, limit):
        self.libc, self.limit, self.started, self.joined = libc, limit, 0, 0

    def __getattr__(self, name):
        return getattr(self.libc, name)

    def pthread_create(self, *arguments):
        if self.started == self.limit:
            return errno.EAGAIN
        self.started += 1
        return self.libc.pthread_create(*arguments)

    def pthread_join(self, *arguments):
        self.joined += 1
        return self.libc.pthread_join(*arguments)
"""

REFUSED_FORK = (
    REFUSING
    + """
warnings.simplefilter("ignore")
sys.unraisablehook = lambda _: None
libc, pool._libc = pool._libc, Refusing(pool._libc, 0)
child = os.fork()
if child == 0:
    x, threads = np.zeros(64), pool.threads
    add_one(x)
    pool.close()
    os._exit(0 if (x == 1).all() and not threads else 1)
pool._libc = libc
sys.unraisablehook = sys.__unraisablehook__
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), meeting()]))
"""
)


def test_a_forked_process_that_gets_no_threads_has_none_and_computes_alone(printed):
    assert printed(REFUSED_FORK, 2) == [0, True]


SECOND_TRY = """
from labkit.cpu.runtime import thread_pool
thread_pool.choose_layer()
real, refusing = ctypes.CDLL, Refusing(ctypes.CDLL(None), 1)
ctypes.CDLL = lambda *_, **__: refusing
try:
    thread_pool.install()
except OSError as error:
    first = [error.errno == errno.EAGAIN, refusing.started, refusing.joined]
ctypes.CDLL = real
"""


def test_a_pool_that_got_no_threads_starts_at_the_next_call():
    code = "print(json.dumps([first, len(pool.threads), meeting()]))"
    assert run(code, 3, start=REFUSING + SECOND_TRY + START) == [[True, 1, 1], 2, True]


INTERRUPTED = """
x, launches = np.zeros(64), 1
add_one(x)  # compiled before the timer: the compiler's callbacks swallow an interrupt
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    while True:
        add_one(x)
        launches += 1
except KeyboardInterrupt:
    add_one(x)
    print(json.dumps(bool((x == x[0]).all() and x[0] - launches in (1, 2))))
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_ctrl_c_arrives_between_launches(printed):
    assert printed(INTERRUPTED, 2)


# Those that leave a signal's handler behind come last.
SCRIPTS = {
    2: [CROWDING, WAKING, FAILING, FORKED, REFUSED_FORK, TOGETHER],
    4: [RESULTS, FEWER, TOGETHER, ABSENT],
}
if hasattr(signal, "setitimer"):
    SCRIPTS[2].append(INTERRUPTED)


def test_the_pool_is_made_once_and_reports_its_settings():
    pool = thread_pool.install()
    assert thread_pool.install() is pool
    tuning = {"grain": 4, "spin_us": 2000, "aside_us": 500, "stopped_us": None}
    tuning |= {"crowded_us": 100_000, "crowded_spin_us": 50}
    expected = {"name": "labkit", "threads": numba.config.NUMBA_NUM_THREADS, **tuning}
    assert pool.settings == expected


def test_the_pool_of_a_live_arm_knows_that_it_is_stopped(monkeypatch):
    monkeypatch.setenv(TAKES_TURNS, "1")
    code = "word = ctypes.c_int64.from_address(pool._address(code.STOPPED_US).value).value\n"
    code += "print(json.dumps([word, pool.settings['stopped_us']]))"
    assert run(code, 2) == [20_000, 20_000]


@thread_pool.kernel("float64(float64[::1])")
def total(x):
    total = 0.0
    for i in numba.prange(len(x)):
        total += x[i]
    return total


def test_a_kernel_compiles_when_it_is_called_and_has_one_signature():
    assert total.signatures == []
    assert total(np.ones(3)) == 3
    with pytest.raises(TypeError):
        total(np.ones(3, np.float32))
    total.precompile()
    assert len(total.signatures) == 1


def test_a_pool_of_no_threads_or_too_many_is_refused():
    for threads in (0, 100_000):
        with pytest.raises(OSError, match="must be 1 to"):
            thread_pool.Pool(threads)


def test_every_parallel_kernel_of_the_package_is_on_the_pool():
    own = Path(thread_pool.__file__)
    texts = {path: path.read_text() for path in (CHECKOUT / "labkit").rglob("*.py")}
    assert [path for path, text in texts.items() if "parallel=True" in text] == [own]
