import signal
import threading

import pytest

from labkit.engine.llm import defer_sigint

pytestmark = pytest.mark.usefixtures("ctrl_c")


def test_ctrl_c_is_raised_after_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_sigint():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_blocks_within_blocks_raise_at_the_end_of_the_outermost():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_sigint():
        with defer_sigint():
            signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done == [True]


def test_an_exception_of_the_block_is_not_lost():
    with pytest.raises(KeyboardInterrupt) as caught, defer_sigint():
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("of the step")
    assert "of the step" in str(caught.value.__context__)
    with pytest.raises(RuntimeError, match="of the step"), defer_sigint():
        raise RuntimeError("of the step")


def test_the_program_s_own_handler_is_called_and_stays():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(True))
    try:
        with defer_sigint():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [True]
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_there_is_nothing_to_hold():
    done = []

    def work():
        with defer_sigint():
            done.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
