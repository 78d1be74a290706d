"""The clock of an arm whose process is stopped between its turns."""

from labkit.workload.arm_clocks import LiveClock


class Machine:
    """The machine's clock, and the seconds for which a process has been stopped."""

    now, stopped = 10.0, 0.0

    def stop(self, seconds):
        self.now += seconds
        self.stopped += seconds


def test_a_live_clock_stands_still_while_its_process_is_stopped():
    machine = Machine()
    clock = LiveClock(lambda: machine.stopped, lambda: machine.now)
    with clock.running():
        machine.now += 1.0
    machine.stop(5.0)
    machine.now += 0.5  # nothing has the turn, but the process runs
    with clock.running():
        assert clock() == 11.5


def test_a_stop_in_the_middle_of_a_read_is_not_counted():
    machine, reads = Machine(), []

    def now():
        reads.append(machine.now)
        if len(reads) == 1:
            machine.stop(60.0)
        return machine.now

    assert LiveClock(lambda: machine.stopped, now)() == 10.0
    assert len(reads) == 2
